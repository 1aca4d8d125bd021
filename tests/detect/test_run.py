"""A detector over a folder: every film has a line, bad ones included; a stopped run goes on."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from afire.data.decode import fit_square, read_film
from afire.data.film import FilmInfo
from afire.data.pack import SUMMARY
from afire.detect.base import AnomalyDetector
from afire.detect.findings import JOURNAL, FilmResult
from afire.detect.run import Drawing, Drawn, RunTask, _batches, _on_film, detector_hash, run_detector, side_by_side
from afire.errors import UserError
from afire.report.detect_pictures import KINDS, picture_name

FILMS = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Smooth films in two folders, and a truncated, an empty, a blank and a coloured file."""
    rng = np.random.default_rng(0)
    films = tmp_path / "films"
    (films / "below").mkdir(parents=True)
    for number in range(FILMS):
        coarse = Image.fromarray((rng.random((5, 5)) * 255).astype(np.uint8))
        coarse.resize((40, 48), Image.Resampling.BICUBIC).save(
            films / ("below" if number % 2 else ".") / f"{number}.png"
        )
    (films / "truncated.png").write_bytes((films / "0.png").read_bytes()[:60])
    (films / "empty.jpg").touch()
    (films / "notes.txt").write_text("not a film")
    Image.new("L", (40, 40), 90).save(films / "blank.png")
    Image.fromarray((rng.random((40, 40, 3)) * 255).astype(np.uint8)).save(films / "colour.png")
    return films


def task(detector: AnomalyDetector, folder: Path, **changes: object) -> RunTask:
    made = RunTask(detector, "ab" * 32, folder, folder.parent / "out", batch=5, workers=2)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def by_name(results: list[FilmResult]) -> dict[str, FilmResult]:
    return {one.file: one for one in results}


def test_every_file_has_a_line(detector: AnomalyDetector, folder: Path) -> None:
    found = by_name(run_detector(task(detector, folder)))
    assert len(found) == FILMS + 4
    assert {name for name, one in found.items() if one.status == "unreadable"} == {"truncated.png", "empty.jpg"}
    assert found["empty.jpg"].objections == ("is empty (0 bytes); copy it again or leave it out.",)
    assert found["blank.png"].status == found["colour.png"].status == "out of domain"
    assert "colour" in found["colour.png"].objections[0] and "blank" in found["blank.png"].objections[0]
    lines = (folder.parent / "out" / JOURNAL).read_text().splitlines()
    assert len(lines) == 1 + len(found)
    assert str(folder) not in "".join(lines), "no path of the machine"


def test_scores_are_those_of_the_detector(detector: AnomalyDetector, folder: Path) -> None:
    found = by_name(run_detector(task(detector, folder)))
    image = detector.config.image
    for name in ("0.png", "below/1.png", "below/11.png"):
        square = fit_square(read_film(folder / name)[0], image.size, image.fit)
        alone = detector.score(torch.from_numpy(square)[None, None]).score[0]
        assert found[name].score == pytest.approx(float(alone), abs=1e-4)


def test_batches_side_by_side_change_nothing(
    detector: AnomalyDetector, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, most, score = [0], [0], AnomalyDetector.score

    def watched(self: AnomalyDetector, *words: object, **named: object) -> object:
        looking[0] += 1
        most[0] = max(most[0], looking[0])
        time.sleep(0.05)
        found = score(self, *words, **named)  # type: ignore[arg-type]
        looking[0] -= 1
        return found

    monkeypatch.setattr(AnomalyDetector, "score", watched)
    threads = torch.get_num_threads()
    alone = run_detector(task(detector, folder, out=tmp_path / "alone", workers=1, batch=3))
    assert most == [1]
    side = run_detector(task(detector, folder, out=tmp_path / "side", workers=3, batch=3))
    assert most[0] > 1 and torch.get_num_threads() == threads
    assert [one.file for one in side] == [one.file for one in alone], "in order"
    for one, other in zip(side, alone, strict=True):
        assert one.status == other.status and one.region_words == other.region_words
        assert one.score == pytest.approx(other.score, abs=1e-5)


@pytest.mark.parametrize(("films", "workers"), [(0, 2), (1, 8), (7, 2), (64, 2), (100, 2), (1000, 3)])
@pytest.mark.parametrize("most", [32, 3])
def test_batches_hold_every_film_once_and_are_shared_evenly(films: int, workers: int, most: int) -> None:
    jobs = [(number, f"{number}.png") for number in range(films)]
    batches = list(_batches(jobs, most, workers))
    assert [job for batch in batches for job in batch] == jobs
    sizes = [len(batch) for batch in batches]
    assert all(0 < size <= most for size in sizes) and max(sizes, default=0) - min(sizes, default=0) <= 1
    assert films <= 4 * workers or len(sizes) % workers == 0, "no thread is left alone with a whole batch at the end"


def test_a_batch_of_a_large_network_takes_several_cores(
    detector: AnomalyDetector, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [side_by_side(detector, workers) for workers in (1, 2, 64)] == [1, 2, 8]
    monkeypatch.setattr("afire.detect.run._LARGE", 0)
    assert [side_by_side(detector, workers) for workers in (1, 2, 16, 64, 256)] == [1, 1, 2, 8, 8]
    assert side_by_side(detector, 2, alone=True) == 2


def test_a_batch_keeps_its_order_with_unreadable_films(detector: AnomalyDetector, folder: Path) -> None:
    found = run_detector(task(detector, folder, batch=32, workers=1))
    assert [one.number for one in found] == list(range(len(found)))
    assert [one.file for one in found] == sorted(one.file for one in found)


def test_pictures_are_asked_for_in_other_threads_and_noted(detector: AnomalyDetector, folder: Path) -> None:
    seen: list[Drawing] = []

    def draw(drawing: Drawing) -> Drawn:
        assert threading.current_thread() is not threading.main_thread()
        seen.append(drawing)
        return Drawn({"overlay": f"{drawing.film.number}.png"}, ("a note",))

    found = run_detector(task(detector, folder, draw=draw))
    assert len(seen) == FILMS + 2, "what cannot be read cannot be drawn"
    for drawing in seen:
        out = drawing.result.status == "out of domain"
        assert (drawing.heat is None) == out and (drawing.restored is None) == out
        assert drawing.film.shown is not None and drawing.film.shown.dtype == np.uint8
    assert all(one.pictures == {"overlay": f"{one.number}.png"} for one in found if one.status != "unreadable")


def test_a_stopped_run_goes_on_and_looks_at_nothing_twice(detector: AnomalyDetector, folder: Path) -> None:
    whole = by_name(run_detector(task(detector, folder, out=folder.parent / "whole")))
    calls = 0

    def fails(drawing: Drawing) -> Drawn:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise KeyboardInterrupt
        return Drawn({})

    with pytest.raises(KeyboardInterrupt):
        run_detector(task(detector, folder, draw=fails, batch=2))
    journal = folder.parent / "out" / JOURNAL
    done = len(journal.read_text().splitlines()) - 1
    assert 0 < done < len(whole)
    with journal.open("a") as stream:
        stream.write('{"number": 3, "fil')  # truncated by the kill
    again: list[str] = []

    def draw(drawing: Drawing) -> Drawn:
        again.append(drawing.film.file)
        return Drawn({})

    found = run_detector(task(detector, folder, draw=draw, resume=True))
    assert {one.file for one in found} == set(whole) and len(found) == len(whole)
    assert len(again) <= len(whole) - done
    for one in found:
        assert one.score == (pytest.approx(whole[one.file].score, abs=1e-4) if one.score is not None else None)
    assert len({one.number for one in found}) == len(found), "numbers name pictures"
    assert len(run_detector(task(detector, folder, resume=True))) == len(whole), "nothing is left to do"


def test_results_are_not_mixed_or_overwritten(detector: AnomalyDetector, folder: Path) -> None:
    run_detector(task(detector, folder))
    with pytest.raises(UserError, match="--resume"):
        run_detector(task(detector, folder))
    with pytest.raises(UserError, match="another model"):
        run_detector(task(detector, folder, model_hash="cd" * 32, resume=True))
    with pytest.raises(UserError, match="another source"):
        run_detector(task(detector, folder / "below", out=folder.parent / "out", resume=True))
    assert len(run_detector(task(detector, folder, force=True))) == FILMS + 4


def test_starting_over_removes_what_was_drawn_of_other_films(detector: AnomalyDetector, folder: Path) -> None:
    def draw(drawing: Drawing) -> Drawn:
        number = drawing.film.number
        for name in (*(picture_name(number, kind) for kind in KINDS), f"dicom/000/{number:06d}-sc.dcm"):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).touch()
        return Drawn({})

    out = folder.parent / "out"
    run_detector(task(detector, folder, draw=draw))
    (out / "dicom" / "000" / "mine.dcm").touch()
    run_detector(task(detector, folder / "0.png", out=out, draw=draw, force=True))
    assert {path.name[:6] for path in out.glob("pictures/*/*")} == {"000000"}
    assert {path.name for path in out.glob("dicom/*/*")} == {"000000-sc.dcm", "mine.dcm"}
    run_detector(task(detector, folder / "0.png", out=out, force=True))
    assert not (out / "pictures").exists()


def test_a_pack_or_a_manifest_is_not_a_film(detector: AnomalyDetector, tmp_path: Path) -> None:
    (tmp_path / "films.csv").touch()
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / SUMMARY).write_text("{}")
    with pytest.raises(UserError, match=r"films\.csv is a manifest; give the folder"):
        run_detector(task(detector, tmp_path / "films.csv"))
    with pytest.raises(UserError, match="pack is a pack; give it with --data"):
        run_detector(task(detector, tmp_path / "pack"))


def test_an_out_inside_the_folder_is_not_looked_at(detector: AnomalyDetector, folder: Path) -> None:
    (folder / "results").mkdir()
    Image.new("L", (20, 20)).save(folder / "results" / "overlay.png")
    found = run_detector(task(detector, folder, out=folder / "results"))
    assert len(found) == FILMS + 4
    with pytest.raises(UserError, match="itself"):
        run_detector(task(detector, folder, out=folder))


def test_one_file_one_folder_level_and_mistakes(detector: AnomalyDetector, folder: Path, tmp_path: Path) -> None:
    assert [one.file for one in run_detector(task(detector, folder / "0.png"))] == ["0.png"]
    flat = run_detector(task(detector, folder, out=tmp_path / "flat", recursive=False))
    assert not any("/" in one.file for one in flat)
    with pytest.raises(UserError, match="does not exist"):
        run_detector(task(detector, folder / "nowhere", out=tmp_path / "a"))
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="no films"):
        run_detector(task(detector, tmp_path / "none", out=tmp_path / "b"))


def test_places_on_films_of_other_proportions() -> None:
    info = FilmInfo(width=100, height=200, bits=8, kind="png")
    assert _on_film(0.25, 0.25, info, "squash") == (0.25, 0.25)
    assert _on_film(0.5, 0.25, info, "letterbox") == (0.5, 0.25)
    assert _on_film(0.25, 0.5, info, "letterbox") == (0.0, 0.5), "the film begins a quarter in"
    assert _on_film(0.25, 0.0, info, "crop") == (0.25, 0.25), "a quarter is cut off at the top"


def test_places_on_a_film_that_is_turned_when_it_is_read(tmp_path: Path) -> None:
    """Stored lying on its side; upright it is 100 x 200, with a bright spot at (0.125, 0.5)."""
    upright = np.zeros((200, 100), np.uint8)
    upright[98:102, 11:14] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.rot90(upright)).save(tmp_path / "film.png", exif=exif)
    film, info = read_film(tmp_path / "film.png")
    square = fit_square(film, 64, "letterbox")
    y, x = (at / 64 for at in np.argwhere(square > 0.3).mean(axis=0) + 0.5)
    assert _on_film(x, y, info, "letterbox") == pytest.approx((0.125, 0.5), abs=0.02)


def test_the_hash_names_all_that_decides(model: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert detector_hash(copy) == detector_hash(model)
    settings = json.loads((copy / "detector.json").read_text())
    settings["settings"]["false_alarms"] = 0.3
    (copy / "detector.json").write_text(json.dumps(settings))
    assert detector_hash(copy) != detector_hash(model)

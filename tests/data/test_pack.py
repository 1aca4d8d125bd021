"""The pack: right pixels, nothing lost in a kill, bad files named, one folder for one pack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from afire.data import pack as module
from afire.data.decode import fit_square, read_film
from afire.data.manifest import Manifest, make_manifest, write_manifest
from afire.data.pack import (
    FILE_DIGEST,
    DecodedFilms,
    PackedFilms,
    PackSettings,
    open_films,
    open_manifest,
    pack,
    read_summary,
)
from afire.errors import ImageError, UserError
from tests import commands

SMALL = PackSettings(size=32)


def draw(folder: Path, count: int, bits: int = 8, side: int = 48) -> Manifest:
    """Smooth random films in ``folder``, one patient each."""
    rng = np.random.default_rng(7)
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for index in range(count):
        coarse = Image.fromarray(rng.random((6, 6), np.float32)).resize((side, side + 8), Image.Resampling.BICUBIC)
        film = np.clip(np.asarray(coarse), 0, 1)
        name = f"film{index:04d}.png"
        pixels = (film * 255).astype(np.uint8) if bits == 8 else (film * 65535).astype(np.uint16)
        Image.fromarray(pixels).save(folder / name)
        names.append(name)
    return make_manifest(pd.DataFrame({"image": names}), folder)


@pytest.mark.parametrize(("bits", "top"), [(8, 255), (16, 65535)])
def test_packed_pixels_are_the_decoded_ones(tmp_path: Path, bits: int, top: int) -> None:
    manifest = draw(tmp_path / "films", 5, bits)
    pack(manifest, tmp_path / "pack", PackSettings(size=32, bits=bits), workers=1)  # type: ignore[arg-type]
    films = PackedFilms(tmp_path / "pack")
    assert len(films) == 5 and films[0].shape == (1, 32, 32) and films[0].dtype == torch.float32
    for row in range(5):
        film, _ = read_film(manifest.path(row))
        expected = torch.from_numpy(fit_square(film, 32, "squash"))
        assert (films[row][0] - expected).abs().max() <= 0.5 / top + 1e-6
    if bits == 16:
        assert len(films[0].unique()) > 256  # 16-bit depth survived


def test_12_bits_in_a_16_bit_file_are_not_lost_in_8(tmp_path: Path) -> None:
    (tmp_path / "films").mkdir()
    ramp = np.linspace(0, 4095, 64 * 64).astype(np.uint16).reshape(64, 64)
    Image.fromarray(ramp).save(tmp_path / "films" / "film.png")
    manifest = make_manifest(pd.DataFrame({"image": ["film.png"]}), tmp_path / "films")
    pack(manifest, tmp_path / "pack", PackSettings(size=64), workers=1)
    film = PackedFilms(tmp_path / "pack")[0]
    assert len(film.unique()) > 200 and film.max() == 1.0


def test_batches_follow_the_rows_asked_for(tmp_path: Path) -> None:
    pack(draw(tmp_path / "films", 6), tmp_path / "pack", SMALL, workers=1)
    films = open_films(tmp_path / "pack")
    batch = films.batch([4, 0, 4])
    assert torch.equal(batch, torch.stack([films[4], films[0], films[4]]))


def test_a_loader_with_workers_gives_the_same_films(tmp_path: Path) -> None:
    pack(draw(tmp_path / "films", 6), tmp_path / "pack", SMALL, workers=1)
    films = PackedFilms(tmp_path / "pack")
    loader = torch.utils.data.DataLoader(films, batch_size=2, num_workers=1)
    assert torch.equal(torch.cat(list(loader)), films.batch(range(6)))


def test_processes_give_the_same_pack_as_one(tmp_path: Path) -> None:
    manifest = draw(tmp_path / "films", 70)
    one = pack(manifest, tmp_path / "one", SMALL, workers=1)
    two = pack(manifest, tmp_path / "two", SMALL, workers=2)
    assert one.hash == two.hash
    assert np.array_equal(np.load(tmp_path / "one/images.npy"), np.load(tmp_path / "two/images.npy"))


def test_a_bad_film_stops_and_a_fixed_one_continues(tmp_path: Path) -> None:
    manifest = draw(tmp_path / "films", 70)
    good = (tmp_path / "films/film0066.png").read_bytes()
    (tmp_path / "films/film0066.png").write_bytes(good[: len(good) // 2])
    with pytest.raises(UserError, match=r"film0066\.png.*--on-error skip"):
        pack(manifest, tmp_path / "pack", SMALL, workers=1)
    with pytest.raises(UserError, match="begun but not finished"):
        read_summary(tmp_path / "pack")
    (tmp_path / "films/film0066.png").write_bytes(good)
    assert pack(manifest, tmp_path / "pack", SMALL, workers=1).films == 70


def test_skipped_films_are_named_and_filled_in_once_fixed(tmp_path: Path) -> None:
    manifest = draw(tmp_path / "films", 5)
    good = (tmp_path / "films/film0002.png").read_bytes()
    (tmp_path / "films/film0002.png").write_bytes(b"")
    summary = pack(manifest, tmp_path / "pack", SMALL, on_error="skip", workers=1)
    assert summary.films == 4 and list(summary.skipped) == ["film0002.png"]
    for file in ("pack.json", "journal.jsonl"):
        assert str(tmp_path) not in (tmp_path / "pack" / file).read_text(), "where films lie is private"
    films = PackedFilms(tmp_path / "pack")
    assert films.manifest.table["image"].tolist() == [f"film{i:04d}.png" for i in (0, 1, 3, 4)]
    decoded = DecodedFilms(films.manifest, 32)
    assert (films[2] - decoded[2]).abs().max() < 0.003  # row 2 is film 3: holes do not shift films
    (tmp_path / "films/film0002.png").write_bytes(good)
    fixed = pack(manifest, tmp_path / "pack", SMALL, workers=1)
    assert fixed.films == 5 and not fixed.skipped
    assert fixed.hash == pack(manifest, tmp_path / "fresh", SMALL, workers=1).hash


def test_nothing_readable_is_one_message(tmp_path: Path) -> None:
    manifest = draw(tmp_path / "films", 2)
    for row in range(2):
        manifest.path(row).write_bytes(b"not an image")
    with pytest.raises(UserError, match="none of the 2 films could be read"):
        pack(manifest, tmp_path / "pack", SMALL, on_error="skip", workers=1)


def test_a_folder_holds_one_pack(tmp_path: Path) -> None:
    manifest = draw(tmp_path / "films", 3)
    pack(manifest, tmp_path / "pack", SMALL, workers=1)
    before = read_summary(tmp_path / "pack")
    with pytest.raises(UserError, match="size 32 there, 64 asked"):
        pack(manifest, tmp_path / "pack", PackSettings(size=64), workers=1)
    assert read_summary(tmp_path / "pack") == before


def test_a_foreign_array_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    np.save(tmp_path / "pack/images.npy", np.zeros(3))
    with pytest.raises(UserError, match=r"already holds images\.npy"):
        pack(draw(tmp_path / "films", 3), tmp_path / "pack", SMALL, workers=1)


@pytest.mark.parametrize("theirs", ["manifest.parquet", "phantom.json", "data.json"])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, theirs: str) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / theirs).write_text("mine")
    with pytest.raises(UserError, match="already holds"):
        pack(draw(tmp_path / "films", 3), tmp_path / "pack", SMALL, workers=1)
    assert [path.name for path in (tmp_path / "pack").iterdir()] == [theirs]


@pytest.mark.parametrize(
    ("file", "content"),
    [("pack.json", '{"format": 1}'), ("pack.json", "[1]"), ("images.npy", ""), ("begun.json", "[1]")],
)
def test_a_damaged_pack_is_one_message(tmp_path: Path, file: str, content: str) -> None:
    manifest = draw(tmp_path / "films", 3)
    pack(manifest, tmp_path / "pack", SMALL, workers=1)
    (tmp_path / "pack" / file).write_text(content)
    with pytest.raises(UserError, match=file):
        PackedFilms(tmp_path / "pack") if file != "begun.json" else pack(manifest, tmp_path / "pack", SMALL, workers=1)


def test_an_array_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    pack(draw(tmp_path / "films", 3), tmp_path / "pack", SMALL, workers=1)
    np.save(tmp_path / "pack/images.npy", np.zeros((2, 32, 32), np.uint8))
    with pytest.raises(UserError, match="pack again"):
        PackedFilms(tmp_path / "pack")


def test_two_writers_are_kept_apart(tmp_path: Path) -> None:
    from afire.files import folder_lock

    manifest = draw(tmp_path / "films", 3)
    with folder_lock(tmp_path / "pack", "the pack"), pytest.raises(UserError, match="another process is writing"):
        pack(manifest, tmp_path / "pack", SMALL, workers=1)


def test_a_truncated_journal_line_is_packed_again(tmp_path: Path) -> None:
    manifest = draw(tmp_path / "films", 3)
    whole = pack(manifest, tmp_path / "pack", SMALL, workers=1)
    journal = tmp_path / "pack/journal.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines[:2], lines[2][:10]]))
    assert pack(manifest, tmp_path / "pack", SMALL, workers=1).hash == whole.hash


def replace_film(manifest: Manifest, row: int, by: int) -> None:
    """Another film in its place, of the same size and time."""
    path = manifest.path(row)
    times = path.stat()
    path.write_bytes(manifest.path(by).read_bytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def same_pack(first: Path, second: Path) -> bool:
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in ("images.npy", "pack.json"))


def test_a_film_that_changed_is_packed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = draw(tmp_path / "films", 6)
    before = pack(manifest, tmp_path / "pack", SMALL, workers=1)
    reader = PackedFilms(tmp_path / "pack")
    film = reader[2].clone()
    replace_film(manifest, 2, by=4)
    after = pack(manifest, tmp_path / "pack", SMALL, workers=1)
    assert after.hash != before.hash and "packed again: film0002.png" in caplog.text
    pack(manifest, tmp_path / "fresh", SMALL, workers=1)
    assert same_pack(tmp_path / "pack", tmp_path / "fresh") and not (tmp_path / "pack/images.npy.part").exists()
    films = PackedFilms(tmp_path / "pack")
    assert torch.equal(films[2], films[4]) and films.manifest.table[FILE_DIGEST].nunique() == 5
    assert torch.equal(reader[2], film), "who has the pack open keeps the films of before"


def test_a_film_that_changed_while_packing_was_stopped_is_packed_again(tmp_path: Path) -> None:
    manifest = draw(tmp_path / "films", 70)
    good = manifest.path(66).read_bytes()
    manifest.path(66).write_bytes(b"not a film")
    with pytest.raises(UserError, match=r"film0066\.png"):
        pack(manifest, tmp_path / "pack", SMALL, workers=1)
    manifest.path(66).write_bytes(good)
    replace_film(manifest, 3, by=5)
    pack(manifest, tmp_path / "pack", SMALL, workers=1)
    pack(manifest, tmp_path / "fresh", SMALL, workers=1)
    assert same_pack(tmp_path / "pack", tmp_path / "fresh")


def test_packing_again_can_be_interrupted_and_the_film_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is done, the pack is that of before; no start mixes pixels of one content with the record of another."""
    manifest = draw(tmp_path / "films", 6)
    old = manifest.path(2).read_bytes()
    pack(manifest, tmp_path / "pack", SMALL, workers=1)
    before = PackedFilms(tmp_path / "pack").batch(range(6))
    replace_film(manifest, 2, by=4)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "_flush", killed)
        pack(manifest, tmp_path / "pack", SMALL, workers=1)
    assert torch.equal(PackedFilms(tmp_path / "pack").batch(range(6)), before)
    manifest.path(2).write_bytes(old)
    pack(manifest, tmp_path / "pack", SMALL, workers=1)
    assert torch.equal(PackedFilms(tmp_path / "pack").batch(range(6)), before)


def test_a_film_whose_file_is_gone_stays_and_one_that_is_broken_now_does_not(tmp_path: Path) -> None:
    manifest = draw(tmp_path / "films", 6)
    pack(manifest, tmp_path / "pack", SMALL, workers=1)
    manifest.path(1).unlink()
    assert pack(manifest, tmp_path / "pack", SMALL, workers=1).films == 6
    manifest.path(2).write_bytes(b"not a film")
    with pytest.raises(UserError, match=r"film0002\.png.*--on-error skip"):
        pack(manifest, tmp_path / "pack", SMALL, workers=1)
    assert len(PackedFilms(tmp_path / "pack")) == 6, "that of before, until there is another"
    assert pack(manifest, tmp_path / "pack", SMALL, "skip", workers=1).films == 5
    assert PackedFilms(tmp_path / "pack").batch(range(5)).shape == (5, 1, 32, 32)


def alter(folder: Path, row: int) -> None:
    images = np.load(folder / "images.npy", mmap_mode="r+")
    images[row, 3, 3] ^= 1
    images.flush()


def test_an_altered_film_is_refused_where_it_is_read_and_repaired_by_packing_again(tmp_path: Path) -> None:
    manifest = draw(tmp_path / "films", 6)
    pack(manifest, tmp_path / "pack", SMALL, workers=1)
    pack(manifest, tmp_path / "whole", SMALL, workers=1)
    alter(tmp_path / "pack", 3)
    films = PackedFilms(tmp_path / "pack")
    assert films.batch([0, 1, 2, 4, 5]).shape == (5, 1, 32, 32)
    for read in (lambda: films.raw([2, 3]), lambda: films.batch([3]), lambda: films[3]):
        with pytest.raises(ImageError, match=r"film0003\.png \(row 3\) are not those that were packed; the same"):
            read()
    assert list(films.altered(range(6))) == [3]
    pack(manifest, tmp_path / "pack", SMALL, workers=1)
    assert same_pack(tmp_path / "pack", tmp_path / "whole")


def test_a_film_is_compared_once(tmp_path: Path) -> None:
    """It costs a part of a millisecond, but an epoch reads every film again."""
    pack(draw(tmp_path / "films", 3), tmp_path / "pack", SMALL, workers=1)
    films = PackedFilms(tmp_path / "pack")
    with mock.patch.object(module, "pixel_digest", wraps=module.pixel_digest) as digest:
        for _ in range(3):
            films.batch([0, 1, 1])
    assert digest.call_count == 2


@pytest.mark.parametrize("damage", ["cut", "other shape", "rubbish"])
def test_a_damaged_array_is_packed_anew(tmp_path: Path, damage: str) -> None:
    manifest = draw(tmp_path / "films", 3)
    pack(manifest, tmp_path / "pack", SMALL, workers=1)
    pack(manifest, tmp_path / "whole", SMALL, workers=1)
    file = tmp_path / "pack/images.npy"
    if damage == "other shape":
        np.save(file, np.zeros((2, 32, 32), np.uint8))
    else:
        file.write_bytes(file.read_bytes()[:500] if damage == "cut" else b"rubbish")
    pack(manifest, tmp_path / "pack", SMALL, workers=1)
    assert same_pack(tmp_path / "pack", tmp_path / "whole")


@pytest.mark.slow
def test_kill_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    manifest = draw(tmp_path / "films", 320, side=300)
    write_manifest(manifest, tmp_path / "films.parquet")
    expected = pack(manifest, tmp_path / "expected", PackSettings(size=64), workers=1).hash
    out = tmp_path / "pack"
    words = ["data", "pack", "--data", tmp_path / "films.parquet", "--out", out, "--size", 64, "--quiet"]
    for workers in (1, 2):
        command = commands.start(*words, "--workers", workers, before=os.setsid)
        lines = _journal_lines(out)
        command.wait_until(lambda lines=lines: _journal_lines(out) > lines)  # type: ignore[misc]
        command.kill()
        assert not (out / "pack.json").exists()
    commands.run(*words, "--workers", 1)
    summary = json.loads((out / "pack.json").read_text())
    assert summary["hash"] == expected and summary["films"] == 320
    assert np.array_equal(np.load(out / "images.npy"), np.load(tmp_path / "expected/images.npy"))


def _journal_lines(out: Path) -> int:
    journal = out / "journal.jsonl"
    return len(journal.read_bytes().splitlines()) if journal.exists() else 0


def test_a_full_disk_ends_no_process_and_a_rerun_continues(tmp_path: Path) -> None:
    """Writing through a memory map would end the process with SIGBUS here."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "afire-test", str(disk)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root to mount a small file system")
    try:
        manifest = draw(tmp_path / "films", 80)
        settings = PackSettings(size=64)
        with pytest.raises(OSError, match=r"No space left on device: .*images\.npy"):
            pack(manifest, disk / "pack", settings, workers=1)
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        whole = pack(manifest, tmp_path / "whole", settings, workers=1)
        assert pack(manifest, disk / "pack", settings, workers=1) == whole
        assert (disk / "pack/images.npy").read_bytes() == (tmp_path / "whole/images.npy").read_bytes()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_with_its_own_manifest_is_that_manifest(tmp_path: Path) -> None:
    manifest = draw(tmp_path / "films", 3)
    write_manifest(Manifest(manifest.table.head(2), manifest.root), tmp_path / "films" / "manifest.parquet")
    assert open_manifest(tmp_path / "films").table["image"].tolist() == ["film0000.png", "film0001.png"]


def test_a_wrong_path_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    ended = commands.run("data", "pack", "--data", tmp_path / "no", "--out", tmp_path / "p", expect=2)
    assert "does not exist" in ended.stderr
    assert not (tmp_path / "p").exists()


def test_a_pack_opens_as_a_manifest_too(tmp_path: Path) -> None:
    manifest = draw(tmp_path / "films", 3)
    pack(manifest, tmp_path / "pack", SMALL, workers=1)
    assert open_manifest(tmp_path / "pack").table["image"].tolist() == manifest.table["image"].tolist()

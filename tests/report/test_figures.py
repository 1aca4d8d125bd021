"""Every figure from weights and films to its three files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from afire.errors import UserError
from afire.report.figures.classifiers import choose_cases, draw_auc, draw_gradcam
from afire.report.figures.files import FigureFiles, Source, claim, films_text, number_table
from afire.report.figures.maps import class_style, draw_landmarks, draw_tsne
from afire.report.figures.pretrained import draw_atlas, draw_restorations
from afire.tasks.gradcam import Case
from tests.figure_parts import draw_boxed_pack, make_finetuning, make_run

CPU = {"device": "cpu"}


@pytest.fixture(scope="module")
def boxed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_boxed_pack(tmp_path_factory.mktemp("figures"))


@pytest.fixture(scope="module")
def run(boxed: Path) -> Path:
    return make_run(boxed.parent / "run")


def check(files: FigureFiles, kind: str) -> dict[str, object]:
    """The three files are there and whole, at 300 dpi and a journal's width, with fonts that stay text."""
    with Image.open(files.png) as picture:
        assert picture.width in (1020, 2100) and round(picture.info["dpi"][0]) == 300
        assert np.asarray(picture.convert("L")).std() > 5
    content = files.pdf.read_bytes()
    assert content.startswith(b"%PDF") and b"/Type3" not in content
    record = json.loads(files.json.read_text())
    assert record["figure"] == kind and record["numbers"] and record["command"] and record["weights"]
    assert record["note"] == "Research software, not a medical device."
    assert number_table(files).rows
    return dict(record)


@pytest.mark.slow
def test_tsne(boxed: Path, run: Path, tmp_path: Path) -> None:
    weights = {"ours": run, "random": "random"}
    source = Source(boxed, most=36)
    files = draw_tsne(tmp_path / "tsne", weights, source, perplexity=5, neighbours=[3], **CPU)
    record = check(files, "tsne")
    assert list(files.numbers) == ["ours", "random"] and record["data"]["part"] == "test"  # type: ignore[index]
    assert sum(record["classes"].values()) == 36 == record["data"]["films"]  # type: ignore[attr-defined, index]
    assert set(record["classes"]) == {"normal", "Spot", "Haze"}  # type: ignore[call-overload]
    with pytest.raises(UserError, match="already exists; add --force"):
        draw_tsne(tmp_path / "tsne.pdf", weights, source, **CPU)


@pytest.mark.slow
def test_landmarks(boxed: Path, run: Path, tmp_path: Path) -> None:
    source = Source(boxed, subset="val", most=12)
    files = draw_landmarks(tmp_path / "marks", {"ours": run}, source, perplexity=5, neighbours=[2], **CPU)
    record = check(files, "landmarks")
    pictures = files.png.read_bytes(), files.pdf.read_bytes()
    again = draw_landmarks(tmp_path / "marks", {"ours": run}, source, perplexity=5, neighbours=[2], force=True, **CPU)
    assert again.numbers == files.numbers and pictures == (again.png.read_bytes(), again.pdf.read_bytes())
    assert record["data"]["part"] == "val"  # type: ignore[index]
    assert sum(files.numbers["ours"]["moved_films"].values()) == pytest.approx(1)


@pytest.mark.slow
def test_gradcam(boxed: Path, tmp_path: Path) -> None:
    results = {f"c{seed}": make_finetuning(tmp_path / f"c{seed}", boxed, seed) for seed in (0, 1)}
    files = draw_gradcam(tmp_path / "cam", results, boxed, show=4, **CPU)
    record = check(files, "gradcam")
    assert record["data"]["boxes"] == 20 == record["data"]["cases"]  # type: ignore[index]
    assert record["data"]["findings"] == ["Spot", "Haze"]  # type: ignore[index]
    assert files.numbers["c0"]["hit"]["chance"] == pytest.approx(144 / 1024)
    assert files.numbers["c0"]["by_finding"]["Spot"]["cases"] == 10
    assert {case["finding"] for case in record["shown"]} == {"Spot", "Haze"}  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="own test films; leave --part out"):
        draw_gradcam(tmp_path / "no", results, Source(boxed, subset="train"), **CPU)


@pytest.mark.slow
def test_restorations(boxed: Path, run: Path, tmp_path: Path) -> None:
    files = draw_restorations(tmp_path / "restored", run, Source(boxed, most=10), show=2, **CPU)
    record = check(files, "restorations")
    assert files.numbers["normal"]["untouched"]["hidden_tokens"]["mean"] == 0
    assert files.numbers["lesioned"]["z_mask"]["hidden_tokens"]["mean"] > 0
    assert len(record["shown"]) == 2  # type: ignore[arg-type]


def test_atlas(boxed: Path, run: Path, tmp_path: Path) -> None:
    files = draw_atlas(tmp_path / "atlas", run, Source(boxed, most=15), nearest=4, **CPU)
    record = check(files, "atlas")
    assert record["data"]["part"] == "train" and len(files.numbers["places"]) == 16  # type: ignore[index]
    assert len(files.numbers["places"][0]["nearest"]) == 4


def test_auc(boxed: Path, tmp_path: Path) -> None:
    results = {f"c{seed}": make_finetuning(tmp_path / f"c{seed}", boxed, seed, 0.6 + 0.1 * seed) for seed in (0, 1)}
    files = draw_auc(tmp_path / "auc", results)
    check(files, "auc")
    assert files.numbers["c1"]["Spot"]["mean"] == pytest.approx(0.7)
    raw = json.loads((results["c1"] / "result.json").read_text())
    (results["c1"] / "result.json").write_text(json.dumps({**raw, "test_hash": "other"}))
    with pytest.raises(UserError, match="tested on different films"):
        draw_auc(tmp_path / "other", results)
    draw_auc(tmp_path / "other", results, allow_different_films=True)
    with pytest.raises(UserError, match="has no Dice"):
        draw_auc(tmp_path / "dice", results, metric="dice")


def test_mistakes_are_sentences_before_anything_is_written(boxed: Path, run: Path, tmp_path: Path) -> None:
    bare = make_run(tmp_path / "bare", ["losses.restoration=0", "prototypes.enabled=false"])
    with pytest.raises(UserError, match="has no decoder"):
        draw_restorations(tmp_path / "a", bare, boxed, **CPU)
    with pytest.raises(UserError, match="keeps no prototypes"):
        draw_atlas(tmp_path / "b", bare, boxed, **CPU)
    with pytest.raises(UserError, match="no label 'Spott'; did you mean Spot"):
        draw_tsne(tmp_path / "c", {"r": run}, boxed, labels=["Spott"], **CPU)
    with pytest.raises(UserError, match="t-SNE with perplexity 30 needs at least 91 films, but there are 40"):
        draw_tsne(tmp_path / "d", {"r": run}, boxed, **CPU)
    assert not [path for path in tmp_path.iterdir() if path.suffix]


def test_where_a_figure_goes(tmp_path: Path) -> None:
    assert claim(tmp_path, "tsne", False) == tmp_path / "tsne"
    assert claim(tmp_path / "fig.PNG", "tsne", False) == tmp_path / "fig"
    assert claim(tmp_path / "v1.2", "tsne", False) == tmp_path / "v1.2"


def test_classes_differ_in_more_than_colour() -> None:
    drawn = [class_style(number) for number in range(14)]
    assert len(set(drawn)) == 14 and len({marker for _, marker in drawn[:7]}) == 7


def test_cases_are_shown_by_chance_and_one_of_each_finding_first() -> None:
    nothing = np.zeros((2, 2), bool)
    cases = [Case(row, label, [], nothing) for row, label in enumerate(["A"] * 20 + ["B", "C"])]
    chosen = choose_cases(cases, 4, np.random.default_rng(0))
    assert sorted(cases[number].label for number in chosen) == ["A", "A", "B", "C"]
    assert {choose_cases(cases, 3, np.random.default_rng(seed))[0] for seed in range(30)} > {0, 1, 2}


def test_films_in_words() -> None:
    record = {"part": "test", "films": 300, "drawn_from": 1624, "name": "nih", "seed": 2}
    assert films_text(record) == "300 of 1,624 test films of nih, drawn from seed 2"
    whole = {**record, "part": "train", "films": 5, "drawn_from": 5}
    assert films_text(whole, "normal") == "5 normal training films of nih"

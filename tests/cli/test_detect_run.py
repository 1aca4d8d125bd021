"""`afire detect run` from the command line: files in, results and a page out, one message for a mistake."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from afire.cli import app
from afire.errors import UserError
from tests.detect.conftest import model  # noqa: F401 - fixture
from tests.pacs.films import IDENTIFYING
from tests.pacs.films import film as dicom_film
from tests.pacs.libraries import libraries_talk_again  # noqa: F401 - fixture
from tests.tasks.conftest import films, packed  # noqa: F401 - fixtures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some films, one of them with the name of a formula, a DICOM film and a truncated file."""
    rng = np.random.default_rng(1)
    films_folder = tmp_path / "films"
    films_folder.mkdir()
    for name in ("a.png", "b.jpg", "=1+1.png"):
        coarse = Image.fromarray((rng.random((5, 5)) * 255).astype(np.uint8))
        coarse.resize((48, 40), Image.Resampling.BICUBIC).save(films_folder / name)
    dicom_film(films_folder / "c.dcm")
    (films_folder / "truncated.png").write_bytes(b"\x89PNG truncated")
    return films_folder


def invoke(*words: object) -> str:
    result = CliRunner().invoke(app, ["detect", "run", *map(str, words), "--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_folder_becomes_results_pictures_and_a_page(folder: Path, model: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "out"
    said = invoke(folder, "--model", model, "--out", out, "--dicom-out", "sc")
    assert "Research software, not a medical device." in said and "truncated.png" in said and "report.html" in said
    stored = json.loads((out / "results.json").read_text(encoding="utf-8"))
    by_file = {film["file"]: film for film in stored["films"]}
    assert set(by_file) == {"a.png", "b.jpg", "=1+1.png", "c.dcm", "truncated.png"}
    assert by_file["truncated.png"]["status"] == "unreadable"
    with (out / "results.csv").open(newline="", encoding="utf-8") as stream:
        assert "'=1+1.png" in {row["file"] for row in csv.DictReader(stream)}
    for film in stored["films"]:
        if film["status"] == "scored":
            assert (out / film["overlay_picture"]).is_file() and 0 < film["p_value"] <= 1
    assert (out / "legend.png").is_file() and "not a medical device" in (out / "report.html").read_text()
    everything = b"".join(file.read_bytes() for file in out.rglob("*") if file.is_file() and file.suffix != ".dcm")
    assert not [word for word in IDENTIFYING if word.encode() in everything], "who it is stays in DICOM files"
    assert [path.name for path in (out / "dicom").rglob("*.dcm")] == [f"{3:06d}-sc.dcm"]


def test_the_old_name_of_dicom_out(folder: Path, model: Path, tmp_path: Path) -> None:  # noqa: F811
    said = invoke(folder / "c.dcm", "--model", model, "--out", tmp_path / "out", "--dicom", "--no-pictures")
    assert "--dicom is now --dicom-out sc" in said
    assert len(list((tmp_path / "out/dicom").rglob("*-sc.dcm"))) == 1 and not (tmp_path / "out/pictures").exists()


def test_all_kinds_of_objects(folder: Path, model: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("highdicom")
    words = (folder / "c.dcm", "--model", model, "--out", tmp_path / "out", "--dicom-out", "sc,sr,seg,gsps")
    invoke(*words)
    names = {path.name for path in (tmp_path / "out/dicom").rglob("*.dcm")}
    assert {"000000-sc.dcm", "000000-sr.dcm"} <= names


def test_a_run_of_the_version_before_goes_on(folder: Path, model: Path, tmp_path: Path) -> None:  # noqa: F811
    """It drew film and heat of 500 films only, and its page was one file."""
    out = tmp_path / "out"
    invoke(folder, "--model", model, "--out", out)
    header, *lines = (out / "results.jsonl").read_text(encoding="utf-8").splitlines()
    old = [json.loads(line) for line in lines]
    for film in old:
        for kind in ("film", "heat"):
            if "overlay" in film["pictures"]:
                (out / film["pictures"].pop(kind)).unlink()
    kept = [json.dumps(film) for film in old[:-1]]
    (out / "results.jsonl").write_text("\n".join([header, *kept]) + "\n", encoding="utf-8")
    shutil.rmtree(out / "page")
    (out / "report.html").write_text("the page of before", encoding="utf-8")
    said = invoke(folder, "--model", model, "--out", out, "--resume")
    assert "5 films" in said and "afireFilms" in (out / "report.html").read_text(encoding="utf-8")
    assert len(list((out / "page").glob("*-films-*.js"))) == 1
    assert len((out / "results.csv").read_text(encoding="utf-8").splitlines()) == 6


def test_no_pictures_and_an_own_rate(folder: Path, model: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "out"
    said = invoke(folder / "a.png", "--model", model, "--out", out, "--no-pictures", "--false-alarms", 0.5)
    assert "0.5 (your own rate)" in " ".join(said.split())
    assert not (out / "pictures").exists() and (out / "report.html").exists()
    invoke(folder / "a.png", "--model", model, "--out", out, "--no-pictures", "--resume", "--threshold", 3)
    assert json.loads((out / "results.json").read_text())["rule"]["threshold"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume", "--force"], "give one of them"),
        (["--dicom-out", "pm"], "--dicom-out 'pm' is not a list of sc, sr, seg, gsps"),
        (["--false-alarms", "2"], "between 0 and 1"),
    ],
)
def test_mistakes(folder: Path, model: Path, tmp_path: Path, words: list[str], message: str) -> None:  # noqa: F811
    with pytest.raises(UserError, match=message):
        invoke(folder, "--model", model, "--out", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_detector(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="afire detect fit"):
        invoke(folder, "--model", folder, "--out", tmp_path / "out")

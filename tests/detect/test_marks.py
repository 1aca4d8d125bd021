"""Marks as labels: what each mark means, what a spreadsheet may have done to the file, and what a reader is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from afire.data.manifest import Manifest, make_manifest
from afire.detect.marks import COLUMNS, Mark, Marks, as_written, label_by_marks, mark_notes, read_marks
from afire.errors import UserError

HEADER = ",".join(COLUMNS)


def line(file: str, mark: str, verdict: str = "flagged", threshold: str = "1.5", model: str = "abc") -> str:
    return f"{file},{mark},{verdict},2.0,{threshold},0.1,right upper zone,,{model},0.1.0"


def marks_file(folder: Path, *lines: str, header: str = HEADER) -> Path:
    path = folder / "marks.csv"
    path.write_text("\r\n".join([header, *lines]) + "\r\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("mark", "verdict", "abnormal"),
    [
        ("agree", "flagged", 1.0),
        ("agree", "not flagged", 0.0),
        ("disagree", "flagged", 0.0),
        ("disagree", "not flagged", 1.0),
        ("unsure", "flagged", None),
        ("", "flagged", None),
        ("agree", "out of domain", None),
        ("disagree", "unreadable", None),
    ],
)
def test_what_a_mark_says(mark: str, verdict: str, abnormal: float | None) -> None:
    assert Mark("a.png", mark, verdict, 1.5, "abc").abnormal == abnormal


def test_a_file_as_the_page_saves_it(tmp_path: Path) -> None:
    found = read_marks(marks_file(tmp_path, line("a.png", "agree"), line('"b, 1.png"', "unsure", threshold="")))
    assert list(found.films) == ["a.png", "b, 1.png"] and found.name == "marks.csv"
    assert found.films["a.png"].threshold == 1.5 and found.films["b, 1.png"].threshold is None


def test_a_file_that_a_spreadsheet_has_saved_again(tmp_path: Path) -> None:
    path = tmp_path / "marks.csv"
    empty = "," * (len(COLUMNS) - 1)
    text = "\n".join([HEADER, line("a.png", "Agree"), empty, ""]).replace(",", ";")
    path.write_text("\ufeff" + text, encoding="utf-8")
    assert read_marks(path).films["a.png"].abnormal == 1.0


@pytest.mark.parametrize(
    ("cell", "name"),
    [("'=1+1.png", "=1+1.png"), ("''quoted.png", "'quoted.png"), ("'plain.png", "'plain.png"), ("a.png", "a.png")],
)
def test_the_apostrophe_of_a_guarded_name_is_taken_away(cell: str, name: str) -> None:
    assert as_written(cell) == name


@pytest.mark.parametrize(
    ("lines", "header", "message"),
    [
        ([], "image,patient", "no column 'file'; --labels takes the marks.csv"),
        ([], HEADER, "holds no marks"),
        ([line("a.png", "maybe")], HEADER, "line 2: the mark is 'maybe'; marks are agree, disagree and unsure"),
        ([line("a.png", "agree", "odd")], HEADER, "line 2: the verdict is 'odd'"),
        ([line("a.png", "agree", threshold="high")], HEADER, "'high' is not a number"),
        ([line("a.png", "agree"), line("a.png", "disagree")], HEADER, "line 3: a.png is there twice"),
        (["a.png,agree"], HEADER, "line 2: the line ends before the column 'verdict'"),
    ],
)
def test_mistakes(tmp_path: Path, lines: list[str], header: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        read_marks(marks_file(tmp_path, *lines, header=header))
    assert str(raised.value).count("\n") == 0


def test_files_that_are_not_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "film.png").write_bytes(b"\x89PNG\xff\xfe\x00")
    with pytest.raises(UserError, match="not text in UTF-8"):
        read_marks(tmp_path / "film.png")
    with pytest.raises(UserError, match="does not exist"):
        read_marks(tmp_path / "gone.csv")
    with pytest.raises(UserError, match="is a folder"):
        read_marks(tmp_path)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    table = pd.DataFrame({"image": ["a.png", "b.png", "c.png", "d.png"], "normal": [1.0, 1.0, 0.0, np.nan]})
    return make_manifest(table, tmp_path)


def test_only_marked_films_have_a_label(tmp_path: Path, manifest: Manifest) -> None:
    lines = [
        line("a.png", "agree"), line("d.png", "agree", "not flagged"), line("b.png", "unsure"),
        line("c.png", "agree", "out of domain"), line("elsewhere.png", "agree"),
    ]  # fmt: skip
    labelled, counted = label_by_marks(read_marks(marks_file(tmp_path, *lines)), manifest)
    normal = labelled.table["normal"].tolist()
    assert normal[0] == 0 and normal[3] == 1 and np.isnan(normal[1:3]).all()
    assert manifest.table["normal"].tolist()[0] == 1, "the manifest itself is as it was"
    assert counted == (
        "labels are the marks of marks.csv: 1 films abnormal, 1 normal; left out: 1 unsure, 1 without a verdict, "
        "1 not in --data"
    )


def test_marks_of_other_films(tmp_path: Path, manifest: Manifest) -> None:
    with pytest.raises(UserError, match=r"none of the 1 films in marks.csv \(the first is x.png\) is in --data"):
        label_by_marks(read_marks(marks_file(tmp_path, line("x.png", "agree"))), manifest)


def test_what_does_not_fit_is_said() -> None:
    def notes(*marks: tuple[float, str]) -> str:
        films = {str(n): Mark(str(n), "agree", "flagged", at, model) for n, (at, model) in enumerate(marks)}
        return " | ".join(mark_notes(Marks("marks.csv", "", films), {"seed-0": ("abc", 1.5)}))

    assert "favour it" in notes((1.5, "abc")) and notes((1.5, "abc")).count("|") == 0
    assert "a detector that is not tested here (xyz)" in notes((1.5, "xyz"))
    moved = notes((1.2, "abc"), (1.4, "abc"), (1.5, "abc"))
    assert "other thresholds (1.2 to 1.4) than that of the detector (1.5)" in moved
    assert "threshold" not in notes((9.0, "xyz")), "those of another detector say nothing here"

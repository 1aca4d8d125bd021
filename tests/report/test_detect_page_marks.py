"""Marks in a browser: kept, saved, opened again, and read by `afire detect eval`."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from afire.cli import app
from afire.detect.base import AnomalyDetector
from afire.detect.marks import COLUMNS, read_marks
from tests.browser import Browser
from tests.detect_page_parts import HOSTILE, MODEL, fresh, in_browser, listed

pytestmark = in_browser


def test_marks_stay_in_the_browser(opened: Browser, few: Path) -> None:
    opened.press("a", "j", "d", "j", "u", "n")
    opened.write("a nodule?")
    opened.press("Escape")
    opened.open(few)
    assert opened.text(".row.chosen .mark") == "✓"
    assert opened.run("document.querySelector('[data-mark=agree]').ariaPressed") == "true"
    opened.press("j", "j")
    assert opened.run("document.querySelector('#note').value") == "a nodule?"
    assert opened.run("document.querySelector('[data-mark=unsure]').ariaPressed") == "true"
    opened.press("k", "d")
    assert opened.text(".row.chosen .mark") == "", "the same mark again takes it back"
    opened.fill("#marked", "unsure")
    assert listed(opened) == [HOSTILE[2]]


def test_marks_are_saved_with_the_verdict_they_were_made_at(
    opened: Browser,
    detector: AnomalyDetector,
) -> None:
    opened.press("a")
    opened.run("(() => { const n = document.querySelector('#threshold-number'); n.value = ''; n.focus(); })()")
    opened.write(str(detector.threshold + 5))
    opened.press("Escape", "j", "d")
    opened.press("k")
    assert 'about "flagged"' in opened.text("#mark-words"), "the mark speaks of the threshold that was"
    opened.run("document.querySelector('#list').focus()")
    opened.press("j", "j", "n")
    opened.write('=HYPERLINK("x");=1+1')
    opened.press("Escape", "s")
    path = opened.downloaded("marks.csv")
    with path.open(newline="", encoding="utf-8") as stream:
        rows = {row["file"]: row for row in csv.DictReader(stream)}
    path.unlink()
    assert tuple(next(iter(rows.values()))) == COLUMNS and len(rows) == 3
    assert {row["model"] for row in rows.values()} == {MODEL["hash"]}
    assert rows[HOSTILE[0]]["verdict"] == "flagged" and float(rows[HOSTILE[0]]["threshold"]) == detector.threshold
    second = rows["'" + HOSTILE[1]]
    assert second["verdict"] == "not flagged" and float(second["threshold"]) == pytest.approx(detector.threshold + 5)
    assert rows[HOSTILE[2]]["note"] == "'=HYPERLINK(\"x\");'=1+1", "no cell begins as a formula does"


def test_a_saved_file_is_read_by_eval_and_by_the_page(opened: Browser, few: Path) -> None:
    opened.press("a", *["j"] * 4, "d", *["j"] * 2, "u")
    opened.press("s")
    path = opened.downloaded("marks.csv")
    found = read_marks(path).films
    assert {name: mark.abnormal for name, mark in found.items()} == {HOSTILE[0]: 1.0, HOSTILE[4]: 1.0, HOSTILE[6]: None}
    saved = path.read_text(encoding="utf-8")
    path.unlink()
    fresh(opened, few)
    assert opened.run("localStorage.length") == 0
    opened.run(
        f"(() => {{ const data = new DataTransfer(); data.items.add(new File([{json.dumps(saved)}], 'marks.csv'));"
        " const field = document.querySelector('#file'); field.files = data.files;"
        " field.dispatchEvent(new Event('change')); })()"
    )
    opened.wait_for("document.querySelector('#save').textContent === 'save marks (3)'")
    other = saved.replace(MODEL["hash"], "cd" * 32)
    opened.run(
        f"(() => {{ const data = new DataTransfer(); data.items.add(new File([{json.dumps(other)}], 'marks.csv'));"
        " const field = document.querySelector('#file'); field.files = data.files;"
        " field.dispatchEvent(new Event('change')); })()"
    )
    opened.wait_for("document.querySelector('#trouble').textContent.includes('another detector')")


def test_from_a_run_over_marks_to_an_evaluation(
    browser: Browser, model: Path, packed: Path, detector: AnomalyDetector, tmp_path: Path
) -> None:
    """`detect run`, then somebody who marks every film, then `detect eval --labels`."""
    test_films = tmp_path / "films"
    test_films.mkdir()
    for file in sorted((packed.parent / "films").glob("film*.png"))[90:]:
        shutil.copy(file, test_films)
    out, runner = tmp_path / "report", CliRunner()
    run = ["detect", "run", str(test_films), "--model", str(model), "--out", str(out), "--device", "cpu"]
    assert runner.invoke(app, run, catch_exceptions=False).exit_code == 0
    rows = {row["file"]: row for row in json.loads((out / "results.json").read_text(encoding="utf-8"))["films"]}
    scored = [row["score"] for row in rows.values() if row["status"] == "scored"]
    fresh(browser, out / "report.html")
    halfway = float(np.median(scored)) + 1e-4
    browser.fill("#threshold-number", str(halfway))
    for _ in rows:
        browser.press("a", "j")
    browser.press("Home", "u", "s")
    labels = browser.downloaded("marks.csv")
    kept = [mark for mark in read_marks(labels).films.values() if mark.abnormal is not None]
    assert all(mark.abnormal == (rows[mark.file]["score"] >= halfway) for mark in kept)
    assert len(kept) == len(scored) - 1, "all but the unsure one and those out of domain"
    evaluate = ["detect", "eval", "--model", str(model), "--data", str(packed), "--out", str(tmp_path / "result")]
    evaluated = runner.invoke(app, [*evaluate, "--labels", str(labels), "--bootstrap", "20"], catch_exceptions=False)
    labels.unlink()
    said = " ".join(evaluated.output.split())
    assert evaluated.exit_code == 0 and "1 unsure" in said and "they favour it" in said
    assert f"other thresholds ({halfway:.4g}) than that of the detector ({detector.threshold:.4g})" in said
    result = json.loads((tmp_path / "result" / "result.json").read_text(encoding="utf-8"))
    assert result["metrics"]["auc"]["mean"] == 1.0, "who agrees with everything finds the score perfect"
    assert result["config"]["labels"]["file"] == "marks.csv" and "favour" in " ".join(result["notes"])

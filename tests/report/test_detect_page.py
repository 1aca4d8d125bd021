"""The report on disk: names are text, the policy allows its own files alone, and any number of films fits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from afire.detect.base import AnomalyDetector
from afire.detect.findings import FilmResult, ranked, rule_of
from afire.report import detect_files
from afire.report.detect_files import NOTHING, region_names, visible
from afire.report.detect_page import write_detect_page
from afire.report.detect_pictures import KINDS
from tests.detect_page_parts import HOSTILE, MODEL, REGIONS, make_results, report_of, rows_of


class Elements(HTMLParser):
    """Elements and attributes as a browser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]


@pytest.fixture(scope="module")
def written(detector: AnomalyDetector, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    return write_detect_page(out, make_results(detector, out), rule_of(detector), detector, MODEL)


@pytest.fixture(scope="module")
def page(written: Path) -> str:
    return written.read_text(encoding="utf-8")


def test_names_of_films_are_not_in_the_page_and_are_plain_data_beside_it(page: str, written: Path) -> None:
    seen = Elements()
    seen.feed(page)
    assert seen.tags.count("script") == 2, "the data and the page's own"
    assert not any(name.startswith("on") for _, name, _ in seen.attributes)
    assert "<b>model" not in page and "alert(" not in page and "gnp.exe" not in page
    rows = rows_of(written)
    assert {row[1] for row in rows} == {visible(name) for name in (*HOSTILE, "hand.png", "truncated.dcm")}
    spelt = next(row for row in rows if "gnp.exe" in row[1])
    assert spelt[1] == "\\u202egnp.exe\\u2066.png" and spelt[10] == HOSTILE[4], "shown as it is, marked by its name"
    assert len(rows[0]) == 10, "a name that needs no spelling is there once"


def test_only_its_own_scripts_run_and_nothing_is_fetched(page: str) -> None:
    seen = Elements()
    seen.feed(page)
    assert not [value for _, name, value in seen.attributes if name in ("src", "href", "action", "poster", "srcset")]
    assert not re.search(r"@import|https?://|\beval\(|innerHTML|fetch\(|XMLHttpRequest", page)
    policy = next(value for tag, name, value in seen.attributes if name == "content" and "default-src" in value)
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    nonce = report_of(page)["nonce"]
    assert f"script-src 'sha256-{digest}' 'nonce-{nonce}';" in policy
    assert policy.startswith("default-src 'none'; img-src 'self';") and "connect-src" not in policy


def test_it_says_what_it_is(page: str, detector: AnomalyDetector) -> None:
    assert page.count("Research software, not a medical device.") >= 2
    assert f"{detector.scale.low:.1f} sd" in page and f"{detector.scale.high:.1f} sd and more" in page
    assert "One scale for all films" in page and "with the verdict in sight" in page
    assert f"{len(detector.calibration)} calibration normals" in page
    told = report_of(page)
    assert told["threshold"] == detector.threshold and told["model"] == MODEL["hash"]
    assert told["calibration"] == detector.calibration.normal_scores.tolist()


def test_rows_have_what_is_known_and_no_score_that_is_not_to_be_trusted(written: Path, page: str) -> None:
    rows, told = rows_of(written), report_of(page)
    assert [row[2] for row in rows] == [0] * len(HOSTILE) + [1, 2]
    assert [row[3] for row in rows[:8]] == sorted((row[3] for row in rows[:8]), reverse=True)
    assert rows[8][3] is None and "50.125" not in json.dumps(rows) and "inverted" in rows[8][5]
    assert [told["regions"][row[4]] for row in rows[:8]] == [*REGIONS * 3, REGIONS[0], NOTHING]
    assert rows[0][9] == 2 ** len(KINDS) - 1 and rows[9][9] == 0, "every kind of picture, and none"


def test_regions_are_in_order_of_their_films(detector: AnomalyDetector, tmp_path: Path) -> None:
    results = make_results(detector, tmp_path)
    assert list(region_names(results, detector.scale.low)) == [REGIONS[0], REGIONS[1], NOTHING]


def test_sheets_hold_a_thumbnail_for_each_film_in_the_order_of_rows(
    detector: AnomalyDetector,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detect_files, "ACROSS", 2)
    monkeypatch.setattr(detect_files, "ROWS", 3)
    results = make_results(detector, tmp_path)
    page = write_detect_page(tmp_path, results, rule_of(detector), detector, MODEL)
    told = report_of(page.read_text(encoding="utf-8"))
    assert len(told["chunks"]) == 4 and len(told["sheets"]["files"]) == 3
    assert len(rows_of(page)) == len(results)
    side = detect_files.THUMB
    for place, film in enumerate(ranked(results)):
        sheet = np.asarray(Image.open(tmp_path / told["sheets"]["files"][place // 4]).convert("RGB")).astype(int)
        cell = place % 4
        thumb = sheet[cell // 2 * side : (cell // 2 + 1) * side, cell % 2 * side : (cell % 2 + 1) * side]
        if not film.pictures:
            assert thumb.max() < 30, "nothing to show"
            continue
        with Image.open(tmp_path / film.pictures["overlay"]) as image:
            own = np.asarray(image.convert("RGB").resize((64, 96), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(thumb[:, 16:80] - own).mean() < 25, "its own"


def test_files_of_an_earlier_page_go_when_the_new_one_stands(detector: AnomalyDetector, tmp_path: Path) -> None:
    results = make_results(detector, tmp_path)
    write_detect_page(tmp_path, results[:3], rule_of(detector), detector, MODEL)
    before = {file.name for file in (tmp_path / "page").iterdir()}
    (tmp_path / "page" / "mine.txt").touch()
    page = write_detect_page(tmp_path, results, rule_of(detector), detector, MODEL)
    after = {file.name for file in (tmp_path / "page").iterdir()}
    assert before and not before & after and "mine.txt" in after
    assert all((tmp_path / name).is_file() for name in report_of(page.read_text(encoding="utf-8"))["chunks"])


def test_films_of_an_earlier_version_show_their_overlay(detector: AnomalyDetector, tmp_path: Path) -> None:
    """Beyond 500 films it kept no film and no heat."""
    old = make_results(detector, tmp_path)[0]
    kept = {kind: old.pictures[kind] for kind in ("overlay", "restored", "difference")}
    page = write_detect_page(tmp_path, [replace(old, pictures=kept)], rule_of(detector), detector, MODEL)
    bits = {kind: bool(rows_of(page)[0][9] >> bit & 1) for bit, kind in enumerate(KINDS)}
    assert bits == {"film": False, "heat": False, "overlay": True, "restored": True, "difference": True}


def test_marks_of_a_report_are_known_by_detector_and_folder(detector: AnomalyDetector, tmp_path: Path) -> None:
    def report_id(source: str, model_hash: str) -> str:
        (tmp_path / "results.jsonl").write_text(json.dumps({"run": {"source": source}}) + "\n", encoding="utf-8")
        about = {"name": "model", "hash": model_hash}
        page = write_detect_page(tmp_path, [FilmResult(0, "a.png", "scored", 0.0)], rule_of(detector), detector, about)
        return str(report_of(page.read_text(encoding="utf-8"))["id"])

    ids = [report_id(source, model_hash) for source, model_hash in (("x", "a"), ("x", "a"), ("y", "a"), ("x", "b"))]
    assert ids[0] == ids[1] and len(set(ids)) == 3


def test_a_page_without_pictures(detector: AnomalyDetector, tmp_path: Path) -> None:
    bare = [FilmResult(0, "a.png", "scored", 0.0), FilmResult(1, "b.png", "unreadable", objections=("is empty",))]
    page = write_detect_page(tmp_path, bare, rule_of(detector), detector, MODEL)
    told = report_of(page.read_text(encoding="utf-8"))
    assert told["sheets"]["files"] == [] and told["normal"]["mean"] == ""
    assert [row[1] for row in rows_of(page)] == ["a.png", "b.png"]


def test_a_threshold_that_flags_nothing_or_everything_is_a_number_of_json(
    detector: AnomalyDetector,
    tmp_path: Path,
) -> None:
    for threshold, told in ((np.inf, None), (-np.inf, float(np.finfo(np.float64).min))):
        rule = replace(rule_of(detector), threshold=threshold)
        page = write_detect_page(tmp_path, [FilmResult(0, "a.png", "scored", 0.0)], rule, detector, MODEL)
        assert report_of(page.read_text(encoding="utf-8"))["threshold"] == told


def test_visible() -> None:
    assert visible("a b") == "a b" and visible("a\u202eb\n") == "a\\u202eb\\n"

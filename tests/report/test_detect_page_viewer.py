"""The chosen film in a browser: zoom, window, panes side by side, and what is normal at a place."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from afire.detect.base import AnomalyDetector
from afire.detect.findings import Rule
from afire.report.detect_page import write_detect_page
from tests.browser import Browser
from tests.detect_page_parts import MODEL, at, in_browser, make_results, shown

pytestmark = in_browser


def test_zoom_and_pan(opened: Browser) -> None:
    opened.press("1")
    before = shown(opened)
    edge = int(np.flatnonzero(before[before.shape[0] // 2] > 150).min())
    middle = before.shape[1] / 2
    opened.wheel(*at(opened, 0.5, 0.5), -240)
    label = "document.querySelector('.stage').getAttribute('aria-label')"
    assert "2.0 times enlarged" in opened.run(label)
    larger = shown(opened)
    assert (larger > 50).sum() > 1.4 * (before > 50).sum()
    opened.drag(at(opened, 0.5, 0.5), (60, 0))
    moved = shown(opened)
    new = int(np.flatnonzero(moved[moved.shape[0] // 2] > 150).min())
    assert new - edge == pytest.approx(60, abs=3) and edge == pytest.approx(middle, abs=3)
    opened.press("ArrowRight", shift=True)
    again = shown(opened)
    assert int(np.flatnonzero(again[again.shape[0] // 2] > 150).min()) < new
    opened.press("+", "0")
    assert "enlarged" not in opened.run(label) and np.abs(shown(opened) - before).mean() < 2
    opened.wheel(*at(opened, 0.5, 0.5), -240)
    opened.press("j", "k")
    assert "enlarged" not in opened.run(label), "another film is shown whole"


def test_zoom_stays_at_the_pointer(opened: Browser) -> None:
    opened.press("1")
    grey = shown(opened)
    column = np.flatnonzero(grey[grey.shape[0] // 2] > 150)
    x = (float(column.min()) + 3) / grey.shape[1]  # just right of the edge
    opened.wheel(*at(opened, x, 0.5), -240)
    after = shown(opened)
    edge = int(np.flatnonzero(after[after.shape[0] // 2] > 150).min())
    assert x * after.shape[1] - edge == pytest.approx(6, abs=3), "twice as far from it"


def test_window_by_dragging(opened: Browser) -> None:
    opened.press("1")
    before = shown(opened)
    opened.drag(at(opened, 0.5, 0.5), (-200, 0), button="right")
    contrast = shown(opened)
    assert opened.text("#window-words") == "window 50 %, level 50 %"
    row = contrast.shape[0] // 2
    left, right = (contrast[row, contrast.shape[1] // 2 + by] for by in (-60, 60))
    assert left == pytest.approx(0, abs=4) and right == pytest.approx(252, abs=4), "(v - 0.5) / 0.5 + 0.5"
    opened.press("0")
    assert np.abs(shown(opened) - before).mean() < 1 and opened.text("#window-words") == ""
    opened.press("w")
    opened.drag(at(opened, 0.5, 0.5), (0, 80))
    assert opened.text("#window-words") == "window 100 %, level 70 %", "with the tool for it, and the left button"
    assert shown(opened).mean() < before.mean()
    opened.press("0", "i")
    assert shown(opened)[row, before.shape[1] // 2 - 60] == pytest.approx(255 - 60, abs=4)
    opened.press("i", "b", ",")
    assert "level 46 %" in opened.text("#window-words") and "window 87 %" in opened.text("#window-words")


def test_film_restored_and_difference_side_by_side_are_linked(opened: Browser) -> None:
    opened.press("5")
    opened.wait_for("[...document.querySelectorAll('.pane')].filter((pane) => !pane.hidden).length === 3")
    captions = opened.run("[...document.querySelectorAll('.pane figcaption')].map((one) => one.textContent)")
    assert captions == ["film under its heat", "restored", "difference"]
    opened.press("h")
    assert opened.text(".pane figcaption") == "film"
    film, restored = shown(opened, 0), shown(opened, 1)
    row, middle = film.shape[0] // 2, film.shape[1] // 2
    assert film[row, middle - 30] < 90 < film[row, middle + 30], "dark, then bright"
    assert restored[row, middle - 30] > 150 > restored[row, middle + 30], "the other way round, as it was drawn"
    opened.wheel(*at(opened, 0.5, 0.5, 1), -240)
    labels = opened.run("[...document.querySelectorAll('.stage')].map((one) => one.getAttribute('aria-label'))")
    assert all("2.0 times enlarged" in label for label in labels)
    opened.drag(at(opened, 0.5, 0.5, 2), (40, 0))
    rising = int(np.flatnonzero(shown(opened, 0)[row] > 125).min())
    falling = int(np.flatnonzero(shown(opened, 1)[row] > 125).max())
    assert rising == pytest.approx(falling, abs=4) and rising == pytest.approx(middle + 40, abs=4)
    opened.press("4")
    assert opened.text(".pane figcaption") == "difference" and not opened.run(
        "document.querySelector('#difference-scale').hidden"
    )
    opened.press("3")
    assert opened.text(".pane figcaption") == "restored"


def test_heat(opened: Browser) -> None:
    warm = shown(opened)
    opened.press("O", *"oooooooooo")
    assert opened.run("document.querySelector('#opacity').value") == "0"
    assert np.abs(shown(opened) - warm).max() > 20
    opened.press("1")
    assert opened.run("document.querySelector('#opacity-row').hidden")


def test_what_is_normal_at_a_place(opened: Browser) -> None:
    def card(number: int) -> float:
        opened.run(f"document.querySelectorAll('#patches canvas')[{number}].scrollIntoView()")
        box = opened.box("#patches canvas", number)
        picture = Image.open(io.BytesIO(opened.screenshot(clip=box))).convert("L")
        return float(np.asarray(picture).mean())

    opened.press("1")
    assert "At the most deviating place" in opened.text("#normal-words")
    frame = shown(opened)
    inside = np.flatnonzero(frame[frame.shape[0] // 2] > 30)
    left = (inside.min() + 20) / frame.shape[1]
    opened.hover(*at(opened, left, 0.15))
    assert opened.text("#normal-words").startswith("At the pointer: the pieces kept")
    assert card(0) == pytest.approx(60, abs=10), "this film is dark on its left"
    assert card(1) < 20, "normal films are black above"
    opened.wait_for("document.querySelector('#normal-words').textContent.includes('closest first')")
    assert [card(2), card(3)] == pytest.approx([50, 128], abs=6), "and the two that were kept, the darker one first"
    right = (inside.max() - 20) / frame.shape[1]
    opened.hover(*at(opened, right, 0.9))
    assert card(0) == pytest.approx(190, abs=10) and card(1) > 235, "bright on its right, white below"
    assert [card(2), card(3)] == pytest.approx([128, 50], abs=6), "the brighter one is closer"
    opened.hover(5, 5)
    assert "At the most deviating place" in opened.text("#normal-words")


def test_the_film_stays_where_it_is_while_the_pointer_moves(opened: Browser) -> None:
    """What is said about a place is now longer, now shorter; were the film to give way to it, the pointer would be
    elsewhere on it."""
    opened.press("1")
    opened.hover(5, 5)
    before = opened.box(".stage"), opened.box("#normal")
    for x, y in ((0.5, 0.5), (0.5, 0.9), (0.01, 0.5)):
        opened.hover(*at(opened, x, y))
        assert (opened.box(".stage"), opened.box("#normal")) == before, opened.text("#normal-words")


def test_a_report_of_a_detector_without_an_atlas_shows_none(
    browser: Browser,
    detector: AnomalyDetector,
    rule: Rule,
    tmp_path: Path,
) -> None:
    kept, detector.atlas = detector.atlas, None
    try:
        page = write_detect_page(tmp_path, make_results(detector, tmp_path), rule, detector, MODEL)
    finally:
        detector.atlas = kept
    browser.open(page)
    assert browser.run("document.querySelector('#normal').hidden") and browser.problems() == []


def test_old_films_and_films_without_pictures(
    browser: Browser,
    detector: AnomalyDetector,
    rule: Rule,
    tmp_path: Path,
) -> None:
    one, two, *_ = make_results(detector, tmp_path)
    old = replace(one, pictures={kind: one.pictures[kind] for kind in ("overlay", "restored", "difference")})
    browser.open(write_detect_page(tmp_path, [old, replace(two, pictures={})], rule, detector, MODEL))
    browser.wait_for("document.querySelector('.pane figcaption').textContent === 'film'")
    assert browser.run("document.querySelector('[data-view=overlay]').disabled") and shown(browser).max() > 60
    browser.press("j")
    assert browser.text("#nothing") == "No picture was drawn of this film." and browser.problems() == []

"""Reports for tests of the page of `afire detect run`, and what a browser shows of them."""

from __future__ import annotations

import io
import json
import re
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from afire.data.film import FilmInfo
from afire.detect.atlas import PATCH, NormalAtlas
from afire.detect.base import AnomalyDetector
from afire.detect.findings import FilmResult, rule_of
from afire.detect.run import Drawing, ReadFilm
from afire.report.detect_page import write_detect_page
from afire.report.detect_pictures import KINDS, Painter, picture_name
from tests.browser import CHROMIUM, MISSING, Browser

in_browser = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]
HOSTILE = [
    '"><script>alert(1)</script>.png',
    "' onmouseover='alert(2)' x='.png",
    "</script><script>alert(3)</script>.png",
    "<!--<script>.png",
    "\u202egnp.exe\u2066.png",
    "new\nline\ttab\x1b[31m.png",
    "{{ 7*7 }}{% raw %}.png",
    "ünï — 胸.png",
]
MODEL = {"name": "<b>model</b>", "hash": "ab" * 32}
REGIONS = ("right upper zone", "left lower zone")


def make_results(detector: AnomalyDetector, out: Path) -> list[FilmResult]:
    """Films on either side of the threshold with every hostile name, one out of domain, one unreadable."""
    rng = np.random.default_rng(0)
    painter = Painter(out, detector.scale, "squash")
    found = []
    for number, name in enumerate(HOSTILE):
        score = detector.threshold + (2 - number) * 0.5
        words = REGIONS[number % 2]
        sd = detector.scale.low + 1 - 2 * (number == 7)
        result = FilmResult(number, name, "scored", score, f"{words}, 4.2 sd above", words, sd, 0.3, 0.4, view="PA")
        square = rng.random((32, 32), dtype=np.float32)
        shown = (np.kron(square, np.ones((3, 2))) * 255).astype(np.uint8)
        film = ReadFilm(number, name, out, square, shown, FilmInfo(width=64, height=96, bits=8, kind="png"))
        heat = np.full((4, 4), detector.scale.high * (number % 3) / 2, np.float32)
        drawn = painter(Drawing(film, result, heat, 1 - square))
        found.append(replace(result, pictures=drawn.pictures))
    found.append(FilmResult(90, "hand.png", "out of domain", 50.125, objections=("looks <i>inverted</i>",)))
    found.append(FilmResult(91, "truncated.dcm", "unreadable", objections=("is a truncated DICOM file",)))
    return found


def report_of(page: str) -> dict[str, Any]:
    """What the page's script is told."""
    found = re.search(r'<script id="report" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def rows_of(page: Path) -> list[list[Any]]:
    """The films in the scripts beside the page, in order."""
    rows: list[list[Any]] = []
    for name in report_of(page.read_text(encoding="utf-8"))["chunks"]:
        call = re.fullmatch(r"afireFilms\((\d+),(\[.*\])\);\n", (page.parent / name).read_text(encoding="ascii"))
        assert call and int(call[1]) == len(rows)
        rows += json.loads(call[2])
    return rows


MANY = 20_000


def with_atlas(detector: AnomalyDetector) -> AnomalyDetector:
    """The same with normal films that are black above and white below, and two grey patches at each place."""
    mean = np.zeros((32, 32), np.uint8)
    mean[16:] = 255
    known = copy(detector)
    patches = np.full((4, 4, 2, PATCH, PATCH), 50, np.uint8)
    patches[:, :, 1] = 128
    known.atlas = NormalAtlas(100, mean, 4, patches)
    return known


def write_few(out: Path, detector: AnomalyDetector) -> Path:
    """Films with hostile names; the first one is dark on the left and bright on the right, restored the other way."""
    results = make_results(detector, out)
    halves = np.full((96, 64), 60, np.uint8)
    halves[:, 32:] = 190
    square = np.asarray(Image.fromarray(halves).resize((32, 32))).astype(np.float32) / 255
    film = ReadFilm(0, HOSTILE[0], out, square, halves, FilmInfo(width=64, height=96, bits=8, kind="png"))
    heat = np.zeros((4, 4), np.float32)
    heat[1, 2] = detector.scale.high
    Painter(out, detector.scale, "squash")(Drawing(film, results[0], heat, square[:, ::-1]))
    return write_detect_page(out, results, rule_of(detector), with_atlas(detector), MODEL)


def write_many(out: Path, detector: AnomalyDetector) -> Path:
    """20,000 films, one of them a hand; pictures of the first few only, the others are lost."""
    make_results(detector, out)
    scores = np.sort(np.random.default_rng(5).normal(detector.threshold - 1, 1, MANY))[::-1]
    results = []
    for number, score in enumerate(scores.tolist()):
        words, pictures = REGIONS[number % 2], {kind: picture_name(number, kind) for kind in KINDS}
        about = (number, f"ward/{number:05d}.png", "scored", score, f"{words}, high", words, detector.scale.low + 1)
        results.append(FilmResult(*about, x=0.5, y=0.5, pictures=pictures))
    results[-1] = FilmResult(MANY - 1, "hand.png", "out of domain", 9.0, objections=("a hand",))
    return write_detect_page(out, results, rule_of(detector), detector, MODEL)


def fresh(browser: Browser, page: Path) -> Browser:
    """The page as it is the first time."""
    browser.open(page)
    browser.run("localStorage.clear()")
    browser.open(page)
    return browser


def listed(browser: Browser) -> list[str]:
    """The files of the rows in the document, from top to bottom."""
    return list(
        browser.run(
            "[...document.querySelectorAll('.row.film')].filter((row) => !row.hidden)"
            ".sort((a, b) => Number(a.ariaRowIndex) - Number(b.ariaRowIndex)).map((row) => row.dataset.file)"
        )
    )


def chosen(browser: Browser) -> str:
    return browser.text("#name")


def shown(browser: Browser, number: int = 0) -> np.ndarray:
    """What a pane shows, grey (H, W), without a pointer over it."""
    browser.hover(5, 5)
    data = browser.screenshot(clip=browser.box(".stage", number))
    return np.asarray(Image.open(io.BytesIO(data)).convert("L")).astype(int)


def at(browser: Browser, x: float, y: float, number: int = 0) -> tuple[float, float]:
    """A point of a pane on the screen, from its fractions."""
    box = browser.box(".stage", number)
    return box["x"] + x * box["width"], box["y"] + y * box["height"]

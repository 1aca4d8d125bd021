"""The page of `afire detect run` with many films in headless Chromium: how long it takes, and whether it scrolls.

python benchmarks/detect_page.py [--films 5000 20000] [--drawn 200] [--screenshot FILE]

Scores, names and regions are drawn; pictures are those of ``--drawn`` phantom films, linked for all others, so that
every row has a thumbnail. Without a graphics card the browser draws on the CPU. Numbers are those of one run: seconds
to write the page and to open it; milliseconds from one picture of the screen to the next (16.7 is every one) while the
list runs from its first to its last film in five seconds, as when the scroll bar is dragged, and while it runs
at fifteen films a second, and of these the CPU time of the page's main thread, which a busy machine does not change;
and milliseconds that the page needs to answer.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from detect import random_detector
from PIL import Image
from timing import machine

from afire.data.film import FilmInfo
from afire.data.phantom.film import draw_film
from afire.detect.atlas import NormalAtlas
from afire.detect.findings import SCORED, FilmResult, rule_of
from afire.detect.maps import MapDetector
from afire.detect.run import Drawing, ReadFilm
from afire.report.detect_page import write_detect_page
from afire.report.detect_pictures import KINDS, Painter, picture_name

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.browser import CHROMIUM, MISSING, Browser

SIDE = 512
REGIONS = [f"{side} {zone} zone" for side in ("right", "left") for zone in ("upper", "middle", "lower")]
SCROLL = """
new Promise((done) => {
  const list = document.querySelector("#list"), end = PIXELS || list.scrollHeight, times = [];
  const begin = performance.now();
  const on = (now) => {
    times.push(now);
    const share = (performance.now() - begin) / 5000;
    list.scrollTop = Math.min(share, 1) * end;
    if (share < 1) requestAnimationFrame(on);
    else done(times.slice(1).map((time, number) => time - times[number]));
  };
  requestAnimationFrame(on);
})
"""
ANSWER = """
new Promise((done) => {
  const begin = performance.now();
  ACT;
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begin)));
})
"""
ACTS = {
    "threshold": "const f = document.querySelector('#threshold'); f.value = 300; f.dispatchEvent(new Event('input'))",
    "search": "const f = document.querySelector('#search'); f.value = '77'; f.dispatchEvent(new Event('input'))",
    "order by name": "document.querySelector('button[data-key=file]').click()",
}


def make_detector() -> MapDetector:
    images = np.stack([draw_film(0, index, 128).image for index in range(16)]).astype(np.float32)
    detector = random_detector("tiny", 128, torch_of(images))
    mean = (images.mean(axis=0) * 255).astype(np.uint8)
    detector.atlas = NormalAtlas(len(images), mean, 16)
    return detector


def torch_of(images: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(images)[:, None]


def draw_pictures(out: Path, detector: MapDetector, drawn: int, films: int) -> None:
    """Pictures of phantoms with a warm place each, and links to them for all further films."""
    painter = Painter(out, detector.scale, "squash")
    rng = np.random.default_rng(0)
    for number in range(drawn):
        shown = (draw_film(1, number, SIDE).image * 255).astype(np.uint8)
        square = np.asarray(Image.fromarray(shown).resize((128, 128)), np.float32) / np.float32(255)
        heat = rng.normal(0, 0.6, detector.grid).astype(np.float32)
        row, column = rng.integers(1, np.array(detector.grid) - 1)
        heat[row - 1 : row + 2, column - 1 : column + 2] += rng.uniform(1, 5)
        film = ReadFilm(number, "", out, square, shown, FilmInfo(width=SIDE, height=SIDE, bits=8, kind="png"))
        painter(Drawing(film, FilmResult(number, "", "scored"), heat, np.clip(square + 0.02, 0, 1)))
    for number in range(drawn, films):
        for kind in KINDS:
            path = out / picture_name(number, kind)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(out / picture_name(number % drawn, kind), path)


def draw_results(detector: MapDetector, films: int) -> list[FilmResult]:
    rng = np.random.default_rng(1)
    results = []
    for number, score in enumerate(rng.normal(detector.threshold - 2, 1.2, films).tolist()):
        words, pictures = REGIONS[number % len(REGIONS)], {kind: picture_name(number, kind) for kind in KINDS}
        sd = float(rng.uniform(0.5, 6) * detector.scale.low)
        message = f"{words}, {sd:.1f} sd above normal films there"
        name = f"ward-{number % 7}/film-{number:06d}.png"
        film = FilmResult(number, name, SCORED, score, message, words, sd, 0.4, 0.4, "PA", pictures=pictures)
        results.append(film)
    return results


def measure_page(out: Path, detector: MapDetector, films: int, drawn: int, picture: Path | None) -> dict[str, Any]:
    draw_pictures(out, detector, drawn, films)
    results = draw_results(detector, films)
    begin = time.perf_counter()
    page = write_detect_page(out, results, rule_of(detector), detector, {"name": "drawn", "hash": "0" * 64})
    written = time.perf_counter() - begin
    browser = Browser(out / "browser")
    try:
        begin = time.perf_counter()
        browser.open(page)
        opened = time.perf_counter() - begin
        whole = scroll(browser, 0)
        browser.run("document.querySelector('#list').scrollTop = 0")
        slow = scroll(browser, 5 * 15 * 72)
        answers = {name: browser.run(ANSWER.replace("ACT", act)) for name, act in ACTS.items()}
        rows = browser.run("document.querySelectorAll('.row.film').length")
        if picture is not None:
            browser.open(page)
            time.sleep(1)
            browser.screenshot(picture)
    finally:
        browser.close()
    return {
        "films": films,
        "page written, s": round(written, 1),
        "beside it, MB": round(sum(file.stat().st_size for file in (out / "page").iterdir()) / 1e6, 1),
        "opened, s": round(opened, 2),
        "rows in the document": rows,
        "whole list in 5 s, ms a picture": whole,
        "15 films a second, ms a picture": slow,
        **{f"{name}, ms": round(took) for name, took in answers.items()},
    }


def scroll(browser: Browser, pixels: int) -> str:
    """From the first film on, so many pixels or all; what the pictures of the screen took."""
    before = browser.busy()
    times = browser.run(SCROLL.replace("PIXELS", str(pixels)))
    busy = 1000 * (browser.busy() - before) / len(times)
    middle, late, worst = np.quantile(times, [0.5, 0.95, 1.0])
    return f"median {middle:.1f}, 95 % {late:.1f}, longest {worst:.1f}; CPU {busy:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--films", type=int, nargs="+", default=[5000, 20_000])
    parser.add_argument("--drawn", type=int, default=200, help="films that are drawn; all others are links to them")
    parser.add_argument("--screenshot", type=Path, help="a PNG of the page with the most films")
    chosen = parser.parse_args()
    if CHROMIUM is None:
        sys.exit(MISSING)
    print(machine())
    detector = make_detector()
    for films in sorted(chosen.films):
        with tempfile.TemporaryDirectory() as name:
            picture = chosen.screenshot if films == max(chosen.films) else None
            for what, value in measure_page(Path(name), detector, films, chosen.drawn, picture).items():
                print(f"{what:34} {value}")


if __name__ == "__main__":
    main()

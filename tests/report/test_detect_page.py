"""The report: complete in itself, escaped, and alive in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from afire.data.film import FilmInfo
from afire.detect.base import AnomalyDetector
from afire.detect.findings import FilmResult, rule_of
from afire.detect.run import Drawing, ReadFilm
from afire.report import detect_page
from afire.report.detect_page import render_detect_page, visible, write_detect_page
from afire.report.detect_pictures import Painter
from tests.detect.conftest import detector, model  # noqa: F401 - fixtures
from tests.tasks.conftest import films, packed  # noqa: F401 - fixtures

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


class Elements(HTMLParser):
    """Elements and attributes as a browser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]


def make_results(detector: AnomalyDetector, out: Path) -> list[FilmResult]:  # noqa: F811
    """Films on either side of the threshold with every hostile name, one out of domain, one unreadable."""
    rng = np.random.default_rng(0)
    painter = Painter(out, detector.scale, "squash", "ab")
    found = []
    for number, name in enumerate(HOSTILE):
        score = detector.threshold + (2 - number) * 0.5
        result = FilmResult(
            number, name, "scored", score, "right upper zone, 4.2 sd above", "", 4.2, 0.3, 0.4, view="PA"
        )
        square = rng.random((32, 32), dtype=np.float32)
        shown = (np.kron(square, np.ones((3, 2))) * 255).astype(np.uint8)
        film = ReadFilm(number, name, out, square, shown, FilmInfo(width=64, height=96, bits=8, kind="png"))
        heat = np.full((4, 4), detector.scale.high * (number % 3) / 2, np.float32)
        drawn = painter(Drawing(film, result, heat, 1 - square))
        found.append(FilmResult(**{**vars(result), "pictures": drawn.pictures}))
    found.append(FilmResult(90, "hand.png", "out of domain", 50.0, objections=("looks <i>inverted</i>",)))
    found.append(FilmResult(91, "torn.dcm", "unreadable", objections=("is a truncated DICOM file",)))
    return found


@pytest.fixture(scope="module")
def written(detector: AnomalyDetector, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    out = tmp_path_factory.mktemp("results")
    return write_detect_page(out, make_results(detector, out), rule_of(detector), detector, MODEL)


@pytest.fixture(scope="module")
def page(written: Path) -> str:
    return written.read_text(encoding="utf-8")


def test_hostile_names_are_text(page: str) -> None:
    seen = Elements()
    seen.feed(page)
    assert seen.tags.count("script") == 2, "the data and the page's own"
    assert not any(name.startswith("on") for _, name, _ in seen.attributes)
    assert {"i", "b"} & set(seen.tags) <= {"i", "b"} and "<i>inverted" not in page and "<b>model" not in page
    shown = [value for tag, name, value in seen.attributes if tag == "tr" and name == "data-file"]
    assert HOSTILE[0] in shown and HOSTILE[6] in shown and HOSTILE[7] in shown
    assert "\u202e" not in page and "\x1b" not in page
    assert "\\u202egnp.exe" in page and "new\\nline\\ttab\\x1b[31m" in page


def test_nothing_is_fetched_and_only_its_own_script_runs(page: str) -> None:
    seen = Elements()
    seen.feed(page)
    for tag, name, value in seen.attributes:
        if name in ("src", "href", "action", "data", "poster", "srcset"):
            assert value.startswith("data:image/"), (tag, name, value[:60])
    assert not re.search(r"url\(|@import|https?://", page)
    policy = next(value for tag, name, value in seen.attributes if name == "content" and "default-src" in value)
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_it_says_what_it_is(page: str, detector: AnomalyDetector) -> None:  # noqa: F811
    assert page.count("Research software, not a medical device.") >= 2
    assert f"{detector.scale.low:.1f} sd" in page and f"{detector.scale.high:.1f} sd and more" in page
    assert "One scale for all films" in page
    assert f"{len(detector.calibration)} calibration normals" in page
    assert 'id="line"' in page, "the threshold between the films that alarm and the others"


def test_scores_of_films_out_of_domain_are_not_shown(page: str) -> None:
    row = re.search(r'<tr class="film out.*?</tr>', page, re.DOTALL)
    assert row and "50" not in row.group() and "inverted" in row.group()


def test_the_data_holds_every_picture(page: str) -> None:
    data = json.loads(re.search(r'<script id="films" type="application/json">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert set(data) == {str(number) for number in range(len(HOSTILE))}
    assert set(data["0"]) == {"x", "y", "film", "heat", "restored", "difference"}


def test_many_films_have_thumbnails_and_links(
    detector: AnomalyDetector,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detect_page, "MOST_ON_PAGE", 5)
    monkeypatch.setattr(detect_page, "MOST_ROWS", 6)
    text = render_detect_page(tmp_path, make_results(detector, tmp_path), rule_of(detector), detector, MODEL)
    assert 'id="viewer"' not in text and "And 2 more films in results.csv" in text
    links = re.findall(r'href="([^"]+)"', text)
    assert len(links) == 18 and all((tmp_path / link).is_file() for link in links)


def test_a_page_without_pictures_or_films_that_could_be_scored(detector: AnomalyDetector, tmp_path: Path) -> None:  # noqa: F811
    rule = rule_of(detector)
    bare = [FilmResult(0, "a.png", "scored", 0.0), FilmResult(1, "b.png", "unreadable", objections=("is empty",))]
    assert "a.png" in render_detect_page(tmp_path, bare, rule, detector, MODEL)
    assert "No film could be scored" in render_detect_page(tmp_path, bare[1:], rule, detector, MODEL)


def test_visible() -> None:
    assert visible("a b") == "a b" and visible("a\u202eb\n") == "a\\u202eb\\n"


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
# Runs after the page's own script: the policy names no other, so the test page loosens it for this one.
DRIVER = """
const problems = [];
window.addEventListener("error", (event) => problems.push(event.message));
document.addEventListener("securitypolicyviolation", (event) => problems.push(event.violatedDirective));
window.addEventListener("load", () => {
  const rows = () => [...document.querySelectorAll("#scored tr.film")].filter((row) => !row.hidden);
  const files = () => rows().map((row) => row.dataset.score);
  const say = { ready: document.documentElement.dataset.ready, first: files() };
  document.querySelector("button[data-key=p]").click();
  say.by_p = rows().map((row) => Number(row.dataset.p));
  document.querySelector("button[data-key=score]").click();
  document.querySelector("button[data-key=score]").click();
  say.rising = files();
  document.querySelector(".chip.alarm").click();
  say.without_alarms = files().length;
  document.querySelector(".chip.alarm").click();
  document.querySelector("#scored tr.film").click();
  document.querySelector("button[data-view=restored]").click();
  say.heat_hidden = document.getElementById("heat").hidden;
  document.querySelector("button[data-view=overlay]").click();
  const slider = document.getElementById("opacity");
  slider.value = 30;
  slider.dispatchEvent(new Event("input"));
  say.opacity = document.getElementById("heat").style.opacity;
  const search = document.getElementById("search");
  search.value = "SCRIPT";
  search.dispatchEvent(new Event("input"));
  say.found = files().length;
  say.loaded = document.getElementById("base").naturalWidth > 0;
  say.problems = problems;
  document.title = JSON.stringify(say);
});
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.slow
def test_the_page_works_in_a_browser(page: str, tmp_path: Path) -> None:
    own = base64.b64encode(hashlib.sha256(DRIVER.encode()).digest()).decode()
    driven = page.replace("script-src '", f"script-src 'sha256-{own}' '", 1)
    driven = driven.replace("<style>", f"<script>{DRIVER}</script><style>", 1)
    (tmp_path / "page.html").write_text(driven, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    done = subprocess.run(
        [
            str(CHROMIUM), *flags.split(), "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", "--dump-dom",
            (tmp_path / "page.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title, done.stderr[-500:]
    import html

    say = json.loads(html.unescape(title[1]))
    assert say["problems"] == [] and say["ready"] == "yes" and say["loaded"]
    scores = [float(score) for score in say["first"]]
    assert scores == sorted(scores, reverse=True) and len(scores) == len(HOSTILE)
    assert say["by_p"] == sorted(say["by_p"])
    assert say["rising"] == say["first"][::-1]
    assert 0 < say["without_alarms"] < len(HOSTILE)
    assert say["heat_hidden"] is True and say["opacity"] == "0.3"
    assert say["found"] == 3


def test_thumbnails_are_small(page: str) -> None:
    thumbs = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)"', page)
    assert len(thumbs) == len(HOSTILE)
    import io

    assert max(Image.open(io.BytesIO(base64.b64decode(thumb))).size[1] for thumb in thumbs) <= 96

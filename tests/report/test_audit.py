"""The audit page: complete in itself, escaped, with pictures of the right films."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from afire.data.audit.measure import Feature
from afire.data.audit.run import audit_manifest
from afire.data.manifest import make_manifest
from afire.report.audit import bar_chart, format_number, histogram, render_audit, write_audit_page
from tests.data.audit.drawing import draw_chest, draw_set, save

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>.png'


class Elements(HTMLParser):
    """Every attribute of every element as a browser would see it: (tag, name, value)."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, "", ""), *((tag, name, value or "") for name, value in attrs)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Films that give their label away, a pair of copies with hostile names, a broken one, hostile labels and views."""
    root = tmp_path_factory.mktemp("films")
    rng = np.random.default_rng(0)
    label = (np.arange(60) % 4 < 2).astype(float)
    names = [f"{number:02d}.png" for number in range(60)]
    names[3], names[7] = HOSTILE.replace("/", "_"), "&lt;b&gt; 'q'.png"
    for number, name in enumerate(names):
        save(draw_chest(rng, 80 if label[number] else 120, 160), root / name)
    (root / names[7]).write_bytes((root / names[3]).read_bytes())
    (root / names[9]).write_bytes(b"no image")
    table = {"image": names, "view": "<i>PA</i>", "patient": [f"p{n // 2}" for n in range(60)]}
    manifest = make_manifest(pd.DataFrame({**table, "label:<u>A</u>": label}), root)
    return render_audit(audit_manifest(manifest, workers=1))


def test_names_from_files_and_labels_are_escaped(page: str) -> None:
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "<u>A</u>" not in page
    assert "<i>PA</i>" not in page
    assert "&lt;script&gt;" in page
    assert "&amp;lt;b&amp;gt; &#39;q&#39;.png" in page


def test_nothing_is_fetched_and_nothing_runs(page: str) -> None:
    assert "http://" not in page
    assert "https://" not in page
    assert "default-src 'none'" in page
    elements = Elements()
    elements.feed(page)
    sources = [value for _, name, value in elements.attributes if name in ("src", "href", "xlink:href", "action")]
    assert sources
    assert all(source.startswith(("data:image/jpeg;base64,", "#finding-")) for source in sources)
    assert not [name for _, name, _ in elements.attributes if name.startswith("on")]
    assert not {tag for tag, _, _ in elements.attributes} & {"script", "iframe", "object", "link", "form"}


def test_pictures_are_films_with_their_proportions(page: str) -> None:
    pictures = re.findall(r"data:image/jpeg;base64,([^\"]+)", page)
    assert len(pictures) == 2  # the pair of copies; the broken film has none
    sizes = {Image.open(io.BytesIO(base64.b64decode(picture))).size for picture in pictures}
    assert sizes in ({(240, 120)}, {(200, 150)})
    assert "not readable" in page


def test_the_page_has_the_verdict_the_findings_the_chart_and_the_footer(page: str) -> None:
    for words in ("Results on this set would not be valid", "unreadable", "Can the label be guessed", "<svg", "height"):
        assert words in page
    assert "Research software, not a medical device." in page


def test_every_link_has_a_target(page: str) -> None:
    for target in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{target}"' in page


def test_a_clean_set_without_labels_has_a_page_too(tmp_path: Path) -> None:
    audit = audit_manifest(draw_set(tmp_path / "films", 30), workers=1)
    write_audit_page(audit, tmp_path / "audit.html")
    text = (tmp_path / "audit.html").read_text(encoding="utf-8")
    assert "Nothing was found that invalidates results." in text
    assert "Can the label be guessed" not in text


def test_bars_start_at_chance_and_stay_inside(tmp_path: Path) -> None:
    label = (np.arange(60) % 4 < 2).astype(float)
    audit = audit_manifest(draw_set(tmp_path, 60, **{"label:A": label}), workers=1)
    chart = bar_chart(audit.shortcuts)
    for bar in chart.bars:
        assert chart.labels_width <= bar.x <= chart.width
        assert bar.x == chart.chance or bar.x + bar.width == pytest.approx(chart.chance, abs=1.01)
        assert bar.low <= bar.high


def test_histogram_needs_numbers_and_both_classes() -> None:
    label = np.array([0.0, 1.0] * 20)
    shape = histogram(Feature("area", "file", pd.Series(np.arange(40.0))), label)
    assert shape is not None
    assert shape.present.startswith("M0 110.0 ")
    assert histogram(Feature("view", "file", pd.Series(["PA", "AP"] * 20)), label) is None
    assert histogram(Feature("area", "file", pd.Series(np.arange(40.0))), np.ones(40)) is None


@pytest.mark.parametrize(("value", "text"), [(2_180_000, "2.18 M"), (1640.4, "1,640"), (0.4816, "0.482"), (12, "12")])
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text

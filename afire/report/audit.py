"""The audit of a dataset as one HTML page: verdict, findings, shortcuts, and pictures of the films it is about.

The page is complete in itself: charts are SVG, pictures are data URIs, there is no script and nothing is fetched. Every
name that comes from a user's files is escaped by the template.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image

from afire._version import __version__
from afire.data.audit.measure import LEVELS, Feature, Finding, count_levels
from afire.data.audit.run import Audit, drawn_over
from afire.data.audit.shortcuts import NOTABLE, SEVERE, Shortcut, label_columns
from afire.data.decode import read_film
from afire.data.manifest import Manifest
from afire.errors import UserError
from afire.files import write_text
from afire.progress import format_seconds, track

_AUC_LEFT, _AUC_RIGHT = 0.3, 1.0
_LABELS_WIDTH, _PLOT_WIDTH, _ROW = 226.0, 300.0, 22.0
_BINS = 32
PAGE = "audit.html"
_THUMB_HEIGHT, _THUMB_WIDTH = 150, 240
_MOST_FILMS, _MOST_GROUPS, _MOST_IN_GROUP = 18, 9, 4
_MOST_CHARTS = 6


@dataclass(frozen=True)
class Thumb:
    """One film of an offender's section; ``picture`` is a data URI, or empty when the film cannot be read."""

    image: str
    picture: str
    split: str
    labels: str


@dataclass(frozen=True)
class Section:
    """Films of one finding: groups of pictures, a note for each, and how many groups and films are not shown."""

    number: int
    finding: Finding
    groups: tuple[tuple[tuple[Thumb, ...], str, int], ...]
    hidden: int


@dataclass(frozen=True)
class LabelChart:
    """What gives one label away."""

    label: str
    bars: BarChart
    histogram: Histogram | None
    judged: str


def write_audit_page(audit: Audit, path: Path) -> None:
    """Write the page to ``path``."""
    write_text(path, render_audit(audit))


def render_audit(audit: Audit) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(
        loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    levels = count_levels(audit.findings)
    return environment.get_template("audit.html").render(
        audit=audit,
        name=audit.manifest.root.resolve().name,
        version=__version__,
        duration=format_seconds(audit.seconds),
        worst=next((level for level in LEVELS if levels[level]), "none"),
        levels=levels,
        sections=_sections(audit),
        charts=_charts(audit),
        drawn_over=drawn_over(audit.manifest),
        matrix=_matrix(audit.shortcuts),
        spread=_spread(audit),
    )


def _sections(audit: Audit) -> list[Section]:
    sections = []
    with_films = [(number, finding) for number, finding in enumerate(audit.findings, start=1) if finding.groups]
    for number, finding in track(with_films, "drawing the page", unit="findings") if with_films else ():
        pairs = any(len(group) > 1 for group in finding.groups)
        groups_shown = finding.groups[: _MOST_GROUPS if pairs else _MOST_FILMS]
        notes = finding.notes or ("",) * len(finding.groups)
        groups = tuple(
            (tuple(_thumb(audit, row) for row in group[:_MOST_IN_GROUP]), note, len(group) - _MOST_IN_GROUP)
            for group, note in zip(groups_shown, notes, strict=False)
        )
        sections.append(Section(number, finding, groups, len(finding.groups) - len(groups_shown)))
    return sections


def _thumb(audit: Audit, row: int) -> Thumb:
    line = audit.manifest.table.iloc[row]
    labels = ", ".join(name for name, values in label_columns(audit.manifest.table) if values.iloc[row] == 1.0)
    picture = "" if audit.measured["error"].iloc[row] else _picture(audit.manifest, row)
    return Thumb(str(line["image"]), picture, str(line["split"]), labels)


def _picture(manifest: Manifest, row: int) -> str:
    """A JPEG data URI of the film, proportions kept."""
    try:
        film, _ = read_film(manifest.path(row))
    except (UserError, OSError):  # it could be read a minute ago
        return ""
    image = Image.fromarray(np.round(film * 255).astype(np.uint8))
    scale = min(_THUMB_HEIGHT / image.height, _THUMB_WIDTH / image.width)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    buffer = io.BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(buffer, "JPEG", quality=78)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _charts(audit: Audit) -> list[LabelChart]:
    """A chart for each label that something was found for, the worst first; the only label always has one."""
    by_label: dict[str, list[Shortcut]] = {}
    for shortcut in audit.shortcuts:
        by_label.setdefault(shortcut.label, []).append(shortcut)
    ranked = sorted(by_label, key=lambda label: min(_badness(shortcut) for shortcut in by_label[label]))
    flagged = [label for label in ranked if any(shortcut.level for shortcut in by_label[label]) or len(ranked) == 1]
    columns, features = dict(label_columns(audit.manifest.table)), {feature.name: feature for feature in audit.features}
    charts = []
    for label in flagged[:_MOST_CHARTS]:
        numeric = [shortcut for shortcut in by_label[label] if shortcut.single and shortcut.direction]
        strongest = min(numeric, key=_badness, default=None)
        shape = histogram(features[strongest.feature], columns[label].to_numpy()) if strongest else None
        judged = _judged(by_label[label][0], drawn_over(audit.manifest))
        charts.append(LabelChart(label, bar_chart(by_label[label]), shape, judged))
    return charts


def _badness(shortcut: Shortcut) -> tuple[int, float]:
    return (LEVELS.index(shortcut.level) if shortcut.level else len(LEVELS), -shortcut.auc)


def _judged(shortcut: Shortcut, over: str) -> str:
    crossed = shortcut.judged == "cross-validated"
    judgement = f"cross-validated over {over}" if crossed else f"judged on the {shortcut.judged} films"
    return f"{judgement}: {shortcut.positives:,} of {shortcut.films:,} films have the label"


def _matrix(shortcuts: Sequence[Shortcut]) -> dict[str, Any] | None:
    """All AUCs as a table of labels and facts; not worth its space for a single label."""
    labels = list(dict.fromkeys(shortcut.label for shortcut in shortcuts))
    facts = list(dict.fromkeys(shortcut.feature for shortcut in shortcuts))
    if len(labels) < 2:
        return None
    cells = {(shortcut.label, shortcut.feature): shortcut for shortcut in shortcuts}
    crossed = {shortcut.label for shortcut in shortcuts if shortcut.judged == "cross-validated"}
    starred = crossed if len(crossed) < len(labels) else set()
    rows = [
        (f"{label} *" if label in starred else label, [cells.get((label, fact)) for fact in facts]) for label in labels
    ]
    return {"facts": facts, "rows": rows, "starred": bool(starred)}


def _spread(audit: Audit) -> dict[str, Any]:
    """Median and 5 to 95 % range of each number, for each split that has films."""
    splits = audit.manifest.table["split"]
    subsets: list[tuple[str, pd.Series]] = [("all films", pd.Series(True, index=splits.index))]
    subsets += [
        (name, splits == name) for name in ("train", "val", "test") if 0 < int((splits == name).sum()) < len(splits)
    ]
    rows = []
    for feature in audit.features:
        if feature.is_category or feature.group == "other":
            continue
        cells = []
        for _, subset in subsets:
            values = feature.values[subset].dropna()
            low, middle, high = values.quantile([0.05, 0.5, 0.95]) if len(values) else (np.nan,) * 3
            cells.append(
                (format_number(middle), f"{format_number(low)} to {format_number(high)}") if len(values) else ("", "")
            )
        rows.append((feature.name, cells))
    return {"parts": [name for name, _ in subsets], "rows": rows}


@dataclass(frozen=True)
class Bar:
    """One row: a bar from AUC 0.5 to the AUC, a whisker for the interval, and what is written beside them."""

    name: str
    level: str
    y: float
    x: float
    width: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class BarChart:
    """All facts of one label."""

    width: float
    height: float
    bars: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]
    chance: float
    limits: tuple[float, ...]
    plot_bottom: float
    labels_width: float = _LABELS_WIDTH


def bar_chart(shortcuts: Sequence[Shortcut]) -> BarChart:
    """Bars from the strongest to the weakest, those of several facts together last."""
    ordered = sorted(shortcuts, key=lambda shortcut: (not shortcut.single, -shortcut.auc))
    bars = []
    for number, shortcut in enumerate(ordered):
        left, right = sorted((_auc_x(0.5), _auc_x(shortcut.auc)))
        direction = f", {shortcut.direction} = present" if shortcut.direction else ""
        text = f"{shortcut.auc:.2f} ({shortcut.low:.2f} to {shortcut.high:.2f})"
        bars.append(
            Bar(
                name=shortcut.feature + direction,
                level=shortcut.level or "none",
                y=number * _ROW,
                x=left,
                width=max(right - left, 1.0),
                low=_auc_x(shortcut.low),
                high=_auc_x(shortcut.high),
                text=text,
            )
        )
    bottom = len(ordered) * _ROW
    ticks = tuple((_auc_x(value), f"{value:.1f}") for value in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0))
    limits = (_auc_x(NOTABLE), _auc_x(SEVERE))
    return BarChart(_LABELS_WIDTH + _PLOT_WIDTH + 134, bottom + 22, tuple(bars), ticks, _auc_x(0.5), limits, bottom)


def _auc_x(value: float) -> float:
    share = (min(max(value, _AUC_LEFT), _AUC_RIGHT) - _AUC_LEFT) / (_AUC_RIGHT - _AUC_LEFT)
    return round(_LABELS_WIDTH + share * _PLOT_WIDTH, 1)


@dataclass(frozen=True)
class Histogram:
    """Outlines of two classes as SVG paths, each class with area one."""

    name: str
    present: str
    absent: str
    left: str
    right: str
    width: float = 290.0
    height: float = 110.0


def histogram(feature: Feature, label: NDArray[np.float64]) -> Histogram | None:
    """A number in films with the label (1) and without (0); ``None`` for categories or an empty class."""
    if feature.is_category:
        return None
    values = feature.values.to_numpy(dtype=np.float64)
    known = np.isfinite(values) & np.isfinite(label)
    present, absent = values[known & (label == 1)], values[known & (label == 0)]
    if len(present) == 0 or len(absent) == 0:
        return None
    low, high = np.percentile(values[known], [0.5, 99.5])
    if not low < high:
        return None
    shares = [
        np.histogram(np.clip(group, low, high), _BINS, (low, high))[0] / len(group) for group in (present, absent)
    ]
    top = max(float(share.max()) for share in shares)
    paths = [_outline(share / top, Histogram.width, Histogram.height) for share in shares]
    return Histogram(feature.name, paths[0], paths[1], format_number(float(low)), format_number(float(high)))


def _outline(heights: NDArray[np.float64], width: float, height: float) -> str:
    step = width / len(heights)
    points = [f"M0 {height:.1f}"]
    for number, share in enumerate(heights):
        points.append(f"V{height * (1 - share):.1f} H{(number + 1) * step:.1f}")
    return " ".join([*points, f"V{height:.1f} Z"])


def format_number(value: float) -> str:
    """Three significant digits, with thousands separated: ``1,640``, ``2.18 M``, ``0.482``."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g} M"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

"""The audit as one HTML page: verdict, findings, shortcuts, and pictures of the films it is about.

The page is complete in itself: pictures are data URIs, there is no script and nothing is fetched. Every name that comes
from a user's files is escaped by the template.
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
from PIL import Image

from afire._version import __version__
from afire.data.audit import Audit, Finding, Shortcut
from afire.data.audit.findings import LEVELS, count_levels
from afire.data.audit.shortcuts import label_columns
from afire.data.decode import read_film
from afire.data.manifest import Manifest
from afire.errors import UserError
from afire.files import write_text
from afire.progress import format_seconds, track
from afire.report.audit_charts import BarChart, Histogram, bar_chart, format_number, histogram

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
        matrix=_matrix(audit.shortcuts),
        spread=_spread(audit),
    )


def _sections(audit: Audit) -> list[Section]:
    sections = []
    with_films = [(number, one) for number, one in enumerate(audit.findings, start=1) if one.groups]
    for number, finding in track(with_films, "drawing the page", unit="findings") if with_films else ():
        pairs = any(len(group) > 1 for group in finding.groups)
        shown = finding.groups[: _MOST_GROUPS if pairs else _MOST_FILMS]
        notes = finding.notes or ("",) * len(finding.groups)
        groups = tuple(
            (tuple(_thumb(audit, row) for row in group[:_MOST_IN_GROUP]), note, len(group) - _MOST_IN_GROUP)
            for group, note in zip(shown, notes, strict=False)
        )
        sections.append(Section(number, finding, groups, len(finding.groups) - len(shown)))
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
    for one in audit.shortcuts:
        by_label.setdefault(one.label, []).append(one)
    ranked = sorted(by_label, key=lambda label: min(_badness(one) for one in by_label[label]))
    flagged = [label for label in ranked if any(one.level for one in by_label[label]) or len(ranked) == 1]
    columns, features = dict(label_columns(audit.manifest.table)), {one.name: one for one in audit.features}
    charts = []
    for label in flagged[:_MOST_CHARTS]:
        numeric = [one for one in by_label[label] if one.single and one.direction]
        strongest = min(numeric, key=_badness, default=None)
        shape = histogram(features[strongest.feature], columns[label].to_numpy()) if strongest else None
        charts.append(LabelChart(label, bar_chart(by_label[label]), shape, _judged(by_label[label][0])))
    return charts


def _badness(one: Shortcut) -> tuple[int, float]:
    return (LEVELS.index(one.level) if one.level else len(LEVELS), -one.auc)


def _judged(one: Shortcut) -> str:
    how = "cross-validated over patients" if one.judged == "cross-validated" else f"judged on the {one.judged} films"
    return f"{how}: {one.positives:,} of {one.films:,} films have the label"


def _matrix(shortcuts: Sequence[Shortcut]) -> dict[str, Any] | None:
    """All AUCs as a table of labels and facts; not worth its space for a single label."""
    labels = list(dict.fromkeys(one.label for one in shortcuts))
    facts = list(dict.fromkeys(one.feature for one in shortcuts))
    if len(labels) < 2:
        return None
    cells = {(one.label, one.feature): one for one in shortcuts}
    crossed = {one.label for one in shortcuts if one.judged == "cross-validated"}
    starred = crossed if len(crossed) < len(labels) else set()
    rows = [
        (f"{label} *" if label in starred else label, [cells.get((label, fact)) for fact in facts]) for label in labels
    ]
    return {"facts": facts, "rows": rows, "starred": bool(starred)}


def _spread(audit: Audit) -> dict[str, Any]:
    """Median and 5 to 95 % range of each number, for each split that has films."""
    splits = audit.manifest.table["split"]
    parts: list[tuple[str, pd.Series]] = [("all films", pd.Series(True, index=splits.index))]
    parts += [
        (name, splits == name) for name in ("train", "val", "test") if 0 < int((splits == name).sum()) < len(splits)
    ]
    rows = []
    for feature in audit.features:
        if feature.is_category or feature.group == "other":
            continue
        cells = []
        for _, part in parts:
            values = feature.values[part].dropna()
            low, middle, high = values.quantile([0.05, 0.5, 0.95]) if len(values) else (np.nan,) * 3
            cells.append(
                (format_number(middle), f"{format_number(low)} to {format_number(high)}") if len(values) else ("", "")
            )
        rows.append((feature.name, cells))
    return {"parts": [name for name, _ in parts], "rows": rows}

"""A bench of detectors for people: a table and a summary for each set, and a picture.

The picture has a panel for each set and a line for each row: its AUC with the interval, a tick for each seed, trivial
rows hollow, and the best trivial row as a dashed line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from afire._version import __version__
from afire.files import write_json, write_text
from afire.report.style import COLOURS, FAINT, draw_estimate, row_panels, save_figure, style
from afire.report.table import (
    DASH,
    DISCLAIMER,
    Block,
    Column,
    Row,
    Table,
    bullets,
    facts_table,
    latex_text,
    number,
    picture_names,
    show_summary,
    signed,
)
from afire.studies.detect_bench_table import BenchRow, BenchTable, PublishedRow
from afire.tasks.results import to_json

PAGE = "bench.md"
_COLUMNS = [
    Column("method", text=True, latex="Method"),
    Column("AUC", key="auc"),
    Column("95 % interval", key="interval"),
    Column("AP", key="ap"),
    Column("AUC − best trivial", short="− trivial", latex="$-$ trivial", key="against"),
    Column("pointing", key="pointing"),
    Column("pixel AUROC", short="pixel", key="pixel"),
    Column("PRO", key="pro"),
    Column("epochs", key="epochs"),
    Column("TFLOP", key="tera_flops"),
    Column("core-min", key="core_minutes"),
    Column("films/s", key="films_per_second"),
    Column("GB", key="gigabytes"),
]
_SECOND = [Column("AUC, published length", short="published", key="published"), Column("its epochs", key="long_epochs")]
_TERMINAL = ("method", "auc", "interval", "against", "core_minutes", "films_per_second")
_LATEX = ("method", "auc", "interval", "ap", "against", "pointing", "pixel", "pro", "core_minutes")


def write_bench(out: Path, tables: Sequence[BenchTable], facts: Mapping[str, str]) -> Path:
    """Write the page, LaTeX, CSV, JSON and the picture; the page's path."""
    with style():
        pictures = save_figure(bench_figure(tables), out / "bench")
    write_text(out / PAGE, bench_page(tables, facts, picture_names(pictures)))
    write_text(out / "bench.tex", "\n".join(_as_latex(table) for table in tables))
    for table in tables:
        write_text(out / f"{file_name(table)}.csv", rows_table(table).csv())
    write_json(out / "bench.json", to_json({"facts": dict(facts), "tables": [asdict(table) for table in tables]}))
    return out / PAGE


def file_name(table: BenchTable) -> str:
    return f"bench-{table.set_name}{'-balanced' if table.balanced else ''}"


def title(table: BenchTable) -> str:
    balanced = ", views balanced" if table.balanced else ""
    films = f"{table.films['normal']:,} normal and {table.films['abnormal']:,} abnormal test films"
    return f"{table.set_name}{balanced}: {films}, fitted on {table.fit_films:,} normal films"


def bench_page(tables: Sequence[BenchTable], facts: Mapping[str, str], pictures: Sequence[str] = ()) -> str:
    """The page as Markdown."""
    sections = ["# Detectors side by side", facts_table(facts).markdown()]
    sections += [f"![AUC of every detector]({name})" for name in pictures]
    for table in tables:
        sections += [f"## {title(table)}", rows_table(table).markdown()]
        sections.append(bullets(messages(table)))
    sections += [_READING, f"afire {__version__}. {DISCLAIMER}"]
    return "\n\n".join(sections) + "\n"


_READING = (
    "Mean and sd over seeds; intervals are bootstraps over test patients, the same draws for all rows of a set. Rows "
    "in italics are trivial detectors, which have seen the same normal films. Scores are used as published: larger is "
    "more abnormal, and none is flipped; below 0.5 normal films score higher. TFLOP are counted operations of one "
    "training, core-min processor time of one fit with all that belongs to it, films/s scoring in one process."
)


def rows_table(table: BenchTable) -> Table:
    """All rows of a set, the best first; with a second column where some were also fitted at published length."""
    has_published = any(row.published is not None for row in table.rows)
    rows = [
        Row(
            [row.method, *_numbers(row), *(_second(row.published) if has_published else ())],
            "italic" if row.trivial else "",
        )
        for row in table.rows
    ]
    return Table([*_COLUMNS, *(_SECOND if has_published else ())], [Block(rows)], title(table))


def _second(row: PublishedRow | None) -> list[str]:
    if row is None:
        return [DASH, DASH]
    auc = _mean_sd(row.auc) if row.auc is not None else f"not run: about {row.core_hours:,.1f} core-hours"
    return [auc, DASH if row.epochs is None else f"{row.epochs:,}"]


def _numbers(row: BenchRow) -> list[str]:
    places: Mapping[str, Any] = row.localisation or {}
    return [
        _mean_sd(row.auc),
        _interval(row.auc),
        _mean_sd(row.average_precision),
        _against(row),
        *(_mean_sd(places[name]) if name in places else DASH for name in ("hit", "pixel_auc", "pro")),
        DASH if row.trivial or row.epochs is None else f"{row.epochs:,}",
        DASH if row.trivial else f"{row.flops / 1e12:.3g}",
        DASH if math.isnan(row.core_minutes) else f"{row.core_minutes:.2f}",
        DASH if math.isnan(row.films_per_second) else f"{row.films_per_second:,.0f}",
        DASH if not row.peak_bytes else f"{row.peak_bytes / 1e9:.2f}",
    ]


def _mean_sd(estimate: Mapping[str, Any]) -> str:
    sd = estimate.get("sd")
    spread = f" ± {number(float(sd))}" if sd is not None and not math.isnan(sd) and len(estimate["values"]) > 1 else ""
    return number(float(estimate["mean"])) + spread


def _interval(estimate: Mapping[str, Any]) -> str:
    low, high = estimate.get("low"), estimate.get("high")
    return DASH if low is None or high is None else f"{number(float(low))} to {number(float(high))}"


def _against(row: BenchRow) -> str:
    if row.against is None:
        return DASH
    value, low, high = (float(row.against[name]) for name in ("value", "low", "high"))
    return f"{signed(value)} ({signed(low)} to {signed(high)})"


def messages(table: BenchTable) -> list[str]:
    """The ranking, which methods beat the best trivial row with the whole interval, and which score the wrong way."""
    learned = [row for row in table.rows if not row.trivial]
    trivial = next(row for row in table.rows if row.method == table.best_trivial)
    best, bar = learned[0], float(trivial.auc["mean"])
    order = ", ".join(f"{row.method} {number(float(row.auc['mean']))}" for row in learned)
    texts = [f"ranking: {order}"]
    above = [row.method for row in learned if row.against is not None and float(row.against["low"]) > 0]
    beaten = f"the best trivial row, {trivial.method} ({number(bar)})"
    if above:
        texts.append(f"above {beaten} with the whole interval: {', '.join(above)}")
    else:
        texts.append(f"none is above {beaten} with its whole interval; the best is {best.method}")
    flipped = [row.method for row in learned if round(float(row.auc["mean"]), 3) < 0.5]
    if flipped:
        texts.append(f"below 0.5, normal films score higher: {', '.join(flipped)}")
    if table.audit is not None:
        texts += [f"audit: {message}" for message in table.audit] or ["audit: no shortcut was found"]
    return texts


def _as_latex(table: BenchTable) -> str:
    return rows_table(table).only(*_LATEX).latex(f"Detectors on {latex_text(title(table))}.")


def bench_figure(tables: Sequence[BenchTable]) -> Figure:
    """A panel for each set."""
    figure, panels = row_panels([len(table.rows) for table in tables], width=4.2, height=1.0, line=0.26)
    for panel, table in zip(panels, tables, strict=True):
        _draw(panel, table)
    return figure


def _draw(axes: Axes, table: BenchTable) -> None:
    for place, row in enumerate(reversed(table.rows)):
        estimate, colour = row.auc, FAINT if row.trivial else COLOURS[0]
        limits = (estimate["low"], estimate["high"]) if estimate.get("low") is not None else None
        draw_estimate(axes, place, estimate["mean"], limits, () if row.trivial else estimate["values"], colour)
        if row.method == table.best_trivial:
            axes.axvline(estimate["mean"], color=FAINT, linestyle="--", linewidth=0.9)
    axes.axvline(0.5, color=FAINT, linewidth=0.6)
    axes.set_yticks(range(len(table.rows)), [row.method for row in reversed(table.rows)])
    axes.set_xlabel("AUC, 95 % interval")
    axes.set_title(f"{table.set_name}{', views balanced' if table.balanced else ''}", fontsize=10)


def show_bench(screen: Console, tables: Sequence[BenchTable]) -> None:
    """On the terminal."""
    for table in tables:
        show_summary(screen, rows_table(table).only(*_TERMINAL), messages(table))

"""The ablation as a picture: a line for each row, a dot for its mean, the sd, each seed, and the paper's value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from afire.report.ablation_table import sections
from afire.report.style import COLOURS, FAINT, INK
from afire.report.words import DISCLAIMER
from afire.studies.ablate_rows import FULL
from afire.studies.ablate_table import AblationTable, TableRow

_LINE_HEIGHT = 0.27
_OURS, _PAPER = COLOURS[0], COLOURS[1]


def ablation_figure(table: AblationTable) -> Figure:
    """Two panels on one list of rows: probe AUC (with the paper's) and detection AUC."""
    lines = _lines(table)
    figure: Figure
    figure, (probe, detection) = plt.subplots(
        1, 2, figsize=(8.2, 1.5 + _LINE_HEIGHT * len(lines)), sharey=True, width_ratios=[1.35, 1]
    )
    for axis, measure, title in (
        (probe, "auc", "linear probe, AUC"),
        (detection, "detection", "detection without adaptation, AUC"),
    ):
        _panel(axis, lines, measure)
        axis.set_title(title)
    probe.set_yticks(range(len(lines)), [line if isinstance(line, str) else line.row.title for line in lines])
    for label, line in zip(probe.get_yticklabels(), lines, strict=True):
        bold = isinstance(line, str) or line.row.name == FULL
        label.set_fontweight("bold" if bold else "normal")
    probe.set_ylim(len(lines) - 0.5, -0.7)
    figure.legend(handles=_legend(lines), loc="outside upper right", ncols=4)
    figure.supxlabel(DISCLAIMER, fontsize=6.5, color=FAINT, x=0.01, ha="left")
    return figure


def _lines(table: AblationTable) -> list[str | TableRow]:
    """Titles of the groups, each followed by its rows."""
    lines: list[str | TableRow] = []
    for title, rows in sections(table):
        lines += [title, *rows]
    return lines


def _panel(axis: Axes, lines: Sequence[str | TableRow], measure: str) -> None:
    full = next(line for line in lines if not isinstance(line, str) and line.row.name == FULL)
    axis.axvline(full.measures[measure].mean, color=FAINT, linewidth=1, zorder=0)
    for height, line in enumerate(lines):
        if isinstance(line, str):
            continue
        axis.axhline(height, color=FAINT, linewidth=0.4, alpha=0.6, zorder=0)
        one = line.measures[measure]
        spread = 0.0 if math.isnan(one.sd) else one.sd
        axis.errorbar(one.mean, height, xerr=spread, color=_OURS, marker="o", markersize=5, linewidth=1.4, zorder=3)
        axis.plot(one.values, [height] * len(one.values), "|", color=INK, markersize=6, alpha=0.8, zorder=4)
        if measure in line.paper:
            axis.plot(
                line.paper[measure], height, "D", markersize=5.5, fillstyle="none", color=_PAPER, markeredgewidth=1.3
            )
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)


def _legend(lines: Sequence[str | TableRow]) -> list[Line2D]:
    handles = [
        Line2D([], [], color=_OURS, marker="o", markersize=5, linewidth=1.4, label="mean ± sd over seeds"),
        Line2D([], [], color=INK, marker="|", linestyle="none", label="one seed"),
    ]
    if any(not isinstance(line, str) and line.paper for line in lines):
        paper = {"marker": "D", "fillstyle": "none", "markersize": 5.5, "linestyle": "none"}
        handles.append(Line2D([], [], color=_PAPER, label="paper (other network and data)", **paper))  # type: ignore[arg-type]
    handles.append(Line2D([], [], color=FAINT, linewidth=1, label="full method"))
    return handles

"""Grad-CAM on boxed findings: the films, the map of each classifier, and how often the maps meet the boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from afire.report.style import COLOURS, DOUBLE, FAINT, INK, MARKERS
from afire.report.words import number
from afire.tasks.gradcam import HALF, SHARE, Case, Meeting
from afire.tasks.results import Estimate

_BOX = "#56B4E9"  # bright on grey, and on the heat colours, for colour-blind readers too
_HEAT = "inferno"
_OPAQUE, _CLEAR = 0.7, 0.15  # of a map at its maximum, and below which share of it the film is left clear
# Fields of Meeting: what each panel of the summary is called.
METRICS = {
    "hit": "pointing game",
    "iou_half": "IoU above half of the maximum",
    "iou_share": f"IoU of the highest {100 * SHARE:g} %",
}


@dataclass(frozen=True)
class CamRow:
    """One classifier: its label, the maps (shown cases, S, S) and meetings of the cases shown, and all its numbers."""

    label: str
    maps: NDArray[np.float32]
    meetings: Sequence[Meeting]
    estimates: Mapping[str, Estimate]
    chance: Mapping[str, float]
    elsewhere: Mapping[str, float]  # the same with maps of other films


def cam_figure(films: NDArray[np.float32], cases: Sequence[Case], rows: Sequence[CamRow], caption: str) -> Figure:
    """Columns are cases; the first row shows films (cases, S, S) with their boxes, the next each classifier's map."""
    side = DOUBLE / max(len(cases), 4)
    strip = 0.42 + 0.2 * len(rows)
    height = side * len(cases) / max(len(cases), 4) if len(cases) < 4 else side
    figure: Figure = plt.figure(figsize=(DOUBLE, (height + 0.16 + len(rows) * (height + 0.14)) + strip + 0.55))
    pictures, summary = figure.subfigures(
        2, 1, height_ratios=[(height + 0.16 + len(rows) * (height + 0.14)), strip + 0.55], squeeze=False
    )[:, 0]
    grid = pictures.subplots(1 + len(rows), len(cases), squeeze=False)
    for column, case in enumerate(cases):
        _film(grid[0, column], films[column], case)
        grid[0, column].set_title(case.label.replace("_", " "), fontsize=7, pad=3)
        for line, row in enumerate(rows, start=1):
            _overlay(grid[line, column], films[column], row.maps[column], case)
            _verdict(grid[line, column], row.meetings[column], row.maps[column])
    for line, name in enumerate(["film and box", *(row.label for row in rows)]):
        grid[line, 0].set_ylabel(name, fontsize=7, labelpad=3, fontweight="bold" if line else "normal")
    for axis, (metric, title) in zip(summary.subplots(1, len(METRICS), sharey=True), METRICS.items(), strict=True):
        _summary(axis, rows, metric, title)
    handles = [
        Line2D([], [], color=FAINT, marker="|", markersize=7, markeredgewidth=3, linestyle="", label="by chance"),
        Line2D([], [], color=INK, marker="|", markersize=7, linestyle="", label="maps of other films"),
        Line2D([], [], color=INK, marker="o", markersize=3.5, linewidth=1, label="own maps, 95 % over patients"),
    ]
    summary.legend(handles=handles, loc="outside lower left", ncols=3, title=caption, alignment="left")
    return figure


def _film(axis: Axes, film: NDArray[np.float32], case: Case) -> None:
    axis.imshow(film, cmap="gray", vmin=0, vmax=1, interpolation="bilinear")
    size = film.shape[0]
    for x, y, w, h in case.boxes:
        corner = (x * size - 0.5, y * size - 0.5)
        box = plt.Rectangle(corner, w * size, h * size, fill=False, edgecolor=_BOX, linewidth=1.1)
        box.set_path_effects([withStroke(linewidth=1.9, foreground="black", alpha=0.5)])
        axis.add_patch(box)
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_visible(False)


def _overlay(axis: Axes, film: NDArray[np.float32], values: NDArray[np.float32], case: Case) -> None:
    """The map over the film, each map by its own maximum, as its numbers are; faint places stay grey."""
    _film(axis, film, case)
    peak = float(values.max())
    if peak <= 0:
        return
    share = values / peak
    alpha = _OPAQUE * np.clip((share - _CLEAR) / (1 - _CLEAR), 0, 1)
    axis.imshow(share, cmap=_HEAT, vmin=0, vmax=1, alpha=alpha, interpolation="bilinear")
    axis.contour(share, levels=[HALF], colors="white", linewidths=0.6)
    row, column = np.unravel_index(int(values.argmax()), values.shape)
    mark = axis.plot(column, row, marker="+", color="white", markersize=6, markeredgewidth=1.3)[0]
    mark.set_path_effects([withStroke(linewidth=2.6, foreground="black")])


def _verdict(axis: Axes, meeting: Meeting, values: NDArray[np.float32]) -> None:
    word = "inside" if meeting.hit else "outside"
    words = f"{word}, IoU {number(meeting.iou_half, 2)}" if values.max() > 0 else "no positive place"
    axis.set_xlabel(words, fontsize=6, labelpad=1.5)


def _summary(axis: Axes, rows: Sequence[CamRow], metric: str, title: str) -> None:
    for place, row in enumerate(rows):
        one, colour = row.estimates[metric], COLOURS[place % len(COLOURS)]
        low, high = (one.mean if np.isnan(edge) else edge for edge in (one.low, one.high))
        axis.plot([row.chance[metric]] * 2, [place - 0.4, place + 0.4], color=FAINT, linewidth=3, solid_capstyle="butt")
        axis.plot([low, high], [place, place], color=colour, linewidth=1)
        axis.plot(one.mean, place, marker=MARKERS[place % len(MARKERS)], color=colour, markersize=3.5)
        axis.plot(row.elsewhere[metric], place, marker="|", color=INK, markersize=8, markeredgewidth=1.1)
        words = f"{number(one.mean, 2)}"
        axis.text(1.0, place, words, transform=axis.get_yaxis_transform(), ha="right", va="center", fontsize=6.5)
    axis.set_title(title)
    axis.set_yticks(range(len(rows)), [row.label for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    ends = [edge for row in rows for edge in (row.estimates[metric].high, row.elsewhere[metric]) if not np.isnan(edge)]
    axis.set_xlim(0, max([*ends, 0.1]) * 1.3)

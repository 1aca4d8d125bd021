"""Restorations side by side: tokens hidden behind z_mask or all seen, for lesioned and for normal inputs."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from afire.report.style import DOUBLE, INK
from afire.report.words import number
from afire.tasks.restorations import INPUTS, Restored
from afire.tasks.results import Estimate

ERROR_TOP = 0.3  # of the grey range: what the error maps show as their brightest, the same in every figure
_HIDDEN = "#56B4E9"
_COLUMNS = ("input", "restored with z_mask", "|error|", "restored, all tokens seen", "|error|")
_TITLES = {"lesioned": "Lesioned inputs", "normal": "Normal inputs (same films, same tokens hidden)"}


def restoration_figure(
    shown: Restored, errors: Mapping[tuple[str, str], tuple[Estimate, Estimate]], caption: str
) -> Figure:
    """A block of rows for each kind of input; below each column its mean squared errors over all films measured.

    ``errors`` maps (input, way) to the errors inside the hidden tokens and outside.
    """
    count = len(shown.truth)
    cell = (DOUBLE - 0.75) / len(_COLUMNS)
    block = count * cell + 0.72
    figure: Figure = plt.figure(figsize=(DOUBLE, len(INPUTS) * block + 0.3))
    blocks = figure.subfigures(len(INPUTS), 1, squeeze=False)[:, 0]
    images = None
    for name, part in zip(INPUTS, blocks, strict=True):
        grid = part.subplots(count, len(_COLUMNS), squeeze=False)
        part.suptitle(_TITLES[name], x=0.005, ha="left", fontsize=8, fontweight="bold")
        for row in range(count):
            images = _row(grid[row], shown, name, row)
        for column, title in enumerate(_COLUMNS):
            grid[0, column].set_title(title, fontsize=7, pad=3)
        for column, way in ((0, "untouched"), (1, "z_mask"), (3, "all_seen")):
            grid[-1, column].set_xlabel(_words(*errors[name, way]), loc="left", fontsize=6.5, linespacing=1.35)
        bar = part.colorbar(images, ax=grid[:, -1], fraction=0.05, pad=0.02, shrink=0.8)
        bar.set_label("|error| (grey levels from 0 to 1)", fontsize=6)
        bar.outline.set_visible(False)
    figure.supxlabel(caption, fontsize=6.5, color=INK, x=0.005, ha="left")
    return figure


def _row(axes: NDArray[np.object_], shown: Restored, name: str, row: int):  # type: ignore[no-untyped-def]
    truth, given = shown.truth[row], shown.inputs[name][row]
    _film(axes[0], given)
    _outline(axes[0], shown.hidden[row], given.shape[0])
    image = None
    for column, way in ((1, "z_mask"), (3, "all_seen")):
        output = shown.outputs[name, way][row]
        _film(axes[column], output)
        error = np.abs(output - truth)
        image = axes[column + 1].imshow(error, cmap="inferno", vmin=0, vmax=ERROR_TOP, interpolation="nearest")
        _bare(axes[column + 1])
        _outline(axes[column + 1], shown.hidden[row], given.shape[0])
    return image


def _film(axis: Axes, film: NDArray[np.float32]) -> None:
    axis.imshow(film, cmap="gray", vmin=0, vmax=1, interpolation="bilinear")
    _bare(axis)


def _bare(axis: Axes) -> None:
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_visible(False)


def _outline(axis: Axes, hidden: NDArray[np.bool_], size: int) -> None:
    """The outline of the hidden tokens (rows, columns), along the edges of tokens."""
    rows, columns = hidden.shape
    high, wide = size / rows, size / columns
    padded = np.pad(hidden, 1)
    lines = []
    for r, c in zip(*np.nonzero(hidden), strict=True):
        left, right, top, bottom = c * wide - 0.5, (c + 1) * wide - 0.5, r * high - 0.5, (r + 1) * high - 0.5
        sides = (
            (padded[r, c + 1], (left, right), (top, top)),
            (padded[r + 2, c + 1], (left, right), (bottom, bottom)),
            (padded[r + 1, c], (left, left), (top, bottom)),
            (padded[r + 1, c + 2], (right, right), (top, bottom)),
        )
        lines += [(xs, ys) for neighbour, xs, ys in sides if not neighbour]
    for xs, ys in lines:
        axis.plot(xs, ys, color=_HIDDEN, linewidth=0.8, solid_capstyle="round")
    axis.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5))


def _words(inside: Estimate, outside: Estimate) -> str:
    return f"MSE × 1000\nhidden tokens {number(1000 * inside.mean, 1)}\nelsewhere {number(1000 * outside.mean, 1)}"

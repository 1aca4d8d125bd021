"""One look for all figures of results: quiet axes, colours that colour-blind readers can tell apart, PNG and PDF."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from afire.files import write_atomic

matplotlib.use("Agg")


# Okabe and Ito, without yellow, which is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
INK, FAINT = "#333333", "#B8B8B8"
SINGLE, DOUBLE = 3.4, 7.0  # inches: the columns of a journal
PRINT_DPI = 300
_SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,  # text stays text in the PDF
    "savefig.facecolor": "white",
}


# What a figure of one or two columns needs besides: the same look with the text sizes of print.
_PRINT = {
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
}


@contextmanager
def style(print_size: bool = False) -> Iterator[None]:
    """Draw figures in the look of this module; ``print_size`` for figures as wide as a journal's columns."""
    with plt.rc_context({**_SETTINGS, **(_PRINT if print_size else {})}):
        yield


def panels(
    count: int, side: float = 2.1, share: bool = True, most_columns: int = 5, height: float | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels in rows, square or of a ``height``, and its axes in reading order.

    ``share``: all have one scale.
    """
    columns = min(count, most_columns)
    rows = -(-count // columns)
    size = (side * columns + 0.6, (height or side) * rows + 0.6)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, sharex=share, sharey=share)
    axes = list(grid.flat)
    for number, axis in enumerate(axes[count:], start=count):
        axis.set_visible(False)
        axes[number - columns].tick_params(labelbottom=True)  # the lowest of its column now: it shows the numbers
    return figure, axes[:count]


def save_figure(figure: Figure, stem: Path, dpi: int = 160) -> list[Path]:
    """Write ``stem``.png and ``stem``.pdf, each whole or not at all, and close the figure."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "pdf")]
    for path in paths:
        write_atomic(path, partial(_save, figure, dpi))
    plt.close(figure)
    return paths


def row_panels(counts: Sequence[int], width: float, height: float, line: float) -> tuple[Figure, list[Axes]]:
    """Panels side by side for tables of ``counts`` rows: each ``width`` inches, and a ``line`` for each row."""
    size = (width * len(counts), height + line * max(counts))
    figure, grid = plt.subplots(1, len(counts), figsize=size, squeeze=False, layout="constrained")
    return figure, list(grid[0])


def draw_estimate(
    axes: Axes, place: int, mean: float, limits: tuple[float, float] | None, seeds: Sequence[float], colour: str
) -> None:
    """A row of a panel: its interval, its mean, and a tick for each of ``seeds``; hollow without any."""
    if limits is not None:
        axes.plot(limits, [place, place], color=colour, linewidth=1.4)
    axes.plot(mean, place, "o", color=colour, markerfacecolor=colour if seeds else "white", markersize=5)
    if seeds:
        axes.plot(seeds, [place] * len(seeds), "|", color=INK, markersize=7)


def _save(figure: Figure, dpi: int, path: Path) -> None:
    # Without a date the same figure is the same file.
    figure.savefig(path, dpi=dpi, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)

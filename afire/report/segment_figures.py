"""Predicted masks on their films: the outlines of truth and prediction, with the Dice of each film.

Drawn from ``predictions.parquet``, which has the predicted masks, and the films and masks themselves. S pixels a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from afire.data.dataset import Films
from afire.data.rle import decode_rle
from afire.report.style import save_figure, style
from afire.task_config import MaskConfig
from afire.tasks.masks import load_masks, mask_cells
from afire.tasks.results import VALUE
from afire.tasks.segment import RLE

COLUMNS = 5
# Both are bright on a grey film and differ for colour-blind readers too.
_TRUTH, _PREDICTION = "#56B4E9", "#FF8C1A"
_DICE = f"{VALUE}dice"


def write_overlays(
    out: Path, films: Films, config: MaskConfig, predictions: pd.DataFrame, count: int = 15
) -> list[Path]:
    """Draw the lowest, the middle and the highest Dice of the first run's test films into ``out``."""
    chosen = choose_films(predictions, count)
    if len(chosen) == 0:
        return []
    row_of = {image: row for row, image in enumerate(films.manifest.table["image"])}
    rows = np.array([row_of[image] for image in chosen["image"]], np.int64)
    order = np.unique(rows)
    truth = load_masks(films, order, mask_cells(films.manifest, config)[1], config)
    with style():
        figure = overlay_figure(
            films.batch(rows)[:, 0].numpy(),
            truth.read(rows),
            np.stack([decode_rle(cell) for cell in chosen[RLE]]),
            [f"{dice:.3f}" for dice in chosen[_DICE]],
            chosen["group"].tolist(),
        )
        return save_figure(figure, out / "overlays")


def choose_films(predictions: pd.DataFrame, count: int) -> pd.DataFrame:
    """Up to ``count`` test films of the first run in three groups; films that are rightly empty show nothing."""
    first = predictions[(predictions["part"] == "test") & (predictions["run"] == predictions["run"].iloc[0])]
    drawn = first[RLE].str.contains('"runs":[[', regex=False)
    shown = first[drawn | first[f"{VALUE}dice_positive"].notna()].sort_values([_DICE, "image"])
    each = max(1, count // 3)
    if len(shown) <= 3 * each:
        every: pd.DataFrame = shown.assign(group="all, from the lowest Dice")
        return every
    middle = (len(shown) - each) // 2
    parts = {"lowest Dice": shown[:each], "middle": shown[middle : middle + each], "highest Dice": shown[-each:]}
    chosen: pd.DataFrame = pd.concat([part.assign(group=name) for name, part in parts.items()])
    return chosen


def overlay_figure(
    films: NDArray[np.float32],
    truth: NDArray[np.bool_],
    predicted: NDArray[np.bool_],
    captions: Sequence[str],
    groups: Sequence[str],
) -> Figure:
    """Films (N, S, S) with outlines of both masks (N, S, S); each group begins a new row and names it."""
    places = _places(groups)
    lines = 1 + max(line for line, _ in places)
    figure: Figure
    figure, grid = plt.subplots(lines, COLUMNS, figsize=(1.75 * COLUMNS, 1.95 * lines + 0.35), squeeze=False)
    for axis in grid.flat:
        axis.axis("off")
    for number, (line, column) in enumerate(places):
        axis = grid[line, column]
        axis.imshow(films[number], cmap="gray", vmin=0, vmax=1, interpolation="bilinear")
        _outline(axis, truth[number], _TRUTH)
        _outline(axis, predicted[number], _PREDICTION)
        axis.set_title(captions[number], fontsize=8, pad=3, loc="right")
        if column == 0 and (number == 0 or groups[number] != groups[number - 1]):
            axis.set_title(groups[number], fontsize=8, pad=3, loc="left")
    handles = [Line2D([], [], color=_TRUTH, label="truth"), Line2D([], [], color=_PREDICTION, label="prediction")]
    figure.legend(handles=handles, loc="outside upper left", ncols=2)
    return figure


def _places(groups: Sequence[str]) -> list[tuple[int, int]]:
    places: list[tuple[int, int]] = []
    line, column = 0, -1
    for number, group in enumerate(groups):
        column += 1
        if number and (group != groups[number - 1] or column == COLUMNS):
            line, column = line + 1, 0
        places.append((line, column))
    return places


def _outline(axis: Axes, mask: NDArray[np.bool_], colour: str) -> None:
    if mask.any():  # an empty one has no outline, and matplotlib would warn
        # With a margin, so that a mask that reaches the edge of the film is closed along it.
        side = np.arange(-1, mask.shape[0] + 1)
        axis.contour(side, side, np.pad(mask, 1).astype(float), levels=[0.5], colors=[colour], linewidths=[1.1])

"""Figures of task results: ROC, calibration, each label's metric (of several results too), and masks on their films.

Everything is drawn from ``predictions.parquet`` and ``result.json``; for masks from the films and true masks as well.
N films, C labels, S pixels a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from afire.data.pack import Films
from afire.data.rle import decode_rle
from afire.report.style import COLOURS, FAINT, INK, MARKERS, panels, save_figure, style
from afire.report.table import METRIC_WORDS, number
from afire.tasks.compare import AllPairs
from afire.tasks.masks import load_masks, mask_cells
from afire.tasks.metrics import interval, patient_draws
from afire.tasks.results import SCORE, TRUTH, VALUE, Result
from afire.tasks.segment import RLE
from afire.tasks.settings import MaskConfig

Floats = NDArray[np.float64]
_GRID = np.linspace(0, 1, 101)
_BINS = 10
_BAND_DRAWS = 300


def write_figures(out: Path, result: Result, predictions: pd.DataFrame) -> list[Path]:
    """Draw the figures of a result into its folder: ROC and calibration where there are scores, and the labels."""
    paths: list[Path] = []
    with style():
        if any(name.startswith(SCORE) for name in predictions.columns):
            paths += save_figure(roc_figure(result, predictions), out / "roc")
            paths += save_figure(calibration_figure(result, predictions), out / "calibration")
        if len(result.labels) > 1 and "auc" in result.metrics:
            paths += save_figure(label_figure([result]), out / "labels")
    return paths


def roc_figure(result: Result, predictions: pd.DataFrame) -> Figure:
    """A panel for each label: the curve averaged over runs, its 95 % band over patients, and the single runs."""
    figure, axes = _label_panels(result)
    test = predictions[predictions["part"] == "test"]
    for axis, label in zip(axes, result.labels, strict=True):
        axis.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
        curves = _curves_by_run(test, label)
        if len(curves):
            low, high = _roc_band(test, label)
            axis.fill_between(_GRID, low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
            if len(curves) > 1:
                for curve in curves:
                    axis.plot(_GRID, curve, color=COLOURS[0], linewidth=0.5, alpha=0.5)
            axis.plot(np.r_[0, _GRID], np.r_[0, curves.mean(axis=0)], color=COLOURS[0], linewidth=1.6)
        _title(axis, label, f"AUC {number(result.per_label[label]['auc'].mean)}")
        axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        _unit_ticks(axis)
    _outer_labels(figure, "false positive rate", "true positive rate")
    return figure


def calibration_figure(result: Result, predictions: pd.DataFrame) -> Figure:
    """A panel for each label: predicted against observed share in ten equally full bins, with 95 % intervals.

    A panel ends where its points end: of a rare finding all points lie near 0.
    """
    figure, axes = _label_panels(result, share=False)
    test = predictions[predictions["part"] == "test"]
    for axis, label in zip(axes, result.labels, strict=True):
        axis.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
        labelled = test[test[TRUTH + label].notna()]
        scores, truth = labelled[SCORE + label].to_numpy(np.float64), labelled[TRUTH + label].to_numpy(np.float64)
        runs = max(labelled["run"].nunique(), 1)
        predicted, observed, low, high, gap = reliability(scores, truth, runs)
        end = _nice_end(max(predicted.max(initial=0.05), high.max(initial=0.05)))
        if len(predicted):
            bars = np.stack([observed - low, high - observed])
            axis.errorbar(predicted, observed, bars, fmt="none", ecolor=COLOURS[0], elinewidth=0.8, alpha=0.6)
            axis.plot(predicted, observed, color=COLOURS[0], marker="o", markersize=3.5, linewidth=1.2)
            _score_strip(axis, scores, end)
        _title(axis, label, f"ECE {number(gap)}")
        axis.set(xlim=(-0.02 * end, 1.02 * end), ylim=(-0.02 * end, 1.02 * end), aspect="equal")
        _unit_ticks(axis, end)
    _outer_labels(figure, "predicted probability", "share of films with the finding")
    return figure


def label_figure(results: Sequence[Result], metric: str = "auc", names: Sequence[str] | None = None) -> Figure:
    """Each label's metric with its 95 % interval, and the mean of all; several results side by side."""
    names = list(names or [result.name for result in results])
    labels = _by_value(results[0], metric)
    rows = ["mean of labels", *labels] if len(labels) > 1 else labels
    count = len(results)
    thickness = 0.8 / count
    figure: Figure = plt.figure(figsize=(6.4, 0.9 + len(rows) * max(0.27, 0.15 * count)))
    axis = figure.subplots()
    base = 0.5 if metric == "auc" else 0.0
    for position, result in enumerate(results):
        values = [result.metrics[metric] if row == "mean of labels" else result.per_label[row][metric] for row in rows]
        means, lows, highs = (np.array([getattr(value, key) for value in values]) for key in ("mean", "low", "high"))
        spread = np.stack([means - lows, highs - means]).clip(0)
        places = np.arange(len(rows)) + (position - (count - 1) / 2) * thickness
        colour = COLOURS[position % len(COLOURS)]
        # Bars begin at chance: a finding that is ranked worse than by a coin points to the left.
        axis.barh(places, means - base, thickness * 0.86, left=base, color=colour, alpha=0.35, linewidth=0)
        marker = MARKERS[position % len(MARKERS)]
        axis.errorbar(
            means, places, xerr=spread, fmt=marker, color=colour, markersize=3.5, elinewidth=1, label=names[position]
        )
        if count == 1:
            for place, mean in zip(places, means, strict=True):
                axis.text(1.01, place, number(mean), va="center", fontsize=8, transform=axis.get_yaxis_transform())
    axis.axvline(base, color=INK, linewidth=0.8)
    axis.set_yticks(np.arange(len(rows)), [row.replace("_", " ") for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlabel(
        f"{METRIC_WORDS.get(metric, metric)}, mean of {_runs(results)}, 95 % interval over {_drawn_over(results)}"
    )
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    if len(rows) > 1:
        axis.axhline(0.5, color=FAINT, linewidth=0.8)
    if count > 1:
        figure.legend(loc="outside upper left", ncols=min(count, 3))
    return figure


def reliability(scores_N: Floats, truth_N: Floats, runs: int = 1) -> tuple[Floats, Floats, Floats, Floats, float]:
    """Mean prediction, observed share and its 95 % (Wilson) interval in each bin, and the expected calibration error.

    Bins hold equally many films; fewer than ten where scores repeat. Films come back in every run, so an interval is
    that of ``1 / runs`` of the rows.
    """
    if len(scores_N) == 0:
        nothing: Floats = np.empty(0)
        return nothing, nothing, nothing, nothing, float("nan")
    edges = np.unique(np.quantile(scores_N, np.linspace(0, 1, _BINS + 1)))
    bins = np.clip(np.searchsorted(edges, scores_N, side="right") - 1, 0, max(len(edges) - 2, 0))
    counts = np.bincount(bins, minlength=max(len(edges) - 1, 1)).astype(np.float64)
    filled = counts > 0
    predicted = np.bincount(bins, scores_N, minlength=len(counts))[filled] / counts[filled]
    observed = np.bincount(bins, truth_N, minlength=len(counts))[filled] / counts[filled]
    films = counts[filled] / runs
    low, high = _wilson(observed, films)
    gap = float((np.abs(predicted - observed) * counts[filled]).sum() / counts.sum())
    return predicted, observed, low, high, gap


def _wilson(share: Floats, films: Floats) -> tuple[Floats, Floats]:
    z2 = 1.96**2
    centre = (share + z2 / (2 * films)) / (1 + z2 / films)
    half = 1.96 * np.sqrt(share * (1 - share) / films + z2 / (4 * films**2)) / (1 + z2 / films)
    return np.minimum(centre - half, share), np.maximum(centre + half, share)


def roc_curves(scores_N: Floats, truth_N: Floats, weights_BN: Floats) -> Floats:
    """True positive rate at each false positive rate of a fixed grid, (B, 101), for each row of film weights.

    NaN in a row where a class has no weight.
    """
    order = np.argsort(-scores_N, kind="stable")
    ends = np.flatnonzero(np.r_[np.diff(scores_N[order]) != 0, True])
    weights, positive = weights_BN[:, order], truth_N[order] == 1
    hits = np.cumsum(weights * positive, axis=1)[:, ends]
    misses = np.cumsum(weights * ~positive, axis=1)[:, ends]
    curves = np.full((len(weights), len(_GRID)), np.nan)
    for draw in np.flatnonzero((hits[:, -1] > 0) & (misses[:, -1] > 0)):
        false_rate, true_rate = misses[draw] / misses[draw, -1], hits[draw] / hits[draw, -1]
        curves[draw] = np.interp(_GRID, np.r_[0, false_rate], np.r_[0, true_rate])
    return curves


def _curves_by_run(test: pd.DataFrame, label: str) -> Floats:
    """ROC curves (runs, 101) of a label; runs that tested one class only are left out."""
    labelled = test[test[TRUTH + label].notna()]
    curves = [
        roc_curves(run[SCORE + label].to_numpy(np.float64), run[TRUTH + label].to_numpy(np.float64), ones)
        for _, run in labelled.groupby("run", sort=False)
        for ones in [np.ones((1, len(run)))]
    ]
    every = np.concatenate(curves) if curves else np.empty((0, len(_GRID)))
    return every[~np.isnan(every[:, 0])]


def _roc_band(test: pd.DataFrame, label: str) -> tuple[Floats, Floats]:
    """95 % of the curves over draws of patients, the same draw in every run."""
    labelled = test[test[TRUTH + label].notna()]
    scores, truth = labelled[SCORE + label].to_numpy(np.float64), labelled[TRUTH + label].to_numpy(np.float64)
    runs = [np.flatnonzero(labelled["run"] == name) for name in labelled["run"].unique()]
    patients = labelled["patient"].to_numpy(dtype=object)
    means = []
    for weights in patient_draws(patients, np.random.default_rng(0), _BAND_DRAWS):
        curves = np.stack([roc_curves(scores[rows], truth[rows], weights[:, rows]) for rows in runs])
        means.append(curves[:, ~np.isnan(curves).any(axis=(0, 2))].mean(axis=0))
    limits = np.array([interval(column) for column in np.concatenate(means).T])
    return limits[:, 0], limits[:, 1]


def _label_panels(result: Result, share: bool = True) -> tuple[Figure, list[Axes]]:
    single = len(result.labels) == 1
    return panels(len(result.labels), side=3.4 if single else 1.9, share=share)


def _nice_end(largest: float) -> float:
    """The end of a scale that starts at 0 and holds ``largest``."""
    return next(end for end in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0) if largest <= end or end == 1.0)


def _score_strip(axis: Axes, scores: Floats, end: float) -> None:
    """How often each probability is predicted, as a low histogram along the bottom."""
    shares, edges = np.histogram(np.clip(scores, 0, end), 25, (0, end))
    heights = 0.16 * end * shares / max(shares.max(), 1)
    axis.bar(edges[:-1], heights, np.diff(edges), align="edge", color=FAINT, alpha=0.6, zorder=0)


def _title(axis: Axes, label: str, value: str) -> None:
    axis.set_title(f"{label.replace('_', ' ')}\n{value}", loc="left", linespacing=1.3)


def _unit_ticks(axis: Axes, end: float = 1.0) -> None:
    ticks = np.linspace(0, end, 5)
    labels = ["0", "", f"{end / 2:g}", "", f"{end:g}"]
    axis.set_xticks(ticks, labels)
    axis.set_yticks(ticks, labels)


def _outer_labels(figure: Figure, below: str, left: str) -> None:
    figure.supxlabel(below, fontsize=9, color=INK)
    figure.supylabel(left, fontsize=9, color=INK)


def _by_value(result: Result, metric: str) -> list[str]:
    """Labels from the best to the worst; those without a value last."""
    return sorted(result.labels, key=lambda label: -np.nan_to_num(result.per_label[label][metric].mean, nan=-1))


def _drawn_over(results: Sequence[Result]) -> str:
    """``patients``, unless the films of a result have no patient ids."""
    unknown = any(result.drawn_over != "test patients" for result in results)
    return "films, patients unknown" if unknown else "patients"


def _runs(results: Sequence[Result]) -> str:
    counts = {len(result.runs) for result in results}
    if counts == {1}:
        return "1 run"
    return f"{min(counts)} runs" if len(counts) == 1 else f"{min(counts)} to {max(counts)} runs"


COLUMNS = 5
# Both are bright on a grey film and differ for colour-blind readers too.
_TRUTH, _PREDICTION = "#56B4E9", "#FF8C1A"
_DICE = f"{VALUE}dice"


def write_overlays(
    out: Path, films: Films, config: MaskConfig, predictions: pd.DataFrame, count: int = 15
) -> list[Path]:
    """Draw the lowest, the middle and the highest Dice of the first run's test films into ``out``."""
    selection = choose_films(predictions, count)
    if len(selection) == 0:
        return []
    row_of = {image: row for row, image in enumerate(films.manifest.table["image"])}
    rows = np.array([row_of[image] for image in selection["image"]], np.int64)
    order = np.unique(rows)
    truth = load_masks(films, order, mask_cells(films.manifest, config)[1], config)
    with style():
        figure = overlay_figure(
            films.batch(rows)[:, 0].numpy(),
            truth.read(rows),
            np.stack([decode_rle(cell) for cell in selection[RLE]]),
            [f"{dice:.3f}" for dice in selection[_DICE]],
            selection["group"].tolist(),
        )
        return save_figure(figure, out / "overlays")


def choose_films(predictions: pd.DataFrame, count: int) -> pd.DataFrame:
    """Up to ``count`` test films of the first run in three groups; films that are rightly empty show nothing."""
    films = predictions[(predictions["part"] == "test") & (predictions["run"] == predictions["run"].iloc[0])]
    has_mask = films[RLE].str.contains('"runs":[[', regex=False)
    candidates = films[has_mask | films[f"{VALUE}dice_positive"].notna()].sort_values([_DICE, "image"])
    per_group = max(1, count // 3)
    if len(candidates) <= 3 * per_group:
        every: pd.DataFrame = candidates.assign(group="all, from the lowest Dice")
        return every
    middle = (len(candidates) - per_group) // 2
    groups = {
        "lowest Dice": candidates[:per_group],
        "middle": candidates[middle : middle + per_group],
        "highest Dice": candidates[-per_group:],
    }
    selection: pd.DataFrame = pd.concat([group.assign(group=name) for name, group in groups.items()])
    return selection


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
    for index, (line, column) in enumerate(places):
        axis = grid[line, column]
        axis.imshow(films[index], cmap="gray", vmin=0, vmax=1, interpolation="bilinear")
        _outline(axis, truth[index], _TRUTH)
        _outline(axis, predicted[index], _PREDICTION)
        axis.set_title(captions[index], fontsize=8, pad=3, loc="right")
        if column == 0 and (index == 0 or groups[index] != groups[index - 1]):
            axis.set_title(groups[index], fontsize=8, pad=3, loc="left")
    handles = [Line2D([], [], color=_TRUTH, label="truth"), Line2D([], [], color=_PREDICTION, label="prediction")]
    figure.legend(handles=handles, loc="outside upper left", ncols=2)
    return figure


def _places(groups: Sequence[str]) -> list[tuple[int, int]]:
    places: list[tuple[int, int]] = []
    line, column = 0, -1
    for index, group in enumerate(groups):
        column += 1
        if index and (group != groups[index - 1] or column == COLUMNS):
            line, column = line + 1, 0
        places.append((line, column))
    return places


def _outline(axis: Axes, mask: NDArray[np.bool_], colour: str) -> None:
    if mask.any():  # an empty one has no outline, and matplotlib would warn
        # With a margin, so that a mask that reaches the edge of the film is closed along it.
        side = np.arange(-1, mask.shape[0] + 1)
        axis.contour(side, side, np.pad(mask, 1).astype(float), levels=[0.5], colors=[colour], linewidths=[1.1])


def p_value_figure(pairs: AllPairs) -> Figure:
    """A square for each pair of results: p over test patients above the diagonal, over runs below it.

    Darker is smaller. An arrow points to the better one: left, the row's; up, the column's.
    """
    count = len(pairs.names)
    p_values = np.where(np.triu(np.ones((count, count), bool)), pairs.p_patients, pairs.p_runs)
    figure: Figure
    side = 1.6 + 0.55 * count
    figure, axis = plt.subplots(figsize=(side + 0.8, side), layout="constrained")
    levels = [0.0, 0.001, 0.01, 0.05, 0.2, 1.0]
    steps = ListedColormap(["#08306b", "#2171b5", "#6baed6", "#c6dbef", "#f7fbff"])
    colours = steps.with_extremes(bad="#eeeeee")
    image = axis.imshow(p_values, cmap=colours, norm=BoundaryNorm(levels, colours.N, clip=True))
    for row in range(count):
        for column in range(count):
            value = p_values[row, column]
            if row != column:
                text = "–" if np.isnan(value) else "<.001" if value < 0.001 else f"{value:.3f}"
                better = "←" if pairs.difference[row, column] > 0 else "↑"
                dark = not np.isnan(value) and value < 0.01
                colour = "white" if dark else INK
                axis.text(column, row, f"{text}\n{better}", ha="center", va="center", fontsize=6.5, color=colour)
    axis.set_xticks(range(count), pairs.names, rotation=45, ha="right")
    axis.set_yticks(range(count), pairs.names)
    word = METRIC_WORDS.get(pairs.metric, pairs.metric)
    axis.set_title(f"p between results, {word}\nabove the diagonal: over patients; below: over runs", fontsize=8)
    for spine in axis.spines.values():
        spine.set_visible(False)
    figure.colorbar(image, ax=axis, ticks=levels, shrink=0.7).ax.set_yticklabels([f"{level:g}" for level in levels])
    return figure

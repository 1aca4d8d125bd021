"""Figures of an evaluated detector: ROC beside the trivial detectors, and where normal and abnormal films score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from afire.report.style import COLOURS, FAINT, INK, save_figure, style
from afire.report.task_figures import roc_curves
from afire.tasks.detect.evaluate import ROW, Evaluated
from afire.tasks.labels import ABNORMAL
from afire.tasks.metrics import interval, patient_draws
from afire.tasks.results import SCORE, TRUTH

Floats = NDArray[np.float64]
_GRID = np.linspace(0, 1, 101)
_BAND_DRAWS, _MOST_BINS = 300, 40
_TRIVIAL_COLOURS = (*COLOURS[1:], "#7F7F7F")  # one for each trivial row
_DASHES = ((0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2)))


def write_detection_figures(out: Path, found: Evaluated) -> list[Path]:
    """``roc`` and ``scores``, as PNG and PDF."""
    with style():
        return [
            *save_figure(roc_figure(found), out / "roc"),
            *save_figure(score_figure(found), out / "scores"),
        ]


def roc_figure(found: Evaluated) -> Figure:
    """The chosen score with its 95 % band over patients, and the trivial detectors beside it; means over detectors."""
    figure: Figure = plt.figure(figsize=(7.2, 3.9))
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8)
    low, high = _band(found.predictions)
    axis.fill_between(_GRID, low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
    trivial = sorted(
        (line for line in found.lines if line.kind == "trivial"), key=lambda line: -line.metrics["auc"].mean
    )
    for number, line in enumerate(trivial):
        colour = _TRIVIAL_COLOURS[number % len(_TRIVIAL_COLOURS)]
        curve = _mean_curve(found.predictions, ROW + line.name)
        label = f"{line.name} {line.metrics['auc'].mean:.3f}"
        axis.plot(_GRID, curve, color=colour, linewidth=1.0, linestyle=_DASHES[number % len(_DASHES)], label=label)
    chosen = found.lines[0]
    curve = _mean_curve(found.predictions, SCORE + ABNORMAL)
    label = f"{_short(chosen.meaning)} {chosen.metrics['auc'].mean:.3f}"
    axis.plot(np.r_[0, _GRID], np.r_[0, curve], color=COLOURS[0], linewidth=1.8, label=label)
    axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    axis.set(xlabel="normal films that alarm", ylabel="abnormal films that alarm")
    handles, labels = axis.get_legend_handles_labels()
    order = [len(handles) - 1, *range(len(handles) - 1)]
    figure.legend(
        [handles[place] for place in order], [labels[place] for place in order], loc="outside right center", title="AUC"
    )
    return figure


def score_figure(found: Evaluated) -> Figure:
    """Where normal and abnormal test films score, one panel a detector, with the calibrated threshold."""
    runs = list(found.predictions["run"].unique())
    figure: Figure = plt.figure(figsize=(5.6, 0.9 + 1.7 * len(runs)))
    axes = np.atleast_1d(figure.subplots(len(runs), 1))
    for axis, run, threshold in zip(axes, runs, found.thresholds, strict=True):
        frame = found.predictions[found.predictions["run"] == run]
        scores, truth = frame[SCORE + ABNORMAL].to_numpy(np.float64), frame[TRUTH + ABNORMAL].to_numpy(np.float64)
        ends = [*np.percentile(scores, [0.2, 99.8]), *([threshold] if np.isfinite(threshold) else [])]
        edges = np.linspace(min(ends), max(ends), int(np.clip(len(scores) // 8, 8, _MOST_BINS)) + 1)
        shown = np.clip(scores, edges[0], edges[-1])  # the few far ones pile up at the ends
        for value, word, colour in ((0, "normal", COLOURS[0]), (1, "abnormal", COLOURS[1])):
            part = shown[truth == value]
            weights = np.full(len(part), 100 / max(len(part), 1))
            label = f"{word} ({len(part):,})"
            axis.hist(part, edges, weights=weights, color=colour, alpha=0.30, linewidth=0)
            axis.hist(part, edges, weights=weights, color=colour, histtype="step", linewidth=1.2, label=label)
        if np.isfinite(threshold):
            caught = [100 * float((scores[truth == value] >= threshold).mean()) for value in (0, 1)]
            axis.axvline(threshold, color=INK, linewidth=1)
            words = f"  {caught[0]:.0f} % of normal and\n  {caught[1]:.0f} % of abnormal alarm"
            axis.text(threshold, 0.98, words, transform=axis.get_xaxis_transform(), fontsize=8, va="top")
        axis.set_ylabel("% of films")
        axis.set_title(run if len(runs) > 1 else "")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    axes[-1].set_xlabel(f"{_short(found.lines[0].meaning)}, larger = more abnormal")
    return figure


def _mean_curve(predictions: pd.DataFrame, column: str) -> Floats:
    curves = [
        roc_curves(
            frame[column].to_numpy(np.float64), frame[TRUTH + ABNORMAL].to_numpy(np.float64), np.ones((1, len(frame)))
        )[0]
        for _, frame in predictions.groupby("run", sort=False)
    ]
    mean: Floats = np.mean(curves, axis=0)
    return mean


def _band(predictions: pd.DataFrame) -> tuple[Floats, Floats]:
    """95 % of the chosen score's curve over draws of patients, the same draw for every detector."""
    frames = [frame for _, frame in predictions.groupby("run", sort=False)]
    patients = frames[0]["patient"].to_numpy(dtype=object)
    means = []
    for weights in patient_draws(patients, np.random.default_rng(0), _BAND_DRAWS):
        curves = [
            roc_curves(
                frame[SCORE + ABNORMAL].to_numpy(np.float64), frame[TRUTH + ABNORMAL].to_numpy(np.float64), weights
            )
            for frame in frames
        ]
        means.append(np.mean(curves, axis=0))
    limits = np.array([interval(column) for column in np.concatenate(means).T])
    return limits[:, 0], limits[:, 1]


def _short(names: str) -> str:
    return names if len(names) <= 34 else "chosen score"


def picture_names(paths: Sequence[Path]) -> list[str]:
    return [path.name for path in paths if path.suffix == ".png"]

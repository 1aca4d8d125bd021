"""Restorations side by side: tokens hidden behind z_mask or all seen, for lesioned and for normal inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from afire.data.pack import Films
from afire.errors import UserError
from afire.report.figures.files import FigureFiles, Source, claim, films_text, run_record, save
from afire.report.style import DOUBLE, INK, style
from afire.report.table import number
from afire.tasks.evaluate import bootstrap_means
from afire.tasks.pretrained import INPUTS, Errors, Restored, check_restores, restoration_errors, restore_films
from afire.tasks.results import Estimate, Rows, estimate
from afire.weights import open_weights, pick_device

RESTORED_FILMS = 200
ERROR_TOP = 0.3  # of the grey range: what the error maps show as their brightest, the same in every figure
_HIDDEN = "#56B4E9"
_COLUMNS = ("input", "restored with z_mask", "|error|", "restored, nothing hidden", "|error|")
_TITLES = {"lesioned": "Lesioned inputs", "normal": "Normal inputs (same films, same tokens hidden)"}

logger = logging.getLogger("afire")


def draw_restorations(
    out: Path,
    weights: str | Path,
    source: Source | Path,
    *,
    show: int = 3,
    device: str = "auto",
    force: bool = False,
) -> FigureFiles:
    """Restorations of normal films, lesioned and as they are, with tokens hidden behind z_mask and with all seen."""
    stem, target = claim(out, "restorations", force), pick_device(device)
    source = source if isinstance(source, Source) else Source(source, most=RESTORED_FILMS)
    run = open_weights(weights)
    check_restores(run.method, run.name)
    logger.info("%s: %s", run.name, run.method_report)
    films = source.open(run.config.image)
    subset, split_hash = source.rows(films)
    normal = _normal(films, subset, source.subset)
    rows = source.draw(normal)
    errors = restoration_errors(run.method, films, rows, source.seed, target)
    estimates = _error_estimates(films, rows, errors, source.seed)
    some = np.sort(np.random.default_rng(source.seed).permutation(rows)[:show])
    shown = restore_films(run.method, films.batch(some).to(target), some, source.seed)
    data = source.record(films, rows, len(normal), split_hash)
    record: dict[str, Any] = {
        "figure": "restorations",
        "weights": run_record(run),
        "data": {**data, "kind": "normal films"},
        "settings": {"lesions": run.config.lesions.model_dump(), "error_top": ERROR_TOP, "seed": source.seed},
        "shown": films.manifest.table["image"].iloc[some].tolist(),
        "numbers": {
            name: {
                way: {"hidden_tokens": vars(estimates[name, way][0]), "elsewhere": vars(estimates[name, way][1])}
                for way in ("z_mask", "all_seen", "untouched")
            }
            for name in ("lesioned", "normal")
        },
    }
    with style(print_size=True):
        caption = f"{run.name}; errors over {films_text(data, 'normal')}; blue outline: tokens hidden by z_mask"
        return save(stem, restoration_figure(shown, estimates, caption), record)


def _normal(films: Films, subset: Rows, name: str) -> Rows:
    normal: Rows = subset[films.manifest.table["normal"].to_numpy()[subset] == 1]
    if len(normal) == 0:
        raise UserError(f"no {name} film is labelled normal, and synthetic lesions are drawn on normal films.")
    return normal


def _error_estimates(
    films: Films, rows: Rows, errors: Errors, seed: int
) -> dict[tuple[str, str], tuple[Estimate, Estimate]]:
    """Means over films with 95 % intervals over patients, inside the hidden tokens and outside."""
    patients = films.manifest.table["patient"].to_numpy(dtype=object)[rows]
    estimates = []
    for values in (errors.inside, errors.outside):
        named = {f"{name} {way}": column for (name, way), column in values.items()}
        draws = bootstrap_means([named], [patients], np.random.default_rng(seed))
        estimates.append({key: estimate([float(np.nanmean(v))], draws[" ".join(key)]) for key, v in values.items()})
    inside, outside = estimates
    return {key: (inside[key], outside[key]) for key in inside}


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
    for name, subfigure in zip(INPUTS, blocks, strict=True):
        grid = subfigure.subplots(count, len(_COLUMNS), squeeze=False)
        subfigure.suptitle(_TITLES[name], x=0.005, ha="left", fontsize=8, fontweight="bold")
        for row in range(count):
            images = _row(grid[row], shown, name, row)
        for column, title in enumerate(_COLUMNS):
            grid[0, column].set_title(title, fontsize=7, pad=3)
        for column, way in ((0, "untouched"), (1, "z_mask"), (3, "all_seen")):
            grid[-1, column].set_xlabel(_error_text(*errors[name, way]), loc="left", fontsize=6.5, linespacing=1.35)
        bar = subfigure.colorbar(images, ax=grid[:, -1], fraction=0.05, pad=0.02, shrink=0.8)
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


def _error_text(inside: Estimate, outside: Estimate) -> str:
    return f"MSE × 1000\nhidden tokens {number(1000 * inside.mean, 1)}\nelsewhere {number(1000 * outside.mean, 1)}"

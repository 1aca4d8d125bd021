"""Restorations side by side: tokens hidden behind z_mask or all seen, for lesioned and for normal inputs.

From a whole pre-training run to ``draw_restorations`` and ``draw_atlas``.
"""

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
from afire.methods.afire import AFiRe
from afire.report.figures.files import FigureFiles, Source, claim, films_text, save
from afire.report.figures.pages import SIDE, atlas_figure
from afire.report.style import DOUBLE, INK, style
from afire.report.table import number
from afire.tasks.evaluate import bootstrap_means
from afire.tasks.figure_data import INPUTS, Errors, Restored, Rows, check_restores, restoration_errors, restore_films
from afire.tasks.places import Atlas, build_atlas
from afire.tasks.results import Estimate, estimate
from afire.training.batches import normal_training_rows
from afire.weights import Weights, open_weights, pick_device

ERROR_TOP = 0.3  # of the grey range: what the error maps show as their brightest, the same in every figure
_HIDDEN = "#56B4E9"
_COLUMNS = ("input", "restored with z_mask", "|error|", "restored, nothing hidden", "|error|")
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


logger = logging.getLogger("afire")
RESTORED_FILMS, ATLAS_FILMS, NEAREST = 200, 400, 8


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
    part, split_hash = source.rows(films)
    normal = _normal(films, part, source.part)
    rows = source.draw(normal)
    errors = restoration_errors(run.method, films, rows, source.seed, target)
    estimates = _error_estimates(films, rows, errors, source.seed)
    some = np.sort(np.random.default_rng(source.seed).permutation(rows)[:show])
    shown = restore_films(run.method, films.batch(some).to(target), some, source.seed)
    data = source.record(films, rows, len(normal), split_hash)
    record: dict[str, Any] = {
        "figure": "restorations",
        "weights": _describe(run),
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


def draw_atlas(
    out: Path,
    weights: str | Path,
    source: Source | Path,
    *,
    nearest: int = NEAREST,
    device: str = "auto",
    force: bool = False,
) -> FigureFiles:
    """The prototypes place by place: entropy, likeliest cluster, typical and nearest patches of training normals."""
    stem, target = claim(out, "atlas", force), pick_device(device)
    source = source if isinstance(source, Source) else Source(source, most=ATLAS_FILMS)
    run = open_weights(weights)
    model = run.method
    if not isinstance(model, AFiRe):
        raise UserError(f"{run.name} was pre-trained by {run.kind.__name__}, which has no prototypes to show.")
    logger.info("%s: %s", run.name, run.method_report)
    films = source.open(run.config.image)
    normal, sentence = normal_training_rows(films.manifest, source.split)
    logger.info("%s", sentence)
    rows = source.draw(normal)
    atlas = build_atlas(model, films, rows, max(nearest, SIDE * SIDE), target)
    split_hash = source.split.hash if source.split else None
    data = source.record(films, rows, len(normal), split_hash, "train")
    record: dict[str, Any] = {
        "figure": "atlas",
        "weights": _describe(run),
        "data": {**data, "kind": "normal films"},
        "settings": {"nearest": max(nearest, SIDE * SIDE), "distance": "Hellinger", "seed": source.seed},
        "numbers": {
            "mean_entropy": float(atlas.entropy.mean()),
            "clusters": atlas.clusters,
            "likeliest_clusters": len(np.unique(atlas.cluster)),
            "at_home": float(atlas.own_place.mean()),
            "at_home_or_beside": float(atlas.near_place.mean()),
            "at_home_by_chance": 1 / len(atlas.entropy),
            "nearest_distance": float(atlas.nearest_distance.mean()),
            "places": _places(atlas, films),
        },
    }
    with style(print_size=True):
        share, chance = 100 * float(atlas.own_place.mean()), 100 / len(atlas.entropy)
        home = f"a film's closest patch lies at home in {share:.0f} % (by chance {chance:.1f} %)"
        caption = f"{run.name}; {films_text(data, 'normal')}; {home}"
        return save(stem, atlas_figure(atlas, caption), record)


def _normal(films: Films, part: Rows, name: str) -> Rows:
    normal: Rows = part[films.manifest.table["normal"].to_numpy()[part] == 1]
    if len(normal) == 0:
        raise UserError(f"no {name} film is labelled normal, and synthetic lesions are drawn on normal films.")
    return normal


def _error_estimates(
    films: Films, rows: Rows, errors: Errors, seed: int
) -> dict[tuple[str, str], tuple[Estimate, Estimate]]:
    """Means over films with 95 % intervals over patients, inside the hidden tokens and outside."""
    patients = films.manifest.table["patient"].to_numpy(dtype=object)[rows]
    found = []
    for values in (errors.inside, errors.outside):
        named = {f"{name} {way}": column for (name, way), column in values.items()}
        draws = bootstrap_means([named], [patients], np.random.default_rng(seed))
        found.append({key: estimate([float(np.nanmean(v))], draws[" ".join(key)]) for key, v in values.items()})
    return {key: (found[0][key], found[1][key]) for key in found[0]}


def _places(atlas: Atlas, films: Films) -> list[dict[str, Any]]:
    images = films.manifest.table["image"]
    places = []
    for place in range(len(atlas.entropy)):
        row, column = divmod(place, atlas.grid[1])
        nearest = [
            {
                "image": str(images.iloc[film]),
                "row": int(at) // atlas.grid[1],
                "column": int(at) % atlas.grid[1],
                "distance": float(far),
            }
            for film, at, far in zip(
                atlas.nearest_film[place], atlas.nearest_place[place], atlas.nearest_distance[place], strict=True
            )
        ]
        places.append(
            {
                "row": row,
                "column": column,
                "entropy": float(atlas.entropy[place]),
                "cluster": int(atlas.cluster[place]),
                "probability": float(atlas.probability[place]),
                "at_home": float(atlas.own_place[place]),
                "at_home_or_beside": float(atlas.near_place[place]),
                "typical": str(images.iloc[atlas.typical_film[place]]),
                "nearest": nearest,
            }
        )
    return places


def _describe(run: Weights) -> dict[str, Any]:
    clusters = run.config.head.clusters if "head" in run.kind.sections else None
    return {"name": run.name, "hash": run.method_hash, "report": run.method_report, "clusters": clusters}

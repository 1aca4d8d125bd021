"""What a pre-training has learned, drawn: the atlas of its prototypes, and restorations side by side.

The atlas shows each place's prototype and the patches of training normals nearest to it. Restorations are
those of lesioned and of normal inputs, with tokens hidden behind z_mask and with all of them seen.
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
from afire.report.figures.files import FigureFiles, Source, as_source, claim, films_text, run_record, save
from afire.report.style import DOUBLE, INK, style
from afire.report.table import number
from afire.tasks.evaluate import bootstrap_means
from afire.tasks.pretrained import (
    INPUTS,
    Atlas,
    Errors,
    Restored,
    build_atlas,
    check_restores,
    restoration_errors,
    restore_films,
)
from afire.tasks.representation import LANDMARKS, landmark_places
from afire.tasks.results import Estimate, Rows, estimate
from afire.training.batches import normal_training_rows
from afire.weights import open_weights, pick_device

ATLAS_FILMS, NEAREST = 400, 8
SIDE = 2  # nearest patches of a place in the sheet: SIDE x SIDE
_GAP = 0.16  # of a patch, between the places of the sheet
_SHEET, _DETAIL = 3.56, 2.08  # inches: the sheet of all places, and the width of the nine in detail
_MARGIN = 0.04
_DETAIL_SHAPE = _DETAIL / _SHEET
_TEXT_PLACES = 64  # most places whose cluster is written into its cell

RESTORED_FILMS = 200
ERROR_TOP = 0.3  # of the grey range: what the error maps show as their brightest, the same in every figure
_HIDDEN = "#56B4E9"
_COLUMNS = ("input", "restored with z_mask", "|error|", "restored, nothing hidden", "|error|")
_TITLES = {"lesioned": "Lesioned inputs", "normal": "Normal inputs (same films, same tokens hidden)"}

logger = logging.getLogger("afire")


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
    source = as_source(source, ATLAS_FILMS)
    run = open_weights(weights)
    model = run.method
    if not isinstance(model, AFiRe):
        raise UserError(f"{run.name} was pre-trained by {run.kind.__name__}, which has no prototypes to show.")
    logger.info("%s: %s", run.name, run.method_report)
    films = source.open(run.config.image)
    normal, message = normal_training_rows(films.manifest, source.split)
    logger.info("%s", message)
    rows = source.draw(normal)
    atlas = build_atlas(model, films, rows, max(nearest, SIDE * SIDE), target)
    split_hash = source.split.hash if source.split else None
    data = source.record(films, rows, len(normal), split_hash, "train")
    record: dict[str, Any] = {
        "figure": "atlas",
        "weights": run_record(run),
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
            "places": _place_records(atlas, films),
        },
    }
    with style(print_size=True):
        share, chance = 100 * float(atlas.own_place.mean()), 100 / len(atlas.entropy)
        home = f"a film's closest patch lies at home in {share:.0f} % (by chance {chance:.1f} %)"
        caption = f"{run.name}; {films_text(data, 'normal')}; {home}"
        return save(stem, atlas_figure(atlas, caption), record)


def _place_records(atlas: Atlas, films: Films) -> list[dict[str, Any]]:
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


def atlas_figure(atlas: Atlas, caption: str) -> Figure:
    """Above: mean film, typical film, entropy, likeliest cluster. Below: nearest patches everywhere, and in detail."""
    wide = DOUBLE - 2 * _MARGIN
    small, gap = (wide - 3 * 0.12) / 4, 0.12
    figure: Figure = plt.figure(figsize=(DOUBLE, 6.35))
    figure.set_layout_engine("none")  # every place is given in inches
    page = _Page(figure)
    _picture(page.axes(0, 0.22, small), atlas.mean_film, "mean of the films")
    typical = page.axes(small + gap, 0.22, small)
    _picture(typical, mosaic(atlas.typical_patches, atlas.grid), "typical patch of each place")
    _entropy(page, page.axes(2 * (small + gap), 0.22, small), atlas)
    _clusters(page.axes(3 * (small + gap), 0.22, small), atlas)
    title = f"{SIDE * SIDE} nearest patches of each place, wherever they lie"
    _picture(page.axes(0, 2.5, _SHEET), nearest_sheet(atlas), title)
    if min(atlas.grid) >= 3:
        _detail(page.axes(wide - _DETAIL, 2.5, _DETAIL, _SHEET), atlas)
    figure.text(_MARGIN / DOUBLE, 0.006, caption, fontsize=6.5, color=INK)
    return figure


class _Page:
    """Places on the figure in inches from its left and upper edge: picture sizes are what matters on this page."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        self.width, self.height = (float(side) for side in figure.get_size_inches())

    def axes(self, left: float, top: float, width: float, height: float | None = None) -> Axes:
        tall = width if height is None else height
        box = ((left + _MARGIN) / self.width, 1 - (top + tall) / self.height, width / self.width, tall / self.height)
        axis: Axes = self.figure.add_axes(box)
        return axis


def mosaic(patches_Lpp: NDArray[np.float32], grid: tuple[int, int]) -> NDArray[np.float32]:
    """Patches (L, p, p) put together into a film (rows * p, columns * p)."""
    p = patches_Lpp.shape[-1]
    film: NDArray[np.float32] = patches_Lpp.reshape(*grid, p, p).transpose(0, 2, 1, 3).reshape(grid[0] * p, grid[1] * p)
    return film


def nearest_sheet(atlas: Atlas) -> NDArray[np.float32]:
    """The nearest patches of every place as one picture, at the place; between places it is NaN (paper)."""
    p = atlas.nearest_patches.shape[-1]
    gap = max(round(_GAP * p), 1)
    cell = SIDE * p + gap
    sheet = np.full((atlas.grid[0] * cell - gap, atlas.grid[1] * cell - gap), np.nan, np.float32)
    for place in range(len(atlas.entropy)):
        row, column = divmod(place, atlas.grid[1])
        for rank in range(min(SIDE * SIDE, atlas.nearest_patches.shape[1])):
            down, across = divmod(rank, SIDE)
            top, left = row * cell + down * p, column * cell + across * p
            sheet[top : top + p, left : left + p] = atlas.nearest_patches[place, rank]
    return sheet


def _picture(axis: Axes, picture: NDArray[np.float32], title: str) -> None:
    axis.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    _bare(axis, title)


def _bare(axis: Axes, title: str | None = None) -> None:
    axis.set(xticks=[], yticks=[])
    if title is not None:
        axis.set_title(title, fontsize=7, pad=3)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _entropy(page: _Page, axis: Axes, atlas: Atlas) -> None:
    low = np.floor(10 * float(atlas.entropy.min())) / 10  # to 1: the same end in every atlas
    image = axis.imshow(atlas.entropy.reshape(atlas.grid), cmap="viridis", vmin=min(low, 0.9), vmax=1)
    _bare(axis, "entropy (1 = uniform)")
    place = axis.get_position()
    bar_axis = page.figure.add_axes((place.x0, place.y0 - 0.11 / page.height, place.width, 0.06 / page.height))
    bar = page.figure.colorbar(image, cax=bar_axis, orientation="horizontal")
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar_axis.tick_params(labelsize=6, length=2, pad=1)


def _clusters(axis: Axes, atlas: Atlas) -> None:
    """Places of one cluster share a tone and, on small grids, a number; borders where the cluster changes.

    More clusters than colours can tell apart: so the number and the border carry it, and the tone is its probability.
    """
    grid, clusters = atlas.grid, atlas.cluster.reshape(atlas.grid)
    tones = atlas.probability.reshape(grid)
    axis.imshow(tones, cmap="Blues", vmin=0, vmax=max(float(tones.max()), 0.01) * 1.2)
    count = len(np.unique(clusters))
    _bare(axis, f"likeliest cluster ({count} of {atlas.clusters})")
    for r, c in np.ndindex(*grid):
        if c + 1 < grid[1] and clusters[r, c] != clusters[r, c + 1]:
            axis.plot([c + 0.5] * 2, [r - 0.5, r + 0.5], color=INK, linewidth=0.7)
        if r + 1 < grid[0] and clusters[r, c] != clusters[r + 1, c]:
            axis.plot([c - 0.5, c + 0.5], [r + 0.5] * 2, color=INK, linewidth=0.7)
        if len(atlas.cluster) <= _TEXT_PLACES:
            ink = "white" if tones[r, c] > 0.8 * tones.max() else INK
            axis.text(c, r, str(clusters[r, c]), ha="center", va="center", fontsize=5.5, color=ink)
    axis.set_xlabel("darker: more probable", fontsize=6, loc="left")


def _detail(axis: Axes, atlas: Atlas) -> None:
    """Nine places in rows: all nearest patches, and the numbers of the prototype."""
    places = landmark_places(atlas.grid).tokens(atlas.grid)
    count = atlas.nearest_patches.shape[1]
    p = atlas.nearest_patches.shape[-1]
    gap = max(p // 8, 1)
    width = count * (p + gap) - gap
    step = max(round((width / _DETAIL_SHAPE - p) / 8), p + gap)  # nine rows as high as the sheet beside them
    picture = np.full((8 * step + p, width), np.nan, np.float32)
    for line, place in enumerate(places):
        for rank in range(count):
            left = rank * (p + gap)
            picture[line * step : line * step + p, left : left + p] = atlas.nearest_patches[place, rank]
        text = f"{LANDMARKS[line]}\nentropy {atlas.entropy[place]:.2f}, at home {100 * atlas.own_place[place]:.0f} %"
        axis.text(-p * 0.25, line * step + p / 2, text, ha="right", va="center", fontsize=6, linespacing=1.3)
    axis.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axis.set_anchor("N")
    _bare(axis, f"{count} nearest patches of nine places")


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
    source = as_source(source, RESTORED_FILMS)
    run = open_weights(weights)
    check_restores(run.method, run.name)
    logger.info("%s: %s", run.name, run.method_report)
    films = source.open(run.config.image)
    subset, split_hash = source.rows(films)
    normal = _normal_rows(films, subset, source.subset)
    rows = source.draw(normal)
    errors = restoration_errors(run.method, films, rows, source.seed, target)
    estimates = _error_estimates(films, rows, errors, source.seed)
    shown_rows = np.sort(np.random.default_rng(source.seed).permutation(rows)[:show])
    restored = restore_films(run.method, films.batch(shown_rows).to(target), shown_rows, source.seed)
    data = source.record(films, rows, len(normal), split_hash)
    record: dict[str, Any] = {
        "figure": "restorations",
        "weights": run_record(run),
        "data": {**data, "kind": "normal films"},
        "settings": {"lesions": run.config.lesions.model_dump(), "error_top": ERROR_TOP, "seed": source.seed},
        "shown": films.manifest.table["image"].iloc[shown_rows].tolist(),
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
        return save(stem, restoration_figure(restored, estimates, caption), record)


def _normal_rows(films: Films, subset: Rows, name: str) -> Rows:
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
        columns = {f"{name} {way}": column for (name, way), column in values.items()}
        draws = bootstrap_means([columns], [patients], np.random.default_rng(seed))
        estimates.append({key: estimate([float(np.nanmean(v))], draws[" ".join(key)]) for key, v in values.items()})
    inside, outside = estimates
    return {key: (inside[key], outside[key]) for key in inside}


def restoration_figure(
    restored: Restored, errors: Mapping[tuple[str, str], tuple[Estimate, Estimate]], caption: str
) -> Figure:
    """A block of rows for each kind of input; below each column its mean squared errors over all films measured.

    ``errors`` maps (input, way) to the errors inside the hidden tokens and outside.
    """
    count = len(restored.truth)
    cell = (DOUBLE - 0.75) / len(_COLUMNS)
    block = count * cell + 0.72
    figure: Figure = plt.figure(figsize=(DOUBLE, len(INPUTS) * block + 0.3))
    blocks = figure.subfigures(len(INPUTS), 1, squeeze=False)[:, 0]
    images = None
    for name, subfigure in zip(INPUTS, blocks, strict=True):
        grid = subfigure.subplots(count, len(_COLUMNS), squeeze=False)
        subfigure.suptitle(_TITLES[name], x=0.005, ha="left", fontsize=8, fontweight="bold")
        for row in range(count):
            images = _restored_row(grid[row], restored, name, row)
        for column, title in enumerate(_COLUMNS):
            grid[0, column].set_title(title, fontsize=7, pad=3)
        for column, way in ((0, "untouched"), (1, "z_mask"), (3, "all_seen")):
            grid[-1, column].set_xlabel(_error_text(*errors[name, way]), loc="left", fontsize=6.5, linespacing=1.35)
        bar = subfigure.colorbar(images, ax=grid[:, -1], fraction=0.05, pad=0.02, shrink=0.8)
        bar.set_label("|error| (grey levels from 0 to 1)", fontsize=6)
        bar.outline.set_visible(False)
    figure.supxlabel(caption, fontsize=6.5, color=INK, x=0.005, ha="left")
    return figure


def _restored_row(axes: NDArray[np.object_], restored: Restored, name: str, row: int):  # type: ignore[no-untyped-def]
    truth, source = restored.truth[row], restored.inputs[name][row]
    _film(axes[0], source)
    _outline(axes[0], restored.hidden[row], source.shape[0])
    image = None
    for column, way in ((1, "z_mask"), (3, "all_seen")):
        output = restored.outputs[name, way][row]
        _film(axes[column], output)
        error = np.abs(output - truth)
        image = axes[column + 1].imshow(error, cmap="inferno", vmin=0, vmax=ERROR_TOP, interpolation="nearest")
        _bare(axes[column + 1])
        _outline(axes[column + 1], restored.hidden[row], source.shape[0])
    return image


def _film(axis: Axes, film: NDArray[np.float32]) -> None:
    axis.imshow(film, cmap="gray", vmin=0, vmax=1, interpolation="bilinear")
    _bare(axis)


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

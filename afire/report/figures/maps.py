"""Maps of representations: t-SNE of films by class, and of tokens by landmark. N points, C classes."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from afire.config import Config
from afire.report.figures.files import FigureFiles, Source, as_source, claim, films_text, save
from afire.report.style import COLOURS, DOUBLE, INK, MARKERS, SINGLE, style
from afire.report.table import number
from afire.tasks.features import film_features
from afire.tasks.pretrained import standardised
from afire.tasks.representation import (
    LANDMARKS,
    NEIGHBOURS,
    PERPLEXITY,
    Following,
    Places,
    Quality,
    cluster_quality,
    describe_backbone,
    film_classes,
    following,
    landmark_places,
    landmark_tokens,
    load_backbones,
    tsne_map,
    unit_vectors,
)
from afire.weights import pick_device

Floats = NDArray[np.float64]
_MOST_COLUMNS = 4
# A landmark's row is its colour and its column its marker: nine things to tell apart with three of each.
_NUMBERS: dict[str, Any] = {"loc": "left", "fontsize": 6.5, "linespacing": 1.35}
_ROW_COLOURS, _COLUMN_MARKERS = COLOURS[:3], ("o", "s", "^")


@dataclass(frozen=True)
class Panel:
    """One map: its label, the points (N, 2), their numbers."""

    label: str
    places: Floats
    quality: Quality
    following: Following | None = None


def class_style(number_of_class: int) -> tuple[str, str]:
    """Colour and marker of a class; both differ, so that neither is needed. Repeats after 14 classes."""
    turn, place = divmod(number_of_class, len(COLOURS))
    return COLOURS[place], MARKERS[(place + 3 * turn) % len(MARKERS)]


def class_figure(
    panels: Sequence[Panel], classes_N: NDArray[np.int64], names: Sequence[str], caption: str, seed: int
) -> Figure:
    """A map for each weights, coloured by class, with its numbers below it."""
    beside = len(panels) == 2  # then the third place of the row is free for the legend
    columns = 3 if beside else min(len(panels), _MOST_COLUMNS)
    legend_columns = 1 if beside else 2 if columns == 1 else 4
    title = textwrap.fill(caption, 40 if beside else 56 if columns == 1 else 130)
    lines = -(-len(names) // legend_columns) + title.count("\n")
    legend_height = 0.0 if beside else 0.25 + 0.16 * lines
    figure, axes = _grid(len(panels), columns, 3, legend_height)
    # Film by film in random order: drawn class by class, the last class would hide the others.
    order = np.random.default_rng(seed).permutation(len(classes_N))
    styles = [class_style(c) for c in range(len(names))]
    for axis, panel in zip(axes, panels, strict=True):
        _scatter(axis, panel.places, classes_N, styles, order)
        _describe(axis, panel)
    counts = np.bincount(classes_N, minlength=len(names))
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=colour, markersize=4, label=f"{name} ({count:,})")
        for (colour, marker), name, count in zip(styles, names, counts, strict=True)
    ]
    position: dict[str, Any] = (
        {"loc": "center left", "bbox_to_anchor": (2 / 3, 0.5)} if beside else {"loc": "outside lower left"}
    )
    figure.legend(handles=handles, ncols=legend_columns, handletextpad=0.2, title=title, alignment="left", **position)
    return figure


def landmark_figure(
    panels: Sequence[Panel], film: NDArray[np.float32], places: Places, patch_size: int, caption: str, seed: int
) -> Figure:
    """The film with its nine landmarks, then a map of their tokens for each weights."""
    text = textwrap.fill(caption, 58 if len(panels) == 1 else 130)
    columns = min(len(panels) + 1, _MOST_COLUMNS)
    figure, axes = _grid(len(panels) + 1, columns, 4, 0.16 + 0.11 * text.count("\n"))
    _landmark_film(axes[0], film, places, patch_size)
    for axis, panel in zip(axes[1:], panels, strict=True):
        classes = np.tile(np.arange(9), len(panel.places) // 9)
        order = np.random.default_rng(seed).permutation(len(classes))
        styles = [(_ROW_COLOURS[c // 3], _COLUMN_MARKERS[c % 3]) for c in range(9)]
        _scatter(axis, panel.places, classes, styles, order, size=5)
        for c in range(9):
            middle = np.median(panel.places[classes == c], axis=0)
            _number(axis, middle[0], middle[1], c)
        _describe(axis, panel)
    figure.supxlabel(text, fontsize=6.5, color=INK, x=0.01, ha="left")
    return figure


def _grid(count: int, columns: int, lines: int, below: float) -> tuple[Figure, list[Axes]]:
    """Square panels with ``lines`` of numbers under each, and ``below`` inches under all of them."""
    rows = -(-count // columns)
    width = SINGLE if columns < 3 else DOUBLE
    high = width / columns + 0.2 + 0.13 * lines
    figure: Figure
    figure, grid = plt.subplots(rows, columns, figsize=(width, rows * high + below), squeeze=False)
    axes = list(grid.flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes[:count]


def _scatter(
    axis: Axes,
    places: Floats,
    classes: NDArray[np.int64],
    styles: Sequence[tuple[str, str]],
    order: NDArray[np.int64],
    size: float = 7,
) -> None:
    # matplotlib draws one marker a call: ten slices of each class in turn keep the order nearly random.
    for batch in np.array_split(order, 12):
        for c, (colour, marker) in enumerate(styles):
            indices = batch[classes[batch] == c]
            x, y = places[indices].T
            axis.scatter(x, y, s=size, c=colour, marker=marker, alpha=0.75, linewidths=0)
    axis.set(xticks=[], yticks=[])
    axis.set_box_aspect(1)
    axis.margins(0.04)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(True)
        axis.spines[side].set_color("#D0D0D0")


def _describe(axis: Axes, panel: Panel) -> None:
    """The label above, the numbers below."""
    axis.set_title(panel.label, fontweight="bold")
    quality = panel.quality
    ks = ", ".join(map(str, quality.purity))
    shares = ", ".join(number(share.mean, 2) for share in quality.purity.values())
    lines = [
        f"silhouette {number(quality.silhouette)}",
        f"purity of {ks} neighbours",
        f"{shares} (chance {number(quality.chance, 2)})",
    ]
    if panel.following is not None:
        share = panel.following
        lines.append(f"moved: {100 * share.anatomy:.0f} % anatomy, {100 * share.place:.0f} % place")
    axis.set_xlabel("\n".join(lines).replace("-0.", "−0."), **_NUMBERS)


def _landmark_film(axis: Axes, film: NDArray[np.float32], places: Places, patch_size: int) -> None:
    axis.imshow(film, cmap="gray", vmin=0, vmax=1)
    for c in range(9):
        row, column = places.rows[c // 3], places.columns[c % 3]
        x, y = (column + 0.5) * patch_size - 0.5, (row + 0.5) * patch_size - 0.5
        square = plt.Rectangle(
            (x - patch_size / 2, y - patch_size / 2),
            patch_size,
            patch_size,
            fill=False,
            edgecolor="white",
            linewidth=0.8,
        )
        axis.add_patch(square)
        _number(axis, x, y, c)
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_title("landmarks", fontweight="bold")
    axis.set_xlabel("colour: row of the landmark\nmarker: its column\nbadge: median of its tokens", **_NUMBERS)


def _number(axis: Axes, x: float, y: float, landmark: int) -> None:
    colour = _ROW_COLOURS[landmark // 3]
    badge = {"boxstyle": "circle,pad=0.2", "facecolor": colour, "edgecolor": "white", "linewidth": 0.7}
    axis.text(
        x, y, str(landmark + 1), color="white", fontsize=6, fontweight="bold", ha="center", va="center", bbox=badge
    )


def quality_record(quality: Quality, map_quality: Quality | None = None) -> Mapping[str, object]:
    """The numbers of a panel for its JSON."""
    record: dict[str, object] = {
        "silhouette": quality.silhouette,
        "purity": {
            str(k): {"mean": share.mean, "low": share.low, "high": share.high} for k, share in quality.purity.items()
        },
        "purity_by_chance": quality.chance,
    }
    if map_quality is not None:
        record["silhouette_of_the_map"] = map_quality.silhouette
    return record


logger = logging.getLogger("afire")
LANDMARK_FILMS = 200


def draw_tsne(
    out: Path,
    weights: Mapping[str, str | Path],
    source: Source | Path,
    *,
    labels: Sequence[str] | None = None,
    classes: int = 7,
    perplexity: float = PERPLEXITY,
    neighbours: Sequence[int] = NEIGHBOURS,
    network: str | None = None,
    config: Config | None = None,
    device: str = "auto",
    force: bool = False,
) -> FigureFiles:
    """t-SNE of film representations (mean image token) coloured by class, a panel for each of ``weights``."""
    stem, source, target = claim(out, "tsne", force), as_source(source), pick_device(device)
    backbones = load_backbones(weights, config, network, source.seed)
    first = source.open(next(iter(backbones.values())).config.image)
    subset, split_hash = source.rows(first)
    grouping = film_classes(first.manifest, subset, labels, classes)
    rows = source.draw(grouping.rows)
    number = dict(zip(grouping.rows.tolist(), grouping.number.tolist(), strict=True))
    classes_N = np.array([number[row] for row in rows.tolist()], np.int64)
    patients = first.manifest.table["patient"].to_numpy(dtype=object)[rows]
    panels, numbers = [], {}
    for label, backbone in backbones.items():
        logger.info("%s: %s", label, backbone.report)
        features = film_features(backbone, source.open(backbone.config.image), rows, "mean", target)
        unit = unit_vectors(features)
        quality = cluster_quality(unit, classes_N, patients, neighbours, np.random.default_rng(source.seed))
        panels.append(Panel(label, tsne_map(unit, perplexity, source.seed), quality))
        numbers[label] = quality_record(quality)
    data = source.record(first, rows, len(grouping.rows), split_hash)
    counts = np.bincount(classes_N, minlength=len(grouping.names)).tolist()
    record: dict[str, Any] = {
        "figure": "tsne",
        "weights": {label: describe_backbone(backbone) for label, backbone in backbones.items()},
        "data": {**data, "left_out": {"rarer_classes": grouping.others, "unknown_labels": grouping.unknown}},
        "settings": {"perplexity": perplexity, "neighbours": list(neighbours), "network": network, "seed": source.seed},
        "classes": dict(zip(grouping.names, counts, strict=True)),
        "numbers": numbers,
    }
    with style(print_size=True):
        caption = f"{films_text(data)}; t-SNE, perplexity {perplexity:g}"
        return save(stem, class_figure(panels, classes_N, grouping.names, caption, source.seed), record)


def draw_landmarks(
    out: Path,
    weights: Mapping[str, str | Path],
    source: Source | Path,
    *,
    perplexity: float = PERPLEXITY,
    neighbours: Sequence[int] = NEIGHBOURS,
    network: str | None = None,
    config: Config | None = None,
    device: str = "auto",
    force: bool = False,
) -> FigureFiles:
    """t-SNE of the tokens at nine places of each film, and whether tokens of moved films follow anatomy or place."""
    stem, target = claim(out, "landmarks", force), pick_device(device)
    source = as_source(source, LANDMARK_FILMS)
    backbones = load_backbones(weights, config, network, source.seed)
    leader = next(iter(backbones.values()))
    first = source.open(leader.config.image)
    subset, split_hash = source.rows(first)
    rows = source.draw(subset)
    patients = np.repeat(first.manifest.table["patient"].to_numpy(dtype=object)[rows], 9)
    panels, numbers = [], {}
    for label, backbone in backbones.items():
        logger.info("%s: %s", label, backbone.report)
        films, patch = source.open(backbone.config.image), backbone.config.encoder.patch_size
        places = landmark_places((films.size // patch, films.size // patch))
        tokens = landmark_tokens(backbone, films, rows, places.tokens((films.size // patch,) * 2), target)
        unit = unit_vectors(tokens.reshape(len(rows) * 9, -1))
        landmarks = np.tile(np.arange(9), len(rows))
        quality = cluster_quality(unit, landmarks, patients, neighbours, np.random.default_rng(source.seed))
        moved = following(backbone, films, rows, places, tokens, target)
        panels.append(Panel(label, tsne_map(unit, perplexity, source.seed, "tokens"), quality, moved))
        numbers[label] = {**quality_record(quality), "moved_films": asdict(moved)}
    data = source.record(first, rows, len(subset), split_hash)
    patch = leader.config.encoder.patch_size
    places = landmark_places((first.size // patch, first.size // patch))
    record: dict[str, Any] = {
        "figure": "landmarks",
        "weights": {label: describe_backbone(backbone) for label, backbone in backbones.items()},
        "data": data,
        "settings": {"perplexity": perplexity, "neighbours": list(neighbours), "network": network, "seed": source.seed},
        "landmarks": {"names": list(LANDMARKS), "rows": places.rows, "columns": places.columns},
        "numbers": numbers,
    }
    with style(print_size=True):
        mean = standardised(first.batch(rows)).mean(dim=0)[0].numpy()
        caption = f"{films_text(data)}, nine tokens each; t-SNE, perplexity {perplexity:g}"
        return save(stem, landmark_figure(panels, mean, places, patch, caption, source.seed), record)

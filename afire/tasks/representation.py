"""What a representation keeps apart: films by class and tokens by landmark, as maps to look at and as numbers.

Numbers and t-SNE map start from the same unit vectors: features standardised over the points shown, then scaled to
length 1, so that distances follow the cosine. The numbers do not depend on the map. Neighbours of the same patient
never count: films of one person resemble each other whatever they show.

The landmarks are nine places of the film: do tokens know where they are, and is it by anatomy or by position? Every
token carries its position, so even random weights keep the nine apart on films as they lie. The second question needs
films that are moved: then a landmark's place shows another landmark's anatomy, and the nearest of the nine centres says
which of the two a token follows.

Shapes: N points or films, C classes, L tokens, D width, 9 landmarks row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from afire.config import Config
from afire.data.manifest import Manifest, task_labels
from afire.data.pack import Films
from afire.errors import UserError
from afire.nn.vit import Grid
from afire.settings import changed
from afire.tasks.evaluate import bootstrap_means
from afire.tasks.features import feature_batches
from afire.tasks.results import Estimate, Rows, estimate
from afire.weights import RANDOM, FileWeights, RandomWeights, Weights, open_weights

Floats = NDArray[np.float64]
NEIGHBOURS = (5, 10, 20)
PERPLEXITY = 30.0
_NORMAL, _NONE = "normal", "none of these"
_SMALLEST_STD = 1e-8
LANDMARKS = (
    "upper left", "upper middle", "upper right",
    "middle left", "centre", "middle right",
    "lower left", "lower middle", "lower right",
)  # fmt: skip


def load_backbones(
    weights: Mapping[str, str | Path], config: Config | None = None, network: str | None = None, seed: int = 0
) -> dict[str, Weights]:
    """A backbone for each label. Runs bring their own settings, and files their architecture; ``config`` is for random
    weights and for what files do not say.

    Without ``config``, that of the first run or file beside them with a ViT is taken: the fair thing to compare.
    """
    if not weights:
        raise UserError("a figure needs at least one --weights.")
    opened = {label: open_weights(source, network=network, seed=seed) for label, source in weights.items()}
    candidates = sorted(
        (backbone for backbone in opened.values() if not isinstance(backbone, RandomWeights)),
        key=lambda backbone: not backbone.brings_settings,
    )
    lenders = (backbone for backbone in candidates if backbone.holds_vit or not backbone.brings_settings)
    config = config or next((backbone.config for backbone in lenders), None)
    return {
        label: backbone
        if backbone.brings_settings
        else open_weights(weights[label], _completed(backbone, config), network=network, seed=seed)
        for label, backbone in opened.items()
    }


def _completed(backbone: Weights, config: Config | None) -> Config | None:
    """The settings, with the architecture of a file that has another."""
    if config is None or not isinstance(backbone, FileWeights) or backbone.architecture.fits(config):
        return config
    architecture = backbone.architecture.settings()
    return changed(config, {**architecture, "image": {**architecture["image"], "size": config.image.size}})


def describe_backbone(backbone: Weights) -> dict[str, Any]:
    """What a figure's JSON says about weights."""
    has_head = backbone.name != RANDOM and backbone.holds_vit and "head" in backbone.kind.sections
    return {
        "name": backbone.name,
        "hash": backbone.hash,
        "report": backbone.report,
        "network": backbone.network,
        "clusters": backbone.config.head.clusters if has_head else None,
        "width": backbone.config.encoder.width,
        "depth": backbone.config.encoder.depth,
        "image_size": backbone.config.image.size,
    }


@dataclass(frozen=True)
class Classes:
    """Names (C), commonest first, and the films that belong to one of them with its number."""

    names: list[str]
    rows: Rows
    number: NDArray[np.int64]
    others: int  # films whose combination is rarer
    unknown: int  # films with an unknown label


@dataclass(frozen=True)
class Quality:
    """Silhouette, and for each k the share of a point's k nearest neighbours that are of its class.

    ``purity`` and ``chance`` weigh all classes equally; ``chance`` is the purity of neighbours drawn blindly.
    """

    silhouette: float
    purity: dict[int, Estimate]
    chance: float


def film_classes(manifest: Manifest, rows: Rows, labels: Sequence[str] | None, most: int) -> Classes:
    """Classes of films: each combination of labels is one, as in the paper's t-SNE; the ``most`` commonest stay."""
    names, truth_NC = task_labels(manifest, labels)
    truth = truth_NC[rows]
    known = ~np.isnan(truth).any(axis=1)
    if not known.any():
        raise UserError("no film of this subset has a value for all of the labels; choose fewer with --labels.")
    combinations, combination = np.unique(truth[known], axis=0, return_inverse=True)
    counts = np.bincount(combination.reshape(-1))
    order = np.argsort(-counts, kind="stable")[:most]
    rank = np.full(len(counts), -1)
    rank[order] = np.arange(len(order))
    number = rank[combination.reshape(-1)]
    normal = manifest.table["normal"].to_numpy()[rows][known]
    classes = [_class_name(names, combinations[c], normal[number == i]) for i, c in enumerate(order)]
    if len(classes) < 2:
        raise UserError(f"all films of this subset are {classes[0]!r}; a map needs at least two classes: try --labels.")
    in_class = number >= 0
    return Classes(classes, rows[known][in_class], number[in_class], int((~in_class).sum()), int((~known).sum()))


def _class_name(names: Sequence[str], present_C: Floats, normal: Floats) -> str:
    findings = [name.replace("_", " ") for name, value in zip(names, present_C, strict=True) if value == 1]
    if findings:
        return " + ".join(findings)
    return _NORMAL if (normal == 1).all() else _NONE


def unit_vectors(features_ND: NDArray[np.float32]) -> Floats:
    """Features standardised over the points, then of length 1."""
    features = features_ND.astype(np.float64)
    standard = (features - features.mean(axis=0)) / np.maximum(features.std(axis=0), _SMALLEST_STD)
    unit: Floats = standard / np.maximum(np.linalg.norm(standard, axis=1, keepdims=True), _SMALLEST_STD)
    return unit


def tsne_map(unit_ND: Floats, perplexity: float, seed: int, points: str = "films") -> Floats:
    """A map (N, 2) of unit vectors by t-SNE, begun from their first two principal components."""
    fewest = int(3 * perplexity) + 1
    if len(unit_ND) < fewest:
        raise UserError(
            f"t-SNE with perplexity {perplexity:g} needs at least {fewest} {points}, but there are {len(unit_ND)}; "
            f"lower --perplexity (to {max((len(unit_ND) - 1) // 3, 1)} or less) or give more films."
        )
    from sklearn.manifold import TSNE

    places: Floats = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(
        unit_ND.astype(np.float32)
    )
    return places.astype(np.float64)


def cluster_quality(
    unit_ND: Floats,
    classes_N: NDArray[np.int64],
    patients_N: NDArray[np.object_],
    neighbours: Sequence[int],
    generator: np.random.Generator,
) -> Quality:
    """The numbers of :class:`Quality`, with 95 % intervals of the purity from a bootstrap over patients."""
    from sklearn.metrics import silhouette_score

    similarity_NN = unit_ND @ unit_ND.T
    patient = np.unique(patients_N.astype(str), return_inverse=True)[1].reshape(-1)
    foreign_NN = patient[:, None] != patient[None]
    same_NN = classes_N[:, None] == classes_N[None]
    available = int(foreign_NN.sum(axis=1).min())
    if available < max(neighbours):
        raise UserError(
            f"{max(neighbours)} nearest neighbours need as many points of other patients, but there are {available}; "
            "give more films or a smaller --neighbours."
        )
    order = np.argsort(np.where(foreign_NN, -similarity_NN, np.inf), axis=1, kind="stable")[:, : max(neighbours)]
    agree = np.take_along_axis(same_NN, order, axis=1)
    purity = {
        k: _class_mean(agree[:, :k].mean(axis=1), classes_N, patients_N, generator) for k in sorted(set(neighbours))
    }
    blind = (same_NN & foreign_NN).sum(axis=1) / foreign_NN.sum(axis=1)
    silhouette = float(
        silhouette_score(
            np.clip(1 - similarity_NN, 0, None) * _off_diagonal(len(unit_ND)), classes_N, metric="precomputed"
        )
    )
    return Quality(silhouette, purity, _mean_of_classes(blind, classes_N))


def _off_diagonal(count: int) -> Floats:
    mask: Floats = 1 - np.eye(count)
    return mask


def _mean_of_classes(values_N: Floats, classes_N: NDArray[np.int64]) -> float:
    return float(np.mean([values_N[classes_N == c].mean() for c in np.unique(classes_N)]))


def _class_mean(
    values_N: Floats, classes_N: NDArray[np.int64], patients_N: NDArray[np.object_], generator: np.random.Generator
) -> Estimate:
    by_class = {str(c): np.where(classes_N == c, values_N, np.nan) for c in np.unique(classes_N)}
    draws = bootstrap_means([by_class], [patients_N], generator)
    return estimate([_mean_of_classes(values_N, classes_N)], np.nanmean(np.stack(list(draws.values())), axis=0))


@dataclass(frozen=True)
class Places:
    """Rows and columns of the nine tokens, and how many tokens lie from one to the next."""

    rows: tuple[int, int, int]
    columns: tuple[int, int, int]
    spacing: tuple[int, int]

    def tokens(self, grid: Grid) -> list[int]:
        """Numbers of the nine tokens, row by row."""
        return [row * grid[1] + column for row in self.rows for column in self.columns]


@dataclass(frozen=True)
class Following:
    """What tokens of moved films are nearest to: the landmark at their place, that of their anatomy, others; shares."""

    place: float
    anatomy: float
    other: float


def landmark_places(grid: Grid) -> Places:
    """Nine equally spaced tokens around the middle of a grid of tokens."""
    if min(grid) < 3:
        raise UserError(
            f"nine landmarks need a grid of at least 3 x 3 tokens, but these films have {grid[0]} x {grid[1]}."
        )
    (first_row, down), (first_column, across) = _spread(grid[0]), _spread(grid[1])
    rows = (first_row, first_row + down, first_row + 2 * down)
    columns = (first_column, first_column + across, first_column + 2 * across)
    return Places(rows, columns, (down, across))


def _spread(side: int) -> tuple[int, int]:
    step = (side - 1) // 3 or 1
    return (side - 1 - 2 * step) // 2, step


def landmark_tokens(
    backbone: Weights, films: Films, rows: Rows, tokens: Sequence[int], device: torch.device | None = None
) -> NDArray[np.float32]:
    """The tokens (N, 9, D) of the landmarks."""
    return np.concatenate(
        [batch[:, list(tokens)] for batch in feature_batches(backbone, films, rows, "tokens", device)]
    )


class ShiftedFilms:
    """Films moved by whole pixels; what leaves on one side comes in on the other, so that grey levels stay."""

    def __init__(self, films: Films, down: int, right: int) -> None:
        self.films, self.down, self.right = films, down, right
        self.manifest: Manifest = films.manifest
        self.size, self.fit, self.voi = films.size, films.fit, films.voi

    def __len__(self) -> int:
        return len(self.films)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.batch([row])[0]

    def batch(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.roll(self.films.batch(rows), (self.down, self.right), dims=(-2, -1))


def following(
    backbone: Weights,
    films: Films,
    rows: Rows,
    places: Places,
    tokens_N9D: NDArray[np.float32],
    device: torch.device | None = None,
) -> Following:
    """Move films one landmark to the right, then one down, and see which landmark's centre each token is nearest to."""
    grid = (films.size // backbone.config.encoder.patch_size,) * 2
    patch = backbone.config.encoder.patch_size
    numbers = np.arange(9).reshape(3, 3)
    moves = (
        (0, places.spacing[1] * patch, numbers[:, 1:].ravel(), numbers[:, :-1].ravel()),
        (places.spacing[0] * patch, 0, numbers[1:].ravel(), numbers[:-1].ravel()),
    )
    mean, std = tokens_N9D.mean(axis=(0, 1)), tokens_N9D.std(axis=(0, 1)) + 1e-8
    centres_9D = _unit(((tokens_N9D - mean) / std).mean(axis=0))
    counts = np.zeros(3)
    for down, right, landmarks, anatomy in moves:
        moved = landmark_tokens(backbone, ShiftedFilms(films, down, right), rows, places.tokens(grid), device)
        nearest = (_unit((moved[:, landmarks] - mean) / std) @ centres_9D.T).argmax(axis=-1)
        at_place, of_anatomy = nearest == landmarks, nearest == anatomy
        counts += [at_place.sum(), of_anatomy.sum(), (~at_place & ~of_anatomy).sum()]
    place, by_anatomy, neither = (counts / counts.sum()).tolist()
    return Following(place, by_anatomy, neither)


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    unit: NDArray[np.float32] = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-8)
    return unit

"""How well representations keep classes apart: a t-SNE map to look at, and numbers that do not depend on the map.

Numbers and map start from the same unit vectors: features standardised over the points shown, then scaled to length 1,
so that distances follow the cosine. Neighbours of the same patient never count: films of one person resemble each
other whatever they show. N points, D width, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afire.data.manifest import Manifest
from afire.errors import UserError
from afire.tasks.evaluate import bootstrap_means
from afire.tasks.figure_films import Rows
from afire.tasks.labels import task_labels
from afire.tasks.results import Estimate, estimate

Floats = NDArray[np.float64]
NEIGHBOURS = (5, 10, 20)
PERPLEXITY = 30.0
_NORMAL, _NONE = "normal", "none of these"
_SMALLEST_STD = 1e-8


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
        raise UserError("no film of this part has a value for all of the labels; choose fewer with --labels.")
    combinations, found = np.unique(truth[known], axis=0, return_inverse=True)
    counts = np.bincount(found.reshape(-1))
    order = np.argsort(-counts, kind="stable")[:most]
    rank = np.full(len(counts), -1)
    rank[order] = np.arange(len(order))
    number = rank[found.reshape(-1)]
    normal = manifest.table["normal"].to_numpy()[rows][known]
    words = [_class_name(names, combinations[c], normal[number == i]) for i, c in enumerate(order)]
    if len(words) < 2:
        raise UserError(f"all films of this part are {words[0]!r}; clusters need at least two classes: try --labels.")
    kept = number >= 0
    return Classes(words, rows[known][kept], number[kept], int((~kept).sum()), int((~known).sum()))


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


def tsne_map(unit_ND: Floats, perplexity: float, seed: int, what: str = "films") -> Floats:
    """A map (N, 2) of unit vectors by t-SNE, begun from their first two principal components."""
    fewest = int(3 * perplexity) + 1
    if len(unit_ND) < fewest:
        raise UserError(
            f"t-SNE with perplexity {perplexity:g} needs at least {fewest} {what}, but there are {len(unit_ND)}; "
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

"""How well representations keep classes apart: a t-SNE map to look at, and numbers that do not depend on the map.

Numbers and map start from the same unit vectors: features standardised over the points shown, then scaled to length 1,
so that distances follow the cosine. Neighbours of the same patient never count: films of one person resemble each
other whatever they show. N points, D width, C classes.

An atlas of the prototypes: for each place, how sure its prototype is and which patches it deems typical.

How close a patch is to a prototype is the Hellinger distance between its cluster probabilities q and the prototype c:
0 for equal ones, 1 for ones that share no cluster. q is the teacher's, balanced by Sinkhorn-Knopp over all films of the
atlas as it is in training: prototypes are means of such q, and a plain softmax would lie far from all of them.
N films, L places, K clusters, p patch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afire.data.manifest import Manifest
from afire.data.pack import Films
from afire.errors import UserError
from afire.methods.afire import AFiRe
from afire.methods.equations import sinkhorn
from afire.nn.vit import Grid, patchify
from afire.progress import progress
from afire.tasks.evaluate import bootstrap_means, task_labels
from afire.tasks.figure_data import Rows
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


BATCH = 64
_LOWEST, _HIGHEST = -2.0, 2.0  # of a film's standardised grey levels, shown as black and white


@dataclass(frozen=True)
class Atlas:
    """What the prototypes say, place by place (L, row by row), about N films."""

    grid: Grid
    clusters: int
    entropy: NDArray[np.float64]  # (L,), 1 = uniform
    cluster: NDArray[np.int64]  # (L,), the likeliest
    probability: NDArray[np.float64]  # (L,), of the likeliest
    nearest_film: NDArray[np.int64]  # (L, k), rows of the manifest, from the closest on; each film once
    nearest_place: NDArray[np.int64]  # (L, k), where in that film the patch lies
    nearest_distance: NDArray[np.float64]  # (L, k)
    nearest_patches: NDArray[np.float32]  # (L, k, p, p) in [0, 1], of standardised films
    typical_film: NDArray[np.int64]  # (L,), whose patch at this very place is closest
    typical_patches: NDArray[np.float32]  # (L, p, p)
    own_place: NDArray[np.float64]  # (L,), share of films whose closest patch lies at the prototype's own place
    near_place: NDArray[np.float64]  # (L,), the same with the eight places around it
    mean_film: NDArray[np.float32]  # (S, S), of the standardised films


def build_atlas(model: AFiRe, films: Films, rows: Rows, nearest: int, device: torch.device) -> Atlas:
    """Compare every patch of ``rows`` with every prototype."""
    _check(model, films, rows, nearest)
    model = model.to(device)
    prototypes = model.prototypes.detach().float()
    affinity_NLL, mean_film = _affinities(model, films, rows, prototypes, device)
    grid, places = model.grid, prototypes.shape[0]
    best_place_NL = affinity_NLL.argmax(dim=1)  # of each film, for each prototype
    best_NL = affinity_NLL.gather(1, best_place_NL[:, None])[:, 0]
    top = best_NL.topk(nearest, dim=0)
    nearest_number = top.indices.T
    nearest_place = best_place_NL.gather(0, top.indices).T
    typical = torch.diagonal(affinity_NLL, dim1=1, dim2=2).argmax(dim=0)
    entropy = torch.special.entr(prototypes).sum(1) / np.log(prototypes.shape[1])
    probability, cluster = prototypes.max(dim=1)
    own, near = _at_home(best_place_NL, grid)
    return Atlas(
        grid=grid,
        clusters=prototypes.shape[1],
        entropy=entropy.double().cpu().numpy(),
        cluster=cluster.cpu().numpy(),
        probability=probability.double().cpu().numpy(),
        nearest_film=rows[nearest_number.cpu().numpy()],
        nearest_place=nearest_place.cpu().numpy(),
        nearest_distance=_distance(top.values.T).double().cpu().numpy(),
        nearest_patches=_patches(films, rows, nearest_number.cpu(), nearest_place.cpu(), model.patch_size),
        typical_film=rows[typical.cpu().numpy()],
        typical_patches=_patches(films, rows, typical[:, None].cpu(), torch.arange(places)[:, None], model.patch_size)[
            :, 0
        ],
        own_place=own.double().cpu().numpy(),
        near_place=near.double().cpu().numpy(),
        mean_film=mean_film,
    )


def _check(model: AFiRe, films: Films, rows: Rows, nearest: int) -> None:
    _ = model.prototypes  # says so when there are none
    if model.config.losses.contrast == "feature":
        raise UserError("this run contrasts features (losses.contrast is feature) and has no clusters to show.")
    if films.size != model.config.image.size:
        raise UserError(
            f"the films have {films.size} px, but the prototypes are places of a film of {model.config.image.size} px; "
            f"pack the films at {model.config.image.size}."
        )
    if len(rows) < nearest:
        raise UserError(f"{nearest} nearest patches need as many normal films, but there are {len(rows)}.")


@torch.inference_mode()
def _affinities(
    model: AFiRe, films: Films, rows: Rows, prototypes_LK: Tensor, device: torch.device
) -> tuple[Tensor, NDArray[np.float32]]:
    """sum_k sqrt(q c) of each patch and prototype, (N, L patches, L prototypes), and the mean of the films."""
    head = model.teacher.head
    assert head is not None  # there are prototypes, so there is a head
    logits, total = [], torch.zeros(films.size, films.size, dtype=torch.float64)
    with progress("prototypes", len(rows), "films") as bar:
        for start in range(0, len(rows), BATCH):
            images = films.batch(rows[start : start + BATCH])
            logits.append(head(model.encode(images.to(device))))
            total += standardised(images)[:, 0].double().sum(dim=0)
            bar.advance(len(images))
    logits_NLK = torch.cat(logits)
    balanced = sinkhorn(
        logits_NLK.flatten(0, 1), model.teacher_temperature, model.config.prototypes.sinkhorn_iterations
    )
    affinity = balanced.sqrt_().view_as(logits_NLK) @ prototypes_LK.sqrt().T
    return affinity, (total / len(rows)).float().numpy()


def _distance(affinity: Tensor) -> Tensor:
    return (1 - affinity).clamp_min(0).sqrt()


def _at_home(best_place_NL: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    home = torch.arange(grid[0] * grid[1], device=best_place_NL.device)
    rows = (best_place_NL // grid[1] - home // grid[1]).abs()
    columns = (best_place_NL % grid[1] - home % grid[1]).abs()
    return (best_place_NL == home).float().mean(dim=0), ((rows <= 1) & (columns <= 1)).float().mean(dim=0)


def standardised(images: Tensor) -> Tensor:
    """Films by their own mean and deviation, shown between -2 and 2: patches of many films then have one tone."""
    std, mean = torch.std_mean(images, dim=(1, 2, 3), keepdim=True, correction=0)
    return (((images - mean) / std.clamp_min(1e-3) - _LOWEST) / (_HIGHEST - _LOWEST)).clamp(0, 1)


def _patches(films: Films, rows: Rows, numbers_Lk: Tensor, places_Lk: Tensor, patch_size: int) -> NDArray[np.float32]:
    """The patches (L, k, p, p) of the given films (numbers into ``rows``) at the given places."""
    used, where = torch.unique(numbers_Lk, return_inverse=True)
    cut = torch.empty(*numbers_Lk.shape, patch_size, patch_size)
    for number, film in enumerate(used.tolist()):
        patches = patchify(standardised(films.batch([int(rows[film])])), patch_size)[0]
        chosen = where == number
        cut[chosen] = patches[places_Lk[chosen]].view(-1, patch_size, patch_size)
    return cut.numpy()

"""What a pre-trained method has learned, shown on films: what its decoder restores and what its prototypes hold.

Restorations: each film is shown twice, with synthetic lesions and as it is, with the same tokens hidden from the
decoder or with nothing hidden. Errors are measured against the film without lesions, in grey levels between 0 and 1.

The atlas gives for each place the entropy of its prototype and the patches nearest to it. How close a patch is to a
prototype is the Hellinger distance between its cluster probabilities q and the prototype c: 0 for equal ones, 1 for
ones that share no cluster. q is the teacher's, balanced by Sinkhorn-Knopp over all films of the atlas as it is in
training: prototypes are means of such q, and a plain softmax would lie far from all of them.

Shapes: N films, S pixels a side, L places, K clusters, p patch size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afire.data.pack import Films
from afire.errors import UserError
from afire.lesions.synthesis import synthesize_keyed, token_labels
from afire.methods import Method
from afire.methods.afire import AFiRe
from afire.methods.equations import sinkhorn
from afire.nn.vit import Grid, grid_of, patchify
from afire.progress import progress
from afire.tasks.results import Rows

Pictures = NDArray[np.float32]
Floats = NDArray[np.float64]
_RESTORED_AT_ONCE = 32
INPUTS = ("lesioned", "normal")
WAYS = ("z_mask", "all_seen", "untouched")  # untouched: the input itself, as if nothing were restored
_ATLAS_AT_ONCE = 64
_LOWEST, _HIGHEST = -2.0, 2.0  # of a film's standardised grey levels, shown as black and white


@dataclass(frozen=True)
class Restored:
    """Films (N, S, S) in [0, 1]: the truth, what went in, what came out; and the hidden tokens (N, rows, columns)."""

    truth: Pictures
    inputs: dict[str, Pictures]
    outputs: dict[tuple[str, str], Pictures]  # (input, way)
    hidden: NDArray[np.bool_]


@dataclass(frozen=True)
class Errors:
    """Mean squared errors (N,) of each (input, way) inside the hidden tokens and outside; NaN where there are none."""

    inside: dict[tuple[str, str], Floats]
    outside: dict[tuple[str, str], Floats]


def check_restores(model: Method, name: str) -> None:
    """A message when the model cannot restore, or has no z_mask to compare with."""
    if not model.restores:
        raise UserError(f"{name} was pre-trained without restoration: it has no decoder.")
    if not model.config.decoder.mask_token:
        raise UserError(
            f"{name} was pre-trained without z_mask (decoder.mask_token is false): there is nothing to compare."
        )


@torch.inference_mode()
def restore_films(model: Method, images: Tensor, rows: Rows, seed: int) -> Restored:
    """Restore images (N, 1, S, S) in both ways. A film's lesions follow from ``seed`` and its row alone."""
    lesions = model.config.lesions.model_copy(update={"views": 1})
    lesioned, mask = synthesize_keyed(images, seed=seed, epoch=0, indices=rows.tolist(), config=lesions)
    hidden = token_labels(mask, model.patch_size)
    inputs = {"lesioned": lesioned, "normal": images}
    outputs = {}
    for name, batch in inputs.items():
        for way, behind in (("z_mask", hidden), ("all_seen", None)):
            # Normalised by the clean film's numbers, which are those the decoder learnt to answer in.
            outputs[name, way] = _grey(model.picture(model.restore(batch, behind), like=images))
    grid = grid_of(images.shape[-2], images.shape[-1], model.patch_size)
    return Restored(
        _grey(images),
        {name: _grey(batch) for name, batch in inputs.items()},
        outputs,
        hidden.view(-1, *grid).cpu().numpy(),
    )


def restoration_errors(model: Method, films: Films, rows: Rows, seed: int, device: torch.device) -> Errors:
    """The errors of many films."""
    model = model.to(device)
    inside: dict[tuple[str, str], list[Floats]] = {(name, way): [] for name in INPUTS for way in WAYS}
    outside: dict[tuple[str, str], list[Floats]] = {key: [] for key in inside}
    with progress("restoring", len(rows), "films") as bar:
        for start in range(0, len(rows), _RESTORED_AT_ONCE):
            batch = rows[start : start + _RESTORED_AT_ONCE]
            restored = restore_films(model, films.batch(batch).to(device), batch, seed)
            hidden = np.kron(restored.hidden, np.ones((1, model.patch_size, model.patch_size), np.bool_))
            for name, way in inside:
                picture = restored.inputs[name] if way == "untouched" else restored.outputs[name, way]
                error = (picture.astype(np.float64) - restored.truth) ** 2
                inside[name, way].append(_mean_where(error, hidden))
                outside[name, way].append(_mean_where(error, ~hidden))
            bar.advance(len(batch))
    return Errors(
        {key: np.concatenate(values) for key, values in inside.items()},
        {key: np.concatenate(values) for key, values in outside.items()},
    )


def _mean_where(values: Floats, mask: NDArray[np.bool_]) -> Floats:
    count = mask.sum(axis=(1, 2))
    total = (values * mask).sum(axis=(1, 2))
    means: Floats = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
    return means


def _grey(images: Tensor) -> Pictures:
    grey: Pictures = images.float().mean(dim=1).cpu().numpy()
    return grey


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
    typical_place: NDArray[np.int64]  # (L,), where in that film it lies: at the place's own position, but for anatomy
    typical_patches: NDArray[np.float32]  # (L, p, p)
    own_place: NDArray[np.float64]  # (L,), share of films whose closest patch lies at the prototype's own place
    near_place: NDArray[np.float64]  # (L,), the same with the eight places around it
    mean_film: NDArray[np.float32]  # (S, S), of the standardised films


def build_atlas(model: AFiRe, films: Films, rows: Rows, nearest: int, device: torch.device) -> Atlas:
    """Compare every patch of ``rows`` with every prototype."""
    _check_atlas(model, films, rows, nearest)
    model = model.to(device)
    prototypes = model.prototypes.detach().float()
    affinity_NLL, place_NL, mean_film = _affinities(model, films, rows, prototypes, device)
    grid = model.grid
    best_place_NL = affinity_NLL.argmax(dim=1)  # of each film, for each prototype
    best_NL = affinity_NLL.gather(1, best_place_NL[:, None])[:, 0]
    top = best_NL.topk(nearest, dim=0)
    nearest_number = top.indices.T
    nearest_place = best_place_NL.gather(0, top.indices).T
    typical, typical_place = _typical(affinity_NLL, place_NL)
    entropy = torch.special.entr(prototypes).sum(1) / np.log(prototypes.shape[1])
    probability, cluster = prototypes.max(dim=1)
    home, near = _at_home(best_place_NL if place_NL is None else place_NL.gather(1, best_place_NL), grid)
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
        typical_place=typical_place.cpu().numpy(),
        typical_patches=_patches(
            films, rows, typical[:, None].cpu(), typical_place[:, None].cpu(), model.patch_size
        ).squeeze(1),
        own_place=home.double().cpu().numpy(),
        near_place=near.double().cpu().numpy(),
        mean_film=mean_film,
    )


def _check_atlas(model: AFiRe, films: Films, rows: Rows, nearest: int) -> None:
    _ = model.prototypes  # raises an error when there are none
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
) -> tuple[Tensor, Tensor | None, NDArray[np.float32]]:
    """sum_k sqrt(q c) of each patch and prototype, (N, L patches, L prototypes); the places (N, L) of the patches,
    where they are not their positions; and the mean of the films."""
    head = model.teacher.head
    assert head is not None  # there are prototypes, so there is a head
    logits, places, total = [], [], torch.zeros(films.size, films.size, dtype=torch.float64)
    with progress("prototypes", len(rows), "films") as bar:
        for start in range(0, len(rows), _ATLAS_AT_ONCE):
            images = films.batch(rows[start : start + _ATLAS_AT_ONCE])
            logits.append(head(model.encode(images.to(device))))
            places.append(model.places(images.to(device)))
            total += standardised(images)[:, 0].double().sum(dim=0)
            bar.advance(len(images))
    logits_NLK = torch.cat(logits)
    balanced = sinkhorn(
        logits_NLK.flatten(0, 1), model.teacher_temperature, model.config.prototypes.sinkhorn_iterations
    )
    affinity = balanced.sqrt_().view_as(logits_NLK) @ prototypes_LK.sqrt().T
    known = [place for place in places if place is not None]
    return affinity, torch.cat(known) if known else None, (total / len(rows)).float().numpy()


def _typical(affinity_NLL: Tensor, place_NL: Tensor | None) -> tuple[Tensor, Tensor]:
    """The film (L,) whose patch at a place is closest to its prototype, and the position (L,) of that patch.

    Of a place that is in none of the films it is the closest patch anywhere.
    """
    places = torch.arange(affinity_NLL.shape[2], device=affinity_NLL.device)
    if place_NL is None:
        return torch.diagonal(affinity_NLL, dim1=1, dim2=2).argmax(dim=0), places
    here_NLL = place_NL[..., None] == places
    closest = (affinity_NLL + here_NLL).flatten(0, 1).argmax(dim=0)  # an affinity is at most 1
    return closest // place_NL.shape[1], closest % place_NL.shape[1]


def _distance(affinity: Tensor) -> Tensor:
    return (1 - affinity).clamp_min(0).sqrt()


def _at_home(best_place_NL: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    home = torch.arange(grid[0] * grid[1], device=best_place_NL.device)
    rows = (best_place_NL // grid[1] - home // grid[1]).abs()
    columns = (best_place_NL % grid[1] - home % grid[1]).abs()
    return (best_place_NL == home).float().mean(dim=0), ((rows <= 1) & (columns <= 1)).float().mean(dim=0)


def standardised(images: Tensor) -> Tensor:
    """Images by their own mean and deviation, shown between -2 and 2: patches of many films then have one tone."""
    std, mean = torch.std_mean(images, dim=(1, 2, 3), keepdim=True, correction=0)
    return (((images - mean) / std.clamp_min(1e-3) - _LOWEST) / (_HIGHEST - _LOWEST)).clamp(0, 1)


def _patches(films: Films, rows: Rows, numbers_Lk: Tensor, places_Lk: Tensor, patch_size: int) -> NDArray[np.float32]:
    """The patches (L, k, p, p) of the given films (numbers into ``rows``) at the given places."""
    film_numbers, index = torch.unique(numbers_Lk, return_inverse=True)
    cut = torch.empty(*numbers_Lk.shape, patch_size, patch_size)
    for number, film in enumerate(film_numbers.tolist()):
        patches = patchify(standardised(films.batch([int(rows[film])])), patch_size)[0]
        mask = index == number
        cut[mask] = patches[places_Lk[mask]].view(-1, patch_size, patch_size)
    return cut.numpy()

"""What the decoder restores, with abnormal tokens hidden behind z_mask and with all of them seen.

Each film is shown twice: with synthetic lesions, and as it is with the same tokens hidden. Errors are measured against
the film without lesions, in grey levels between 0 and 1. N films, S pixels a side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afire.data.dataset import Films
from afire.errors import UserError
from afire.lesions import synthesize_keyed, token_labels
from afire.model.afire import AFiRe
from afire.model.vit import grid_of
from afire.progress import progress
from afire.tasks.figure_films import Rows

Pictures = NDArray[np.float32]
Floats = NDArray[np.float64]
BATCH = 32
INPUTS = ("lesioned", "normal")
WAYS = ("z_mask", "all_seen", "untouched")  # untouched: the input itself, as if nothing were restored


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


def check_restores(model: AFiRe, name: str) -> None:
    """A sentence when the model cannot restore, or has no z_mask to compare with."""
    if model.decoder is None:
        raise UserError(f"{name} was trained without restoration (losses.restoration is 0): it has no decoder.")
    if model.decoder.mask_token is None:
        raise UserError(
            f"{name} was trained without z_mask (decoder.mask_token is false): there is nothing to compare."
        )


@torch.inference_mode()
def restore_films(model: AFiRe, images: Tensor, rows: Rows, seed: int) -> Restored:
    """Restore films (N, 1, S, S) in both ways. A film's lesions follow from ``seed`` and its row alone."""
    lesions = model.config.lesions.model_copy(update={"views": 1})
    lesioned, mask = synthesize_keyed(images, seed=seed, epoch=0, indices=rows.tolist(), config=lesions)
    hidden = token_labels(mask, model.patch_size)
    inputs = {"lesioned": lesioned, "normal": images}
    outputs = {}
    for name, films in inputs.items():
        for way, abnormal in (("z_mask", hidden), ("all_seen", None)):
            # Normalised by the clean film's numbers, which are those the decoder learnt to answer in.
            outputs[name, way] = _grey(model.picture(model.restore(films, abnormal), like=images))
    grid = grid_of(images.shape[-2], images.shape[-1], model.patch_size)
    return Restored(
        _grey(images),
        {name: _grey(films) for name, films in inputs.items()},
        outputs,
        hidden.view(-1, *grid).cpu().numpy(),
    )


def restoration_errors(model: AFiRe, films: Films, rows: Rows, seed: int, device: torch.device) -> Errors:
    """The errors of many films."""
    model = model.to(device)
    inside: dict[tuple[str, str], list[Floats]] = {(name, way): [] for name in INPUTS for way in WAYS}
    outside: dict[tuple[str, str], list[Floats]] = {key: [] for key in inside}
    with progress("restoring", len(rows), "films") as bar:
        for start in range(0, len(rows), BATCH):
            some = rows[start : start + BATCH]
            found = restore_films(model, films.batch(some).to(device), some, seed)
            hidden = np.kron(found.hidden, np.ones((1, model.patch_size, model.patch_size), np.bool_))
            for name, way in inside:
                picture = found.inputs[name] if way == "untouched" else found.outputs[name, way]
                error = (picture.astype(np.float64) - found.truth) ** 2
                inside[name, way].append(_mean_where(error, hidden))
                outside[name, way].append(_mean_where(error, ~hidden))
            bar.advance(len(some))
    return Errors(
        {key: np.concatenate(values) for key, values in inside.items()},
        {key: np.concatenate(values) for key, values in outside.items()},
    )


def _mean_where(values: Floats, where: NDArray[np.bool_]) -> Floats:
    count = where.sum(axis=(1, 2))
    total = (values * where).sum(axis=(1, 2))
    means: Floats = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
    return means


def _grey(films: Tensor) -> Pictures:
    grey: Pictures = films.float().mean(dim=1).cpu().numpy()
    return grey

"""How abnormal films look to a trained run, without adaptation: a few simple scores, larger = more abnormal.

Directions and choices are fixed here, before any test label is looked at. Shapes: N films, L positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afire.config import load_config
from afire.data.pack import Films
from afire.errors import UserError
from afire.methods.afire import AFiRe
from afire.training.run_folder import CONFIG, newest_checkpoint

DETECTORS = {
    "gaussian": "distance of teacher tokens to a Gaussian of each position",
    "surprise": "mean prototype surprise",
    "restoration": "restoration error (log form of the paper's score)",
    "lesion": "top tenth of lesion probabilities",
}
DETECTION = "gaussian"  # what tables call detection: every row has it
_SHRINKAGE = 0.1
_MOST_FIT_FILMS = 4000  # a Gaussian of a few hundred dimensions is settled long before
_BATCH = 64


def detection_scores(
    run: Path,
    films: Films,
    fit_rows: NDArray[np.int64],
    test_rows: NDArray[np.int64],
    device: torch.device | None = None,
) -> dict[str, NDArray[np.float64]]:
    """Scores (len(test_rows),) of each detector that the run in the folder ``run`` has.

    ``fit_rows`` are normal training films; only the Gaussian needs them.
    """
    target = device or torch.device("cpu")
    model = _load(run).to(target)
    scorers: dict[str, Callable[[Tensor], Tensor]] = {
        "gaussian": _gaussian(model, films, _thinned(fit_rows, _MOST_FIT_FILMS), target)
    }
    if model.bank is not None and model.config.losses.contrast == "probability":
        scorers["surprise"] = lambda images: _surprise(model, images)
    if model.decoder is not None:
        scorers["restoration"] = lambda images: _restoration(model, images)
    if model.lesion_classifier is not None:
        scorers["lesion"] = lambda images: _lesion(model, images)
    found: dict[str, list[NDArray[np.float64]]] = {name: [] for name in scorers}
    with torch.inference_mode():
        for start in range(0, len(test_rows), _BATCH):
            images = films.batch(test_rows[start : start + _BATCH]).to(target)
            for name, score in scorers.items():
                found[name].append(score(images).double().cpu().numpy())
    return {name: np.concatenate(batches) for name, batches in found.items()}


def _load(run: Path) -> AFiRe:
    """The model of a run's newest whole checkpoint, in evaluation mode, as it stood at the end of training."""
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise UserError(f"{run} holds no whole checkpoint.")
    config = load_config(file=run / CONFIG)
    model = AFiRe(config)
    model.load_state_dict(checkpoint.model_tensors())
    model.teacher_temperature = config.losses.teacher_temperature
    return model.eval()


@torch.inference_mode()
def _gaussian(model: AFiRe, films: Films, rows: NDArray[np.int64], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Mean over positions of the squared Mahalanobis distance of teacher tokens to the normal films' Gaussian.

    One Gaussian a position; its covariance is shrunk towards a multiple of the identity, so that it can be inverted
    whatever the number of films. Sums are kept in double precision: a covariance is a difference of large numbers.
    """
    positions, width = model.grid[0] * model.grid[1], model.config.encoder.width
    total = torch.zeros(positions, width, dtype=torch.float64, device=device)
    products = torch.zeros(positions, width, width, dtype=torch.float64, device=device)
    for start in range(0, len(rows), _BATCH):
        tokens = model.encode(films.batch(rows[start : start + _BATCH]).to(device)).double().transpose(0, 1)
        total += tokens.sum(dim=1)
        products.baddbmm_(tokens.transpose(1, 2), tokens)
    mean = total / len(rows)
    covariance = products / len(rows) - mean[:, :, None] * mean[:, None, :]
    level = covariance.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-12)
    identity = torch.eye(width, dtype=torch.float64, device=device)
    factor = torch.linalg.cholesky((1 - _SHRINKAGE) * covariance + _SHRINKAGE * level[:, None, None] * identity)

    def score(images: Tensor) -> Tensor:
        apart = (model.encode(images).double() - mean).permute(1, 2, 0)  # L, D, B
        whitened = torch.linalg.solve_triangular(factor, apart, upper=False)
        distances: Tensor = whitened.square().sum(dim=1).mean(dim=0)
        return distances

    return score


def _surprise(model: AFiRe, images: Tensor) -> Tensor:
    """Mean over positions of the cross-entropy between the teacher's assignment and the prototype."""
    q = model.assign(images, "teacher").exp()
    return -(q * model.prototypes.clamp_min(1e-6).log()).sum(dim=-1).mean(dim=-1)


def _restoration(model: AFiRe, images: Tensor) -> Tensor:
    """The paper's score in log form: logsumexp over positions of the squared error, minus log L."""
    apart = (model.restore(images) - model.patches(images)).double().square().sum(dim=-1)
    return torch.logsumexp(apart, dim=-1) - float(np.log(apart.shape[-1]))


def _lesion(model: AFiRe, images: Tensor) -> Tensor:
    """Mean of the tenth of the positions where a lesion is most probable."""
    probabilities = model.lesion_logits(images).sigmoid()
    count = max(1, round(probabilities.shape[1] / 10))
    return probabilities.topk(count, dim=1).values.mean(dim=1)


def _thinned(rows: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most ``most`` rows, evenly spaced."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).round().astype(np.int64)]

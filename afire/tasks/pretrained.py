"""The whole of a pre-training run for looking at it: both networks, decoder and prototypes, not the encoder alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from afire.config import load_config
from afire.errors import UserError
from afire.files import read_json
from afire.model.afire import AFiRe
from afire.tasks.backbone import RANDOM, run_config_file
from afire.training.checkpoint import STATE, weights_file
from afire.training.schedules import Schedules
from afire.weights import read_tensors
from afire.weights.bundle import is_bundle, open_bundle
from afire.weights.hub import bundle_name, local_path


@dataclass(frozen=True)
class Pretrained:
    """A model in evaluation mode on the CPU, and where it came from."""

    model: AFiRe
    hash: str  # of all its tensors
    name: str  # of the run's folder
    report: str  # one sentence: what was loaded


def load_pretrained(weights: str | Path) -> Pretrained:
    """A run folder (its newest whole checkpoint), a checkpoint folder of a run, or a bundle, here or on a hub."""
    if str(weights) == RANDOM:
        raise UserError("random weights restore nothing and have no prototypes; give the folder of a pre-training run.")
    path = local_path(weights)
    if is_bundle(path):
        bundle = open_bundle(path)
        name = bundle_name(weights)
        model = bundle.model()
        return Pretrained(
            model, model_hash(model), name, f"the whole model from the bundle {name} ({bundle.hash[:12]})"
        )
    file = weights_file(path)
    settings = run_config_file(path)
    if settings is None:
        raise UserError(
            f"{path} is weights alone, without a decoder and prototypes; give the folder of a pre-training run."
        )
    model = AFiRe(load_config(file=settings))
    tensors = read_tensors(file)
    _check_fit(model, tensors, file)
    model.load_state_dict(tensors)
    model.teacher_temperature = _teacher_temperature(model, file.parent / STATE)
    report = f"{len(tensors)} tensors of the whole model from {file.parent.name}/{file.name}"
    return Pretrained(model.eval(), model_hash(model), settings.parent.resolve().name, report)


def model_hash(model: AFiRe) -> str:
    """Content hash of all tensors by name; the same on every device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check_fit(model: AFiRe, found: Mapping[str, Tensor], file: Path) -> None:
    wanted = model.state_dict()
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing:
        raise UserError(f"{file} lacks {missing[0]}; it is not a checkpoint of this run.")
    if extra:
        raise UserError(f"{file} holds {extra[0]}, which the run's settings do not have.")
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise UserError(
                f"{file}: {name} is {tuple(found[name].shape)}, but the run's settings say {tuple(tensor.shape)}."
            )


def _teacher_temperature(model: AFiRe, state_file: Path) -> float:
    """tau_t at the checkpoint's step; where no step is known, that after the warm-up."""
    losses = model.config.losses
    if not state_file.exists():
        return losses.teacher_temperature
    state = read_json(state_file)
    schedules = Schedules(model.config.training, losses, int(state["steps_per_epoch"]), 1)
    return schedules.at(max(int(state["step"]) - 1, 0)).teacher_temperature

"""What a checkpoint holds: weights, and the optimisers' moments by the names of their parameters.

All of it whole: a checkpoint does not tell on how many processes it was made or how they shared the weights, and any
number of them may go on from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from afire.nn import distributed

Optimizers = Sequence[torch.optim.Optimizer]


class Tensors(NamedTuple):
    """By name."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def collect(model: nn.Module, optimizers: Optimizers, keep: bool = True) -> Tensors:
    """Weights and moments, joined from their parts where these are sharded, for a process that is to ``keep`` them.

    A collective call.
    """
    return Tensors(_whole(model.state_dict(), keep), _whole(optimizer_state(model, optimizers), keep))


def _whole(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """One after the other: a device need not hold more than one of them whole."""
    joined = ((name, distributed.whole(tensor)) for name, tensor in tensors.items())
    return {name: tensor.cpu() if distributed.in_parts(tensors[name]) else tensor for name, tensor in joined if keep}


def optimizer_state(model: nn.Module, optimizers: Optimizers) -> dict[str, torch.Tensor]:
    """The optimisers' tensors as ``parameter.name::moment``: names outlive the order of parameters.

    Several optimisers own different parameters, so that a name tells whose it is.
    """
    return {
        f"{name}::{key}": value
        for optimizer in optimizers
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_state(tensors: Mapping[str, torch.Tensor], model: nn.Module, optimizers: Optimizers) -> None:
    """Undo :func:`optimizer_state`."""
    parameters = dict(model.named_parameters())
    owners = {
        id(parameter): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for key, value in tensors.items():
        name, _, moment = key.rpartition("::")
        parameter = parameters[name]
        if id(parameter) not in owners:
            continue  # a parameter that this phase of the run does not train
        optimizer = owners[id(parameter)]
        # AdamW keeps its step counter where it was made (the CPU unless fused on a GPU); moments live with the weight.
        if moment == "step":
            home = value.to(parameter.device) if _fused(optimizer) else value
        else:
            home = distributed.part_like(value, parameter)
        optimizer.state[parameter][moment] = home.clone()


def _fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.param_groups[0].get("fused") or optimizer.param_groups[0].get("capturable"))

"""A network that follows another: the teacher or key encoder of methods that compare with an average of the past."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def twin(network: Network) -> Network:
    """A copy that gets no gradients and is in evaluation mode; :func:`follow_network` moves it."""
    return copy.deepcopy(network).requires_grad_(False).eval()


def follow_network(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """Parameters and buffers of ``teacher`` as the running mean of those of ``student``; counters are copied."""
    mine, theirs = ((*network.parameters(), *network.buffers()) for network in (teacher, student))
    pairs = list(zip(mine, theirs, strict=True))
    averaged = [(old, new) for old, new in pairs if old.is_floating_point()]
    follow([old for old, _ in averaged], [new for _, new in averaged], momentum)
    for old, new in pairs:
        if not old.is_floating_point():
            old.copy_(new)


@torch.no_grad()
def follow(teacher: Iterable[Tensor], student: Iterable[Tensor], momentum: float) -> None:
    """In place and in one fused pass: teacher = momentum * teacher + (1 - momentum) * student."""
    # Of weights in parts each process moves its own: both networks are cut in the same way.
    own, towards = ([own_part(tensor) for tensor in tensors] for tensors in (teacher, student))
    torch._foreach_lerp_(own, towards, 1 - momentum)


@torch.no_grad()
def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor in parts, in the same memory; all of it where it is whole."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part

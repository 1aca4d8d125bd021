"""Sums and gathers over all processes; with one process every function returns its argument.

DDP averages gradients over the W processes. A loss that is a mean over the *global* batch is therefore written on
each process as W / N_global * (sum over the local part): the average of the gradients is then the gradient of the
global mean, whatever share of the N_global terms each process holds. FSDP averages them in the same way.

Under FSDP a weight lies in parts: each process holds some of its rows, as a ``DTensor``. What is done element by
element may be done on the own part of each process; what needs the whole tensor is a collective call.
"""

from __future__ import annotations

import gc
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of processes that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def leave() -> None:
    """End the group of processes; to be called when training is over, also by an error.

    A wrapped network that outlives this call, in a cycle or in the frames of an error, would end the group itself,
    holding the interpreter's lock, while a thread of the group waits for that lock: both for ever.
    """
    errors, seen = [sys.exc_info()[1]], set()
    while errors:
        error = errors.pop()
        if error is not None and id(error) not in seen:  # the loop raises an error that needs no words from itself
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            errors += [error.__cause__, error.__context__]
    gc.collect()
    dist.destroy_process_group()


def total(tensor: Tensor) -> Tensor:
    """Sum of a tensor over all processes. Carries no gradient."""
    return _reduce(tensor, "sum")


def maximum(tensor: Tensor) -> Tensor:
    """Largest value over all processes, element by element. Carries no gradient."""
    return _reduce(tensor, "max")


def _reduce(tensor: Tensor, how: str) -> Tensor:
    if world_size() == 1:
        return tensor.detach()
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
    return result


def with_global_value(loss: Tensor) -> Tensor:
    """The mean of ``loss`` over all processes as the value, the local ``loss`` as the gradient (see above)."""
    if world_size() == 1:
        return loss
    return loss + (total(loss) / world_size() - loss.detach())


def gather(tensor: Tensor) -> Tensor:
    """(B, ...) of each process -> (W*B, ...) of all, in order of rank; gradients flow back to every owner.

    Every process must hold the same number of rows.
    """
    if world_size() == 1:
        return tensor
    if tensor.requires_grad and torch.is_grad_enabled():
        gathered: Tensor = _Gather.apply(tensor)  # type: ignore[no-untyped-call]
        return gathered
    return _gather(tensor)


def _gather(tensor: Tensor) -> Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


class _Gather(torch.autograd.Function):
    """Every process uses every row, so the gradient of a row is the sum of what all processes say about it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.rows = len(tensor)
        return _gather(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Each process wants the sum of its own rows only: a share of what summing all rows everywhere would send."""
        gradient = gradients[0].contiguous()
        own = gradient.new_empty((ctx.rows, *gradient.shape[1:]))
        # torch 2.13 has another name for it, and warns about the one that older versions know.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(own, gradient)
        return own


def in_parts(tensor: Tensor) -> bool:
    """Whether each process holds only a part of a tensor (asked by its methods: the class moves between versions)."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """A tensor from its parts; itself where it is not in parts. Carries no gradient. A collective call."""
    if not in_parts(tensor):
        return tensor
    joined: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return joined


def part_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole ``value``, equal on all processes, as ``like`` lies: on its device, and in parts if that is."""
    value = value.to(like.device)
    if not in_parts(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements)  # type: ignore[attr-defined]

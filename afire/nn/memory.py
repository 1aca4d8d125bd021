"""What methods keep of earlier steps: a teacher that follows its student, a queue of keys, and the centres of clusters.

All of it is the same on every process and after a resume: the queue lies in buffers, and k-means starts from points
that a generator draws.

Shapes: Q places of the queue, N new keys or points, B queries, K centres, D and F widths.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from afire.errors import UserError
from afire.nn import distributed

Network = TypeVar("Network", bound=nn.Module)
NOBODY = -1
"""The owner of a place that was never filled."""
_CHUNK = 1 << 24  # distances held at a time, 64 MB


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
    # Of sharded weights each process moves its own shard: both networks are sharded in the same way.
    own, towards = ([own_part(tensor) for tensor in tensors] for tensors in (teacher, student))
    torch._foreach_lerp_(own, towards, 1 - momentum)


@torch.no_grad()
def own_part(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this process holds, in the same memory; the tensor itself where it is not sharded."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


class KeyQueue(nn.Module):
    """The newest Q keys and whose they are; the oldest make room.

    A place that was not filled yet counts for nothing, so that the first steps need no invented keys.
    """

    keys: Tensor
    owners: Tensor
    pointer: Tensor

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(places, width))
        self.register_buffer("owners", torch.full((places,), NOBODY))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def __len__(self) -> int:
        return len(self.owners)

    def others(self, owners_B: Tensor) -> Tensor:
        """Which places (B, Q) hold the key of another owner than each of ``owners_B``."""
        owners_B = owners_B.to(self.owners.device)
        return (self.owners != owners_B[:, None]) & (self.owners != NOBODY)

    @torch.no_grad()
    def push(self, keys_NF: Tensor, owners_N: Tensor) -> None:
        """Keep new keys, the same on every process; of more than fit, the last."""
        count, places = len(keys_NF), len(self)
        at = (self.pointer + torch.arange(count, device=self.pointer.device)) % places
        at, keys_NF, owners_N = at[-places:], keys_NF[-places:], owners_N[-places:]
        self.keys[at] = keys_NF.to(self.keys)
        self.owners[at] = owners_N.to(self.owners)
        self.pointer.copy_((self.pointer + count) % places)


def of_all(keys_BF: Tensor, owners_B: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and owners of all processes, in order of rank, without gradient: what every process pushes."""
    return distributed.gather(keys_BF.detach()), distributed.gather(owners_B)


@torch.no_grad()
def kmeans(points_ND: Tensor, clusters: int, generator: torch.Generator, iterations: int = 20) -> tuple[Tensor, Tensor]:
    """Centres (K, D), and the number of the nearest centre of each point (N,).

    It starts from points that ``generator`` (of the CPU) draws, and ends when no point changes its centre. A centre
    that loses all its points begins again at the point that lies furthest from its own. Sums are products with a
    matrix of zeros and ones: adding point by point would give other digits in each run on a GPU.
    """
    if not 1 <= clusters <= len(points_ND):
        raise UserError(f"{len(points_ND)} points cannot make {clusters} clusters; ask for fewer.")
    drawn = torch.randperm(len(points_ND), generator=generator)[:clusters]
    centres = points_ND[drawn.to(points_ND.device)].clone()
    nearest, distance = nearest_centres(points_ND, centres)
    for _ in range(iterations):
        centres, counts = _means(points_ND, nearest, clusters)
        empty = (counts == 0).nonzero()[:, 0]
        if len(empty):
            centres[empty] = points_ND[distance.argsort(descending=True, stable=True)[: len(empty)]]
        before = nearest
        nearest, distance = nearest_centres(points_ND, centres)
        if torch.equal(before, nearest):
            break
    return centres, nearest


@torch.no_grad()
def nearest_centres(points_ND: Tensor, centres_KD: Tensor) -> tuple[Tensor, Tensor]:
    """The number of the nearest centre of each point (N,), and the distance to it (N,)."""
    chunk = max(_CHUNK // len(centres_KD), 1)
    starts = range(0, len(points_ND), chunk)
    chunks = [torch.cdist(points_ND[start : start + chunk], centres_KD).min(dim=1) for start in starts]
    return torch.cat([nearest.indices for nearest in chunks]), torch.cat([nearest.values for nearest in chunks])


def _means(points_ND: Tensor, nearest_N: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """The mean (K, D) of the points of each cluster, 0 where it has none, and how many it has (K,)."""
    sums = points_ND.new_zeros(clusters, points_ND.shape[1])
    counts = points_ND.new_zeros(clusters)
    numbers = torch.arange(clusters, device=points_ND.device)
    chunk = max(_CHUNK // clusters, 1)
    for start in range(0, len(points_ND), chunk):
        points, nearest = points_ND[start : start + chunk], nearest_N[start : start + chunk]
        member = (nearest[:, None] == numbers).to(points)
        sums += member.T @ points
        counts += member.sum(dim=0)
    return sums / counts.clamp_min(1)[:, None], counts

"""k-means: centres of points, the same on every process and after a resume.

Shapes: N points, K centres, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afire.errors import UserError

_CHUNK = 1 << 24  # distances held at a time, 64 MB


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
    found = [torch.cdist(points_ND[start : start + chunk], centres_KD).min(dim=1) for start in starts]
    return torch.cat([one.indices for one in found]), torch.cat([one.values for one in found])


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

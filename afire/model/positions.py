"""Where a token lies in the film: fixed 2-D sin-cos positions, and learned ones carried over to another grid.

Both depend on the place in the *film*, not on the number of the patch: a finer grid asks for the positions between
the old ones, so that a token of the left apex keeps the position of the left apex.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]  # rows, columns of patches


def sincos_positions(width: int, grid: Grid, reference: Grid | None = None) -> Tensor:
    """Sin-cos positions (rows * columns, width), row by row: the first half of the width tells the column.

    ``reference`` is the grid the network was made for. Patch numbers are scaled to it, so at the reference grid the
    coordinates are 0, 1, 2, ... (the convention of MAE, whose weights therefore fit) and a grid twice as fine has
    -0.25, 0.25, 0.75, ...
    """
    rows, columns = (_coordinates(size, other) for size, other in zip(grid, reference or grid, strict=True))
    row_codes = _sincos(rows, width // 2)[:, None].expand(-1, grid[1], -1)
    column_codes = _sincos(columns, width // 2)[None].expand(grid[0], -1, -1)
    return torch.cat([column_codes, row_codes], dim=-1).reshape(-1, width).float()


def _coordinates(size: int, reference: int) -> Tensor:
    """Centres of ``size`` equal patches, in units of a patch of the reference grid, the first of which is at 0."""
    return (torch.arange(size, dtype=torch.float64) + 0.5) * (reference / size) - 0.5


def _sincos(coordinates: Tensor, width: int) -> Tensor:
    """(N,) -> (N, width): sines, then cosines, of frequencies from 1 down to nearly 1/10000."""
    frequencies = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = coordinates[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def resize_positions(positions: Tensor, grid: Grid, target: Grid) -> Tensor:
    """Learned positions (1, 1 + rows * columns, D), class token first, carried from ``grid`` to ``target``."""
    if grid == target:
        return positions
    class_position, patches = positions[:, :1], positions[:, 1:]
    image = patches.float().reshape(1, *grid, -1).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=target, mode="bicubic", antialias=True)
    resized = image.permute(0, 2, 3, 1).reshape(1, target[0] * target[1], -1)
    return torch.cat([class_position, resized.to(positions.dtype)], dim=1)

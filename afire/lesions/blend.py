"""Blending a patch into a film without a seam: exactly (Poisson), by the stronger step (mixed), or cheaply (Coons).

The steps from pixel to pixel make a patch what it is, not its grey level. Poisson blending (Perez et al., SIGGRAPH
2003) keeps the patch's steps inside of a box and the film's grey level on its border: it adds the harmonic surface
that spans the difference of the two on the border. ``mixed`` keeps, at every step, whichever of the two is larger, so
that ribs of the film go on behind the patch. A Coons patch spans the same border by interpolating between opposite
sides: no equation to solve, but each pixel of the border leaves a stripe across the box.

On a rectangle the Poisson equation is diagonal in sines. Boxes of a batch differ in size; each has its own sines,
filled up with zeros, so that the boxes of a batch are solved together by four products of matrices.

Shapes: N boxes of h x w pixels, each its own, in the upper left corners of windows of P x P.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Blend = Literal["mixed", "poisson", "coons", "either", "none"]
SMALLEST = 3  # side of a box that has an inside


def blended(
    film_NPP: Tensor, patch_NPP: Tensor, height_N: Tensor, width_N: Tensor, how: Blend, coin_N: Tensor | None = None
) -> Tensor:
    """The film with the patch inside of each box; the border of a box, and all beyond it, stay the film.

    ``either``: mixed where the box's ``coin`` is true, Poisson elsewhere. ``none``: the patch as it is, with a seam.
    """
    if how in ("coons", "none"):
        inside = _within(height_N, film_NPP.shape[1])[:, :, None] & _within(width_N, film_NPP.shape[2])[:, None, :]
        surface = coons(film_NPP - patch_NPP, height_N, width_N) if how == "coons" else 0.0
        return torch.where(inside, patch_NPP + surface, film_NPP)
    mixed_N = coin_N if how == "either" else torch.full_like(height_N, how == "mixed", dtype=torch.bool)
    assert mixed_N is not None, "either needs a coin for each box"
    return film_NPP + _solve(_sources(film_NPP, patch_NPP, mixed_N), height_N, width_N)


def coons(difference_NPP: Tensor, height_N: Tensor, width_N: Tensor) -> Tensor:
    """A surface that is the difference on the border of each box: both pairs of sides, less the corners.

    Four rows and columns are all that it reads.
    """
    last_row, last_column = (height_N - 1)[:, None, None], (width_N - 1)[:, None, None]
    side = difference_NPP.shape[1]
    v, u = (_steps(last, side) for last in (last_row[:, 0, 0], last_column[:, 0, 0]))
    v, u = v[:, :, None], u[:, None, :]
    top, left = difference_NPP[:, :1], difference_NPP[:, :, :1]
    bottom = difference_NPP.gather(1, last_row.expand(-1, 1, side))
    right = difference_NPP.gather(2, last_column.expand(-1, side, 1))
    between_rows = top + v * (bottom - top)
    between_columns = left + u * (right - left)
    corners_top = top[:, :, :1] + u * (top.gather(2, last_column) - top[:, :, :1])
    corners_bottom = bottom[:, :, :1] + u * (bottom.gather(2, last_column) - bottom[:, :, :1])
    return between_rows + between_columns - (corners_top + v * (corners_bottom - corners_top))


def _steps(last_N: Tensor, side: int) -> Tensor:
    """How far each pixel of a window is between the first and the ``last`` one (N, P): from 0 to 1 in the box."""
    return torch.arange(side, device=last_N.device) / last_N[:, None].clamp(min=1)


def _within(length_N: Tensor, side: int) -> Tensor:
    """Which pixels of a window's side lie inside of the box, its border not counted (N, P)."""
    at = torch.arange(side, device=length_N.device)
    return (at > 0) & (at < length_N[:, None] - 1)


def _sources(film_NPP: Tensor, patch_NPP: Tensor, mixed_N: Tensor) -> Tensor:
    """-Laplacian of what is to be added to the film, (N, P, P); 0 on the edge of a window."""
    flux = []
    for dim in (1, 2):
        patch_steps, film_steps = patch_NPP.diff(dim=dim), film_NPP.diff(dim=dim)
        weaker = mixed_N[:, None, None] & (patch_steps.abs() <= film_steps.abs())
        flux.append((patch_steps - film_steps).masked_fill(weaker, 0))
    sources = torch.zeros_like(film_NPP)
    sources[:, 1:-1, 1:-1] = -(flux[0].diff(dim=1)[:, :, 1:-1] + flux[1].diff(dim=2)[:, 1:-1, :])
    return sources


def _solve(sources_NPP: Tensor, height_N: Tensor, width_N: Tensor) -> Tensor:
    """The surface with these sources inside each box, 0 on its border and beyond."""
    rows, row_values = _sines(height_N, sources_NPP.shape[1])
    columns, column_values = _sines(width_N, sources_NPP.shape[2])
    waves = rows @ sources_NPP @ columns
    waves = waves / (row_values[:, :, None] + column_values[:, None, :]).clamp(min=torch.finfo(torch.float32).tiny)
    scale = 4 / ((height_N - 1) * (width_N - 1)).clamp(min=1)
    return rows @ waves @ columns * scale[:, None, None]


def _sines(length_N: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Sines sin(pi i k / (n - 1)) of a box of n pixels, 0 beyond its inside (N, P, P), and their curvature (N, P)."""
    at = torch.arange(side, device=length_N.device)
    period = (length_N - 1).clamp(min=1)[:, None, None]
    # Whole turns are taken out as integers: a float32 knows the sine of a large angle badly.
    turns = (at[:, None] * at) % (2 * period)
    inside = _within(length_N, side)
    sines = torch.sin(turns * (math.pi / period)) * (inside[:, :, None] & inside[:, None, :])
    return sines, 2 - 2 * torch.cos(at * (math.pi / period[:, 0]))

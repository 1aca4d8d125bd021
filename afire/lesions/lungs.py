"""The lung field: the dark region that Otsu finds inside the body. A rough field for placing lesions, not anatomy.

Shapes: B films of H x W, looked at as grids of G x G cells.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from afire.lesions.otsu import otsu_threshold

_GRID = 56
_CENTRE = (0.15, 0.80, 0.15, 0.85)  # top, bottom, left, right of the part whose Otsu threshold separates the lungs
_INSIDE = (0.04, 0.95, 0.04, 0.96)  # dark cells beyond this frame are outside the body
_GAP = 2  # darkness narrower than 2 * _GAP + 1 cells does not let the outside in
_SMALLEST_SHARE = 0.02  # of the film; a smaller field is none


def lung_field(gray_BHW: Tensor) -> Tensor:
    """True inside the lungs, bool (B, H, W); see :func:`lung_depth`."""
    return lung_depth(gray_BHW) > 0


def lung_depth(gray_BHW: Tensor) -> Tensor:
    """0 outside the lung field, rising to 1 within a few pixels of its edge; float32 (B, H, W).

    The dark cells are shared between two fronts that start at the same time: one from where lungs lie in nearly every
    frontal film, one from the film's margin. Where lung and background touch (a shoulder, a collimated edge) they meet
    halfway, while a plain flood from the border would drain the lung. A film in which nothing is found keeps its
    central dark cells, and failing these all of itself, so that there is always somewhere to put a lesion.
    """
    cells = gray_BHW.to(torch.float32)
    if cells.shape[1:] != (_GRID, _GRID):
        cells = functional.adaptive_avg_pool2d(cells[:, None], _GRID)[:, 0]
    top, bottom, left, right = (round(edge * _GRID) for edge in _CENTRE)
    threshold = otsu_threshold(cells[:, top:bottom, left:right])
    dark = cells < threshold[:, None, None]
    seeds, centre, inside = _templates(gray_BHW.device)

    lungs = _opened(_race(dark, lungs=dark & seeds, outside=dark & ~inside))
    lungs = torch.where(_share(lungs) < _SMALLEST_SHARE, dark & centre, lungs)

    # Averaged over the neighbours, cells get a round outline; the half of the average runs along the old edge.
    average = functional.avg_pool2d(lungs[:, None].to(torch.float32), 3, 1, 1, count_include_pad=False)
    size = (gray_BHW.shape[-2], gray_BHW.shape[-1])
    depth = functional.interpolate(average, size=size, mode="bilinear", align_corners=False)[:, 0]
    depth = depth.mul_(2).sub_(1).clamp_(0, 1)
    return depth.masked_fill_(_share(depth > 0) < _SMALLEST_SHARE, 1)


def _templates(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Three grids (G, G): the middle of each lung, the oval of the chest, and everything but the margin."""
    at = (torch.arange(_GRID, device=device) + 0.5) / _GRID
    x, y = at[None, :], at[:, None]
    sideways = (x - 0.5).abs()
    seeds = ((sideways - 0.21) / 0.08).square() + ((y - 0.43) / 0.17).square() < 1
    centre = (sideways / 0.42).square() + ((y - 0.47) / 0.40).square() < 1
    top, bottom, left, right = _INSIDE
    return seeds, centre, (x > left) & (x < right) & (y > top) & (y < bottom)


def _race(dark: Tensor, lungs: Tensor, outside: Tensor) -> Tensor:
    """Let both fronts advance through dark cells, a cell at a time, until neither can; returns the lungs' share.

    The outside only advances through the core of the darkness, and what lies within a gap's width of it goes with it.
    """
    core = _shrunk(dark, _GAP)
    fronts = torch.stack([outside, lungs])  # in one tensor: on a CPU the number of operations counts, not their size
    for _ in range(_GRID // 2):  # from the margin to the middle
        advanced = _grown(fronts)
        advanced[0].logical_and_(core).logical_and_(~fronts[1]).logical_or_(fronts[0])
        advanced[1].logical_and_(dark).logical_and_(~advanced[0]).logical_or_(fronts[1])
        settled = torch.equal(advanced, fronts)
        fronts = advanced
        if settled:
            break
    outside, lungs = fronts
    return lungs & ~_grown(outside & core, _GAP)


def _share(field: Tensor) -> Tensor:
    """Share of each film that is true, (B, 1, 1)."""
    return field.to(torch.float32).mean((1, 2), keepdim=True)


def _grown(field: Tensor, cells: int = 1) -> Tensor:
    """Dilation by ``cells`` in all eight directions; shifted ors are twenty times faster than max pooling."""
    for _ in range(cells):
        wide = field.clone()
        wide[..., 1:] |= field[..., :-1]
        wide[..., :-1] |= field[..., 1:]
        field = wide.clone()
        field[..., 1:, :] |= wide[..., :-1, :]
        field[..., :-1, :] |= wide[..., 1:, :]
    return field


def _shrunk(field: Tensor, cells: int) -> Tensor:
    return ~_grown(~field, cells)


def _opened(field: Tensor) -> Tensor:
    """Without specks and threads narrower than three cells."""
    return _grown(_shrunk(field, 1))

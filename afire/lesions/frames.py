"""Where in the chest a place of a film lies: coordinates by the lungs of that very film, and numbered cells of them.

The lung field of a film gives a frame: the outer edge of either lung, the middle between them, the top and the bottom.
The frame is laid over that of a typical film, so that a point keeps its place in the chest when the film is shifted,
zoomed or stretched: across, it is as far from the middle as before, in widths of the lung on its side; down, as far
between top and bottom. Beyond the film's edge places are those at the edge. Where no two lungs are found the frame is
that of the film itself, and every point is where it is.

Where maps of the anatomy are known, as on drawn films, or predicted, a token inside a lung lies in the box of that
lung, one of heart and mediastinum in theirs, and every other one in the frame of both lungs. Each box is laid over that
of a typical film, so that there are as many places as before, and they are called alike.

Edges are quantiles of the field's mass, not its first and last pixel, which a speck would move.

Shapes: B films of H x W pixels, A parts of the anatomy on G x G cells, L = rows x columns tokens and as many places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from afire.data.phantom import ANATOMY
from afire.lesions.places import lung_depth

_SIDE = 56  # what the lung field is found on anyway
_EDGE = 0.03  # of the field's mass lies beyond an edge
_INNER = 0.05  # of a lung's mass lies beyond its inner edge
_LARGEST, _SMALLEST = 0.7, 0.04  # share of the film; a field beyond these is none
_SMALLER_LUNG = 0.15  # of the field's mass, at least
_BETWEEN = 0.5  # of what a column has on average: most that the middle may have, or it is one lung
_NARROWEST, _LOWEST = 0.25, 0.2  # width and height of a frame, as shares of the film


class ChestFrame(NamedTuple):
    """Edges (B,) of each film's lungs as fractions of its width and height; the patient's right is the film's left."""

    right: Tensor
    middle: Tensor
    left: Tensor
    top: Tensor
    bottom: Tensor


TYPICAL = ChestFrame(*(torch.tensor(edge) for edge in (0.19, 0.5, 0.81, 0.17, 0.66)))
"""What frames are laid over: the mean of what is found on drawn films, on either side of the middle alike."""

_RIGHT, _LEFT = (
    [number for number, name in enumerate(ANATOMY) if name.startswith(f"{side} lung")] for side in ("right", "left")
)
_REGIONS = (_RIGHT, _LEFT, [ANATOMY.index("heart"), ANATOMY.index("mediastinum")])
TYPICAL_BOXES = ((0.14, 0.414, 0.14, 0.7), (0.586, 0.86, 0.14, 0.7), (0.39, 0.7, 0.03, 0.67))
"""What the boxes of right lung, left lung, and heart with mediastinum are laid over: right and left edge, top and
bottom; means of drawn films."""
TYPICAL_LUNGS = ChestFrame(*(torch.tensor(edge) for edge in (0.15, 0.5, 0.85, 0.14, 0.7)))
"""What the frames of both lungs are laid over there: whole lungs, of which :data:`TYPICAL` lacks the faint edges."""
_LIKELY = 0.3  # cells with less count nothing: predicted maps are nowhere 0, and would pull edges outwards
_BESIDE = 0.1  # of the width: most that the lungs may overlap, or nothing is known about them yet
_INSIDE = 0.5  # share of a token's area, at least, that its region covers


@torch.no_grad()
def chest_places(
    images_BCHW: Tensor, tokens: tuple[int, int], places: tuple[int, int], anatomy_BAGG: Tensor | None = None
) -> Tensor:
    """The place (B, L) of every token of a grid, row by row, among ``places`` (rows, columns), numbered row by row.

    Images in [0, 1]; the lungs are those of the maps ``anatomy_BAGG``, see :func:`anatomy_places`. Without maps, and in
    films on whose maps there are no two lungs, they are found by :func:`afire.lesions.places.lung_depth`.
    """
    grey = F.adaptive_avg_pool2d(images_BCHW.float().mean(dim=1, keepdim=True), _SIDE)[:, 0]
    found = places_in(chest_frame(lung_depth(grey)), tokens, places)
    if anatomy_BAGG is None:
        return found
    mapped, has_lungs = anatomy_places(anatomy_BAGG, tokens, places)
    return torch.where(has_lungs[:, None], mapped, found)


@torch.no_grad()
def anatomy_places(anatomy_BAGG: Tensor, tokens: tuple[int, int], places: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The place (B, L) of every token by maps of the anatomy, and whether there are two lungs in them (B,).

    Maps hold the share of a cell, or how likely it is, in the order of :data:`afire.data.phantom.ANATOMY`. Where there
    are no two lungs a token's place is its position.
    """
    regions_B3GG = torch.stack([anatomy_BAGG[:, part].sum(dim=1).clamp(max=1) for part in _REGIONS], dim=1).float()
    regions_B3GG = regions_B3GG * (regions_B3GG >= _LIKELY)
    frame, plausible = _frame(regions_B3GG[:, :2].sum(dim=1), TYPICAL_LUNGS)
    right, left = regions_B3GG[:, :2].sum(dim=2).unbind(1)
    sure = (regions_B3GG[:, :2] >= _INSIDE).float().mean(dim=(2, 3)).amin(dim=1) > _SMALLEST / 2
    has_lungs = plausible & sure & (_quantile(right, 1 - _EDGE) < _quantile(left, _EDGE) + _BESIDE)
    edges = zip(frame, TYPICAL_LUNGS, strict=True)
    frame = ChestFrame(*(torch.where(has_lungs, edge, usual.to(edge)) for edge, usual in edges))
    share_B3RC = F.adaptive_avg_pool2d(regions_B3GG, tokens)
    largest, region_BRC = share_B3RC.max(dim=1)
    outside = (largest < _INSIDE) | ~has_lungs[:, None, None]
    place = places_in(frame, tokens, places, TYPICAL_LUNGS)
    for number, inside in enumerate(_boxed(regions_B3GG, tokens, places)):
        place = torch.where(((region_BRC == number) & ~outside).flatten(1), inside, place)
    return place, has_lungs


def _boxed(regions_B3GG: Tensor, tokens: tuple[int, int], places: tuple[int, int]) -> list[Tensor]:
    """For each region the place (B, L) that every token would have in its box."""
    device, placed = regions_B3GG.device, []
    for field, usual in zip(regions_B3GG.unbind(1), TYPICAL_BOXES, strict=True):
        cells = []
        for mass, edges, count, cells_of_side in (
            (field.sum(dim=2), usual[2:], tokens[0], places[0]),
            (field.sum(dim=1), usual[:2], tokens[1], places[1]),
        ):
            at = ((torch.arange(count, device=device) + 0.5) / count)[None]
            low, high = (_quantile(mass, share)[:, None] for share in (_EDGE, 1 - _EDGE))
            within = ((at - low) / (high - low).clamp_min(1e-6)).clamp(0, 1)
            cells.append(_cell(edges[0] + within * (edges[1] - edges[0]), cells_of_side))
        placed.append((cells[0][:, :, None] * places[1] + cells[1][:, None]).flatten(1))
    return placed


@torch.no_grad()
def chest_frame(lungs_BHW: Tensor) -> ChestFrame:
    """The frame of each lung field, true or up to 1 inside the lungs; the typical frame where there are no two lungs.

    Of the film's frame itself the typical one is a part: a film with it keeps every point where it is.
    """
    return _frame(lungs_BHW, TYPICAL)[0]


def _frame(lungs_BHW: Tensor, typical: ChestFrame) -> tuple[ChestFrame, Tensor]:
    """The frame, the typical one where there are no two lungs, and whether there are (B,)."""
    field = lungs_BHW.float()
    down_BH, across_BW = field.sum(dim=2), field.sum(dim=1)
    top, bottom = _quantile(down_BH, _EDGE), _quantile(down_BH, 1 - _EDGE)
    right, left = _quantile(across_BW, _EDGE), _quantile(across_BW, 1 - _EDGE)
    width = across_BW.shape[1]
    at = (torch.arange(width, device=field.device) + 0.5) / width
    on_right = at < ((right + left) / 2)[:, None]
    halves = across_BW * on_right, across_BW * ~on_right
    middle = (_quantile(halves[0], 1 - _INNER) + _quantile(halves[1], _INNER)) / 2
    mass = field.mean(dim=(1, 2))
    smaller = torch.minimum(halves[0].sum(dim=1), halves[1].sum(dim=1)) / across_BW.sum(dim=1).clamp_min(1e-6)
    has_lungs = (mass > _SMALLEST) & (mass < _LARGEST) & (smaller > _SMALLER_LUNG)
    near = (at - middle[:, None]).abs() < 0.03
    between = (across_BW * near).sum(dim=1) / near.sum(dim=1).clamp_min(1)
    usual = across_BW.sum(dim=1) / ((left - right) * width).clamp_min(1)
    has_lungs &= between < _BETWEEN * usual
    has_lungs &= (left - right > _NARROWEST) & (bottom - top > _LOWEST)
    edges = zip((right, middle, left, top, bottom), typical, strict=True)
    return ChestFrame(*(torch.where(has_lungs, edge, usual.to(edge)) for edge, usual in edges)), has_lungs


def places_in(
    frame: ChestFrame, tokens: tuple[int, int], places: tuple[int, int], typical: ChestFrame = TYPICAL
) -> Tensor:
    """The place (B, L) of every token of a grid in films with a known frame, which is laid over the ``typical`` one;
    see :func:`chest_places`."""
    rows, columns = tokens
    device = frame.middle.device
    x = ((torch.arange(columns, device=device) + 0.5) / columns)[None]
    y = ((torch.arange(rows, device=device) + 0.5) / rows)[None]
    right, middle, left, top, bottom = (edge[:, None] for edge in frame)
    usual = ChestFrame(*(edge.to(device) for edge in typical))
    on_right, on_left = (x - middle) / (middle - right), (x - middle) / (left - middle)
    across = torch.where(
        x < middle,
        usual.middle + on_right * (usual.middle - usual.right),
        usual.middle + on_left * (usual.left - usual.middle),
    )
    down = usual.top + (y - top) / (bottom - top) * (usual.bottom - usual.top)
    row_BR, column_BC = _cell(down, places[0]), _cell(across, places[1])
    return (row_BR[:, :, None] * places[1] + column_BC[:, None]).flatten(1)


def _cell(at: Tensor, cells: int) -> Tensor:
    # A hair inwards: with the typical frame a token's middle must not fall to its neighbour by rounding.
    return (at * cells + 1e-4).floor().long().clamp(0, cells - 1)


def _quantile(mass_BN: Tensor, share: float) -> Tensor:
    """Where (B,), as a fraction of the side, a share of the mass lies before; between cells by straight lines."""
    so_far = mass_BN.cumsum(dim=1)
    target = share * so_far[:, -1:]
    cell = torch.searchsorted(so_far, target).clamp(max=mass_BN.shape[1] - 1)
    mass_of_cell = mass_BN.gather(1, cell)
    fraction = ((target - (so_far.gather(1, cell) - mass_of_cell)) / mass_of_cell.clamp_min(1e-6)).clamp(0, 1)
    return ((cell + fraction) / mass_BN.shape[1]).squeeze(1)

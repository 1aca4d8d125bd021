"""Patches of a film, or of another one, pasted into a film: defects for detectors to learn from.

Two kinds. Cut and paste (CutPaste, Li et al. CVPR 2021): a rectangle or a thin turned scar of the film, put elsewhere
with hard edges. Natural pastes (NSA, Schlueter et al. ECCV 2022): rectangles of a donor film, scaled and mirrored,
blended into the lungs without a seam, with a label that says how much each pixel has changed.

All that is random follows from draws, which come from a key (seed, epoch, row); donors are numbered, so that a paste
does not depend on which films share a batch.

Shapes: B films of S x S pixels, D donors, N patches, in windows of P x P pixels that hold the largest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from afire.config import Section
from afire.lesions.blend import SMALLEST, Blend, blended
from afire.lesions.places import PixelPicker, below, keyed, lung_field, unit

_CUT, _NATURAL = 0xC07, 0x45A
"""Keep the draws of the two kinds apart from each other's and from those of lesions."""
_CUT_REFERENCE = 256  # px of the films that the sizes of scars were published for
_HALF_SIDE = (0.03, 0.4)  # of the film: half the side of a natural paste, as published
_HALF_SIDE_GAMMA = (0.05, 0.03)  # offset and scale of the gamma distribution (of shape 2) it is drawn from
_SCALE = (0.7, 1.3)  # of a natural paste, from a normal distribution around 1 with this deviation:
_SCALE_SD = 0.5
_GREY_LEVELS = 255


@dataclass(frozen=True)
class Boxes:
    """N upright boxes, each in a film of a batch, and the side of a window that holds any of them."""

    side: int
    film: Tensor
    left: Tensor
    top: Tensor
    width: Tensor
    height: Tensor

    def cut(self, images_BSS: Tensor) -> Tensor:
        """Windows (N, P, P) whose upper left corners hold the boxes; beyond the film its last pixel is repeated."""
        at = torch.arange(self.side, device=images_BSS.device)
        rows = (self.top[:, None] + at).clamp(max=images_BSS.shape[1] - 1)
        columns = (self.left[:, None] + at).clamp(max=images_BSS.shape[2] - 1)
        return images_BSS[self.film[:, None, None], rows[:, :, None], columns[:, None, :]]

    def put(self, images_BSS: Tensor, windows_NPP: Tensor, chosen_NPP: Tensor) -> None:
        """Write the chosen pixels of windows into their films, in place. No film may have two of the boxes."""
        patch, row, column = chosen_NPP.nonzero(as_tuple=True)
        images_BSS[self.film[patch], self.top[patch] + row, self.left[patch] + column] = windows_NPP[chosen_NPP]

    def inside(self) -> Tensor:
        """Pixels (N, P, P) of the windows that belong to their box."""
        at = torch.arange(self.side, device=self.width.device)
        return (at < self.height[:, None])[:, :, None] & (at < self.width[:, None])[:, None, :]

    def from_centre(self) -> tuple[Tensor, Tensor]:
        """How far each pixel of a window is right of (N, 1, P) and below (N, P, 1) the middle of its box."""
        at = torch.arange(self.side, device=self.width.device)
        across, down = at - (self.width[:, None] - 1) / 2, at - (self.height[:, None] - 1) / 2
        return across[:, None, :], down[:, :, None]


def sampled(films_NSS: Tensor, x_NPP: Tensor, y_NPP: Tensor) -> Tensor:
    """Films at positions in pixels, between them bilinear, beyond them as at their edge: (N, P, P)."""
    size = films_NSS.shape[-1]
    grid = torch.stack([x_NPP, y_NPP], dim=-1) * (2 / size) + (1 / size - 1)
    return F.grid_sample(films_NSS[:, None], grid, mode="bilinear", padding_mode="border", align_corners=False)[:, 0]


# Cut and paste


class CutPasteLimits(Section):
    """Patches of the film that are pasted elsewhere in it."""

    area_min: float = Field(0.02, gt=0, lt=1, description="smallest patch, as a share of the film")
    area_max: float = Field(0.15, gt=0, lt=1, description="largest patch, as a share of the film")
    aspect: float = Field(3.3, ge=1, description="most that a patch's width and height may differ, as a factor")
    scar_width_min: float = Field(2, gt=0, description="thinnest scar, in pixels of a 256-px film")
    scar_width_max: float = Field(16, gt=0, description="thickest scar, in pixels of a 256-px film")
    scar_length_min: float = Field(10, gt=0, description="shortest scar, in pixels of a 256-px film")
    scar_length_max: float = Field(25, gt=0, description="longest scar, in pixels of a 256-px film")
    scar_turn: float = Field(45.0, ge=0, le=90, description="largest turn of a scar either way, in degrees")
    jitter: float = Field(0.1, ge=0, lt=1, description="most that a patch's brightness and contrast change, as a share")

    @model_validator(mode="after")
    def _ordered(self) -> CutPasteLimits:
        for name in ("area", "scar_width", "scar_length"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low > high:
                raise ValueError(f"{name}_min {low} is larger than {name}_max {high}")
        return self


class _CutDraw(IntEnum):
    """What each random number decides. Append only: the order is part of what a seed means."""

    AREA = 0
    ASPECT = 1
    FROM_X = 2
    FROM_Y = 3
    TO_X = 4
    TO_Y = 5
    BRIGHTNESS = 6
    CONTRAST = 7
    TURN = 8


@torch.no_grad()
def cut_and_pasted(
    images_B1SS: Tensor,
    *,
    seed: int,
    epoch: int,
    rows: Tensor,
    kind: Literal["patch", "scar"],
    limits: CutPasteLimits | None = None,
) -> tuple[Tensor, Tensor]:
    """Films with one patch, or one scar, of their own pasted elsewhere, and where it lies: bool (B, 1, S, S)."""
    limits, device = limits or CutPasteLimits(), images_B1SS.device
    draws_BD = keyed(seed ^ _CUT, epoch, rows, 2, 1)[:, int(kind == "scar"), 0]
    boxes, cut = _planned(draws_BD, images_B1SS.shape[-1], kind, limits, device)
    films = images_B1SS[:, 0].clone(memory_format=torch.contiguous_format)
    across, down = boxes.from_centre()
    u, v = across * cut.cosine + down * cut.sine, down * cut.cosine - across * cut.sine
    chosen = boxes.inside() & (u.abs() <= cut.width / 2) & (v.abs() <= cut.height / 2)
    patch = _jittered(sampled(films, cut.x + u, cut.y + v), chosen, cut.brightness, cut.contrast)
    where = torch.zeros_like(films, dtype=torch.bool)
    boxes.put(films, patch, chosen)
    boxes.put(where, chosen, chosen)
    return films[:, None], where[:, None]


@dataclass(frozen=True)
class _Cut:
    """What is cut out for each box, as columns (N, 1, 1): a turned rectangle around (x, y), and how it is jittered."""

    width: Tensor
    height: Tensor
    cosine: Tensor
    sine: Tensor
    x: Tensor
    y: Tensor
    brightness: Tensor
    contrast: Tensor


def _planned(
    draws_BD: Tensor, size: int, kind: Literal["patch", "scar"], limits: CutPasteLimits, device: torch.device
) -> tuple[Boxes, _Cut]:
    """Where each film's patch goes and what it is; both places are drawn evenly among those where it fits."""

    def either_way(draw: _CutDraw, limit: float) -> Tensor:
        return (2 * unit(draws_BD[:, draw]) - 1) * limit

    width, height = (_scar_sides if kind == "scar" else _patch_sides)(draws_BD, size, limits)
    turn = either_way(_CutDraw.TURN, math.radians(limits.scar_turn) if kind == "scar" else 0.0)
    cosine, sine = turn.cos(), turn.sin()
    box_width = _whole(width * cosine + height * sine.abs(), size)
    box_height = _whole(height * cosine + width * sine.abs(), size)
    left = below(draws_BD[:, _CutDraw.TO_X], size - box_width + 1)
    top = below(draws_BD[:, _CutDraw.TO_Y], size - box_height + 1)
    x = below(draws_BD[:, _CutDraw.FROM_X], size - width + 1) + (width - 1) / 2
    y = below(draws_BD[:, _CutDraw.FROM_Y], size - height + 1) + (height - 1) / 2
    factors = [1 + either_way(draw, limits.jitter) for draw in (_CutDraw.BRIGHTNESS, _CutDraw.CONTRAST)]
    places = (torch.arange(len(draws_BD)), left, top, box_width, box_height)
    columns = (width, height, cosine, sine, x, y, *factors)
    side = int(torch.maximum(box_width, box_height).max())
    boxes = Boxes(side, *(place.to(device) for place in places))
    return boxes, _Cut(*(column.to(device)[:, None, None] for column in columns))


def _patch_sides(draws_BD: Tensor, size: int, limits: CutPasteLimits) -> tuple[Tensor, Tensor]:
    """Width and height (B,): an area drawn evenly, an aspect drawn evenly in log space."""
    area = limits.area_min + unit(draws_BD[:, _CutDraw.AREA]) * (limits.area_max - limits.area_min)
    aspect = ((2 * unit(draws_BD[:, _CutDraw.ASPECT]) - 1) * math.log(limits.aspect)).exp()
    return _whole((area * aspect).sqrt() * size, size), _whole((area / aspect).sqrt() * size, size)


def _scar_sides(draws_BD: Tensor, size: int, limits: CutPasteLimits) -> tuple[Tensor, Tensor]:
    """Width and length (B,), each drawn evenly."""

    def side(draw: _CutDraw, low: float, high: float) -> Tensor:
        return _whole((low + unit(draws_BD[:, draw]) * (high - low)) * size / _CUT_REFERENCE, size)

    width = side(_CutDraw.AREA, limits.scar_width_min, limits.scar_width_max)
    return width, side(_CutDraw.ASPECT, limits.scar_length_min, limits.scar_length_max)


def _whole(length: Tensor, most: int, least: int = 1) -> Tensor:
    return length.round().to(torch.int64).clamp(least, max(least, most))


def _jittered(patch_NPP: Tensor, chosen_NPP: Tensor, brightness: Tensor, contrast: Tensor) -> Tensor:
    """Brightness times a factor, then contrast around the patch's own mean."""
    bright = patch_NPP * brightness
    mean = (bright * chosen_NPP).sum(dim=(1, 2), keepdim=True) / chosen_NPP.sum(dim=(1, 2), keepdim=True).clamp(min=1)
    return (mean + (bright - mean) * contrast).clamp(0, 1)


# Natural pastes


class _NaturalDraw(IntEnum):
    """What each random number decides. Append only: the order is part of what a seed means."""

    PRESENT = 0
    DONOR = 1
    PLACE = 2  # which lung pixel of the film the patch is centred on
    SOURCE_X = 3  # what pixel of the donor's chest it is cut around
    SOURCE_Y = 4
    WIDTH = 5
    WIDTH_2 = 6
    HEIGHT = 7
    HEIGHT_2 = 8
    SCALE = 9
    MIRROR = 10
    BLEND = 11


@dataclass(frozen=True)
class Donors:
    """Films that patches are cut from, and their chests: the upright boxes around their lungs."""

    films: Tensor  # (D, S, S)
    chests: Tensor  # (D, 4): first and last column, first and last row

    @classmethod
    def of(cls, images_D1SS: Tensor) -> Donors:
        """Films with their chests, which are computed once."""
        return cls(images_D1SS[:, 0], chests(lung_field(images_D1SS[:, 0])))

    def picked(self, which_N: Tensor) -> Donors:
        """Donors by number; a number may be repeated."""
        return Donors(self.films[which_N], self.chests[which_N])


def chests(lungs_BSS: Tensor) -> Tensor:
    """First and last column, first and last row of the lungs (B, 4); of the whole film where there are none."""
    size = lungs_BSS.shape[-1]
    ends = []
    for dim in (1, 2):
        along = lungs_BSS.any(dim=dim).to(torch.uint8)  # argmax finds the first of the largest
        ends += [along.argmax(dim=1), size - 1 - along.flip(1).argmax(dim=1)]
    return torch.stack(ends, dim=1)


@torch.no_grad()
def naturally_pasted(
    images_B1SS: Tensor,
    donors: Donors | None,
    *,
    seed: int,
    epoch: int,
    rows: Tensor,
    most: int = 3,
    blend: Blend = "mixed",
) -> Tensor:
    """Films with patches of donors, or of themselves where there is none: one always, others by a coin each."""
    draws_BKD = keyed(seed ^ _NATURAL, epoch, rows, 1, most)[:, 0]
    before = images_B1SS[:, 0]
    films, lungs = before.clone(memory_format=torch.contiguous_format), lung_field(before)
    own = Donors(before, chests(lungs))
    for number in range(most):
        draws_BD = draws_BKD[:, number]
        some = torch.arange(len(rows))
        if number:
            some = (unit(draws_BD[:, _NaturalDraw.PRESENT]) < 0.5).nonzero()[:, 0]
        if len(some):
            drawn = draws_BD[some].to(films.device)
            here = some.to(films.device)
            if donors is None:
                source = own.picked(here)
            else:
                source = donors.picked(below(drawn[:, _NaturalDraw.DONOR], len(donors.films)))
            target = _Target(here, lungs[here], own.chests[here])
            _paste_naturally(films, target, source, draws_BD[some], blend)
    return films[:, None]


@dataclass(frozen=True)
class _Target:
    """N films of a batch that get a patch each."""

    film: Tensor  # (N,)
    lungs: Tensor  # (N, S, S)
    chests: Tensor  # (N, 4)


def _paste_naturally(films_BSS: Tensor, target: _Target, source: Donors, draws_ND: Tensor, blend: Blend) -> None:
    """Paste one patch into each of some films, in place."""
    device, size = films_BSS.device, films_BSS.shape[-1]
    sides = _natural_sides(draws_ND, size)
    window = int(torch.maximum(sides[0], sides[1]).max())
    width, height, scale = (column.to(device) for column in sides)
    draws = draws_ND.to(device).unbind(1)

    column, row = PixelPicker(target.lungs).pick(draws[_NaturalDraw.PLACE][:, None])
    left = _pushed_into(target.chests[:, :2], column[:, 0], width, size)
    top = _pushed_into(target.chests[:, 2:], row[:, 0], height, size)
    boxes = Boxes(window, target.film, left, top, width, height)

    first_x, last_x, first_y, last_y = source.chests.unbind(1)
    x = first_x + below(draws[_NaturalDraw.SOURCE_X], last_x - first_x + 1)
    y = first_y + below(draws[_NaturalDraw.SOURCE_Y], last_y - first_y + 1)
    mirror = torch.where(unit(draws[_NaturalDraw.MIRROR]) < 0.5, -1.0, 1.0)
    across, down = boxes.from_centre()
    from_x = _kept_inside(x, width / scale, size) + across * (mirror / scale)[:, None, None]
    from_y = _kept_inside(y, height / scale, size) + down / scale[:, None, None]

    patch = sampled(source.films, from_x.expand(-1, window, -1), from_y.expand(-1, -1, window))
    coin = unit(draws[_NaturalDraw.BLEND]) < 0.5
    windows = blended(boxes.cut(films_BSS), patch, height, width, blend, coin).clamp(0, 1)
    boxes.put(films_BSS, windows, boxes.inside())


def _natural_sides(draws_ND: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Width and height in the film, and how much larger the patch is there than in its donor; each (N,).

    A gamma distribution of shape 2 is the sum of two exponential ones.
    """
    scale = (1 + _SCALE_SD * torch.special.ndtri(unit(draws_ND[:, _NaturalDraw.SCALE]))).clamp(*_SCALE)
    offset, spread = _HALF_SIDE_GAMMA
    sides = []
    for first, second in ((_NaturalDraw.WIDTH, _NaturalDraw.WIDTH_2), (_NaturalDraw.HEIGHT, _NaturalDraw.HEIGHT_2)):
        exponentials = -torch.log1p(-unit(draws_ND[:, first])) - torch.log1p(-unit(draws_ND[:, second]))
        half = (offset + spread * exponentials).clamp(*_HALF_SIDE) * scale
        sides.append(_whole(2 * half.clamp(max=_HALF_SIDE[1]) * size, size, SMALLEST))
    return sides[0], sides[1], scale


def _pushed_into(chest_N2: Tensor, centre_N: Tensor, length_N: Tensor, size: int) -> Tensor:
    """Where a box around ``centre`` begins (N,): within the chest if it fits there, and always within the film."""
    first, last = chest_N2.unbind(1)
    latest = torch.maximum(last + 1 - length_N, first)
    begin = torch.minimum(torch.maximum(centre_N - length_N // 2, first), latest)
    return torch.minimum(begin, size - length_N).clamp(min=0)


def _kept_inside(centre_N: Tensor, length_N: Tensor, size: int) -> Tensor:
    """The middle of what is cut from a donor (N, 1, 1), moved so that all of it lies in the donor where it can."""
    half = ((length_N - 1) / 2).clamp(max=(size - 1) / 2)
    return torch.minimum(torch.maximum(centre_N.to(half), half), size - 1 - half)[:, None, None]


def donor_rows(rows: Tensor | Sequence[int], count: int, seed: int) -> Tensor:
    """Which films patches are taken from: at most ``count`` of ``rows``, drawn, in rising order."""
    numbers = torch.as_tensor(rows, dtype=torch.int64).sort().values
    draws = keyed(seed ^ _NATURAL, -1, numbers, 1, 1)[:, 0, 0, 0]
    return numbers[draws.argsort(stable=True)[:count]].sort().values


def change_labels(
    before_B1SS: Tensor,
    after_B1SS: Tensor,
    how: Literal["logistic", "binary"],
    steepness: float = 0.5,
    middle: float = 4.0,
) -> Tensor:
    """How abnormal each pixel has become (B, 1, S, S), in [0, 1].

    From the change in grey levels of 255, averaged over its surroundings: ``binary`` is 1 where there is any,
    ``logistic`` rises from 0 to 1 around ``middle`` grey levels.
    """
    reach = max(1, round(2 * before_B1SS.shape[-1] / _CUT_REFERENCE))
    change = (after_B1SS - before_B1SS).abs() * _GREY_LEVELS
    change = F.avg_pool2d(change, 2 * reach + 1, stride=1, padding=reach, count_include_pad=False)
    changed = change > 1
    if how == "binary":
        return changed.to(before_B1SS.dtype)
    return torch.sigmoid(steepness * (change - middle)) * changed

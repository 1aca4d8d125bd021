"""Films spoilt on purpose, for methods that restore them: grey values bent, pixels shuffled, parts painted over.

The corruptions of Models Genesis (Zhou et al. 2019, 2021), from the paper. As published: a cubic Bezier curve through
(0, 0) and (1, 1), rising or falling, bends the grey values; pixels change places inside windows of at most a tenth of
the side; up to five blocks of a sixth to a third of the side are filled with noise (in-painting), or everything but up
to five windows of about half the side is (out-painting), never both; that it is mostly five; and how many films each
happens to. Ours: at least one block, where one film in twenty has none in the published code; a film is tiled by
windows of one random side, where the published code shuffles thousands of windows that overlap; and there are no
mirrored films, so that anatomy keeps its place.

Everything follows from (seed, epoch, row, view) alone.

Shapes: B films of C channels and S x S pixels, T points of a curve, N = S * S.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from afire.config import Section
from afire.lesions.places import DRAW_BITS, below, keyed, nth_of_stream, unit

_CORRUPT = 0xC0557
"""Keeps these draws apart from those of lesions, crops and augmentation."""
_CURVE_POINTS = 256
_BLOCKS = 5
_ANOTHER = 0.95  # chance that a block is followed by another one, up to _BLOCKS
_WINDOW = 10  # the largest window in which pixels change places, as a part of the side
_IN, _OUT = (1 / 6, 1 / 3), (3 / 7, 4 / 7)  # sides of blocks that are painted, and of windows that are left
_DRAWN = (1 << DRAW_BITS) - 1
KINDS = ("bent", "shuffled", "in-painted", "out-painted")
"""What may be done to a film, in the order of :attr:`Corrupted.done`."""


class CorruptSettings(Section):
    """How often films are spoilt in which way; the shares are those of the published code."""

    nonlinear: float = Field(0.9, ge=0, le=1, description="share of films whose grey values go through a random curve")
    shuffle: float = Field(0.5, ge=0, le=1, description="share of films whose pixels change places in small windows")
    paint: float = Field(0.9, ge=0, le=1, description="share of films of which a part is painted over with noise")
    inpaint: float = Field(0.2, ge=0, le=1, description="of these: blocks are painted; else all but some windows is")


class Corrupted(NamedTuple):
    """Spoilt films, where they were painted over, and what was done to each."""

    images: Tensor  # (B, C, S, S) in [0, 1]
    painted: Tensor  # (B, 1, S, S) bool
    done: Tensor  # (B, 4) float, 1 where a kind of KINDS was done


class _Draw(IntEnum):
    """What each number of slot 0 decides; slots 1 to 5 hold the blocks. Append only: the order is what a seed means."""

    NONLINEAR = 0
    FALLING = 1
    X1 = 2
    Y1 = 3
    X2 = 4
    Y2 = 5
    SHUFFLE = 6
    SIDE = 7
    OFFSET_X = 8
    OFFSET_Y = 9
    ORDER = 10  # opens the stream of the shuffled pixels
    PAINT = 11
    INPAINT = 12
    COUNT = 13
    NOISE = 14  # opens the stream of the noise


class _Block(IntEnum):
    """What each number of a block's slot decides."""

    WIDTH = 0
    HEIGHT = 1
    X = 2
    Y = 3


@torch.no_grad()
def corrupted(
    images: Tensor, *, seed: int, epoch: int, rows: Tensor, settings: CorruptSettings, view: int = 0
) -> Corrupted:
    """Films (B, C, S, S) in [0, 1], spoilt: shuffled, bent, painted over, in this order."""
    draws_BSD = keyed(seed ^ _CORRUPT, epoch, rows, view + 1, 1 + _BLOCKS)[:, view].to(images.device)
    draws_BD, blocks_BKD = draws_BSD[:, 0], draws_BSD[:, 1:]
    bends, shuffles, paints = (
        unit(draws_BD[:, draw]) < share
        for draw, share in (
            (_Draw.NONLINEAR, settings.nonlinear),
            (_Draw.SHUFFLE, settings.shuffle),
            (_Draw.PAINT, settings.paint),
        )
    )
    inside = unit(draws_BD[:, _Draw.INPAINT]) < settings.inpaint
    spoilt = images.clone()
    if shuffles.any():
        spoilt[shuffles] = _shuffled(images[shuffles], draws_BD[shuffles])
    if bends.any():
        spoilt[bends] = bent(spoilt[bends], curves(draws_BD[bends]))
    painted = _painted(draws_BD, blocks_BKD, inside, images.shape[-1]) & paints[:, None, None, None]
    noise = noise_for(draws_BD[:, _Draw.NOISE], images.shape[-1]).to(images)
    spoilt = torch.where(painted, noise, spoilt)
    done = torch.stack([bends, shuffles, paints & inside, paints & ~inside], dim=1)
    return Corrupted(spoilt, painted, done.float())


def noise_for(keys_B: Tensor, side: int) -> Tensor:
    """Uniform noise (B, 1, side, side) in [0, 1), from one key for each film."""
    numbers = nth_of_stream(keys_B[:, None], torch.arange(side * side, device=keys_B.device))
    return unit(numbers & _DRAWN).view(-1, 1, side, side)


def curves(draws_BD: Tensor) -> Tensor:
    """Grey curves (B, T), the value that each of T even grey levels becomes: rising from 0 to 1, or falling."""
    t = torch.linspace(0, 1, _CURVE_POINTS, device=draws_BD.device)
    first, second, third = 3 * (1 - t).square() * t, 3 * (1 - t) * t.square(), t**3
    x_BT, y_BT = (
        unit(draws_BD[:, [low]]) * first + unit(draws_BD[:, [high]]) * second + third
        for low, high in ((_Draw.X1, _Draw.X2), (_Draw.Y1, _Draw.Y2))
    )
    falling = below(draws_BD[:, [_Draw.FALLING]], 2).bool()
    y_BT = torch.where(falling, y_BT.flip(1), y_BT)
    levels = t.expand_as(x_BT).contiguous()
    after = torch.searchsorted(x_BT.contiguous(), levels).clamp(1, _CURVE_POINTS - 1)
    x0, x1, y0, y1 = (of.gather(1, at) for of in (x_BT, y_BT) for at in (after - 1, after))
    share = ((levels - x0) / (x1 - x0).clamp_min(1e-9)).clamp(0, 1)
    return y0 + share * (y1 - y0)


def bent(images: Tensor, curves_BT: Tensor) -> Tensor:
    """Images (B, C, S, S) in [0, 1] with each grey value replaced by what the film's curve makes of it."""
    at = images.float().clamp(0, 1).flatten(1) * (curves_BT.shape[1] - 1)
    low = at.floor().long().clamp_max(curves_BT.shape[1] - 2)
    y0, y1 = curves_BT.gather(1, low), curves_BT.gather(1, low + 1)
    return (y0 + (at - low) * (y1 - y0)).view_as(images).to(images.dtype)


def _shuffled(images: Tensor, draws_BD: Tensor) -> Tensor:
    """Each film tiled by windows of one side, with an offset; inside a window pixels change places."""
    side = images.shape[-1]
    window = 2 + below(draws_BD[:, _Draw.SIDE], max(1, side // _WINDOW - 1))
    along = torch.arange(side, device=images.device)
    across, down = (
        (along + below(draws_BD[:, offset], window)[:, None]) // window[:, None]
        for offset in (_Draw.OFFSET_X, _Draw.OFFSET_Y)
    )
    tiles_BN = (down[:, :, None] * (side + 1) + across[:, None, :]).flatten(1) << DRAW_BITS
    order = nth_of_stream(draws_BD[:, [_Draw.ORDER]], torch.arange(side * side, device=images.device)) & _DRAWN
    source = (tiles_BN + order).argsort(dim=1, stable=True)
    target = tiles_BN.argsort(dim=1, stable=True)
    moved = torch.empty_like(source).scatter_(1, target, source)
    flat = images.flatten(2)
    return flat.gather(2, moved[:, None].expand_as(flat)).view_as(images)


def _counts(chances_B: Tensor) -> Tensor:
    """How many blocks (B,), 1 to 5: after each block another one follows with a chance of 0.95."""
    limits = _ANOTHER ** torch.arange(1, _BLOCKS, device=chances_B.device, dtype=chances_B.dtype)
    return 1 + (chances_B[:, None] < limits).sum(dim=1)


def _painted(draws_BD: Tensor, blocks_BKD: Tensor, inside_B: Tensor, side: int) -> Tensor:
    """(B, 1, S, S): True where noise goes, inside the blocks or outside of the windows."""
    smallest, largest = (torch.where(inside_B, _IN[end], _OUT[end])[:, None] for end in (0, 1))
    width, height = (
        ((smallest + unit(blocks_BKD[..., draw]) * (largest - smallest)) * side).round().long().clamp_min(1)
        for draw in (_Block.WIDTH, _Block.HEIGHT)
    )
    left, top = (
        below(blocks_BKD[..., draw], side - length + 1) for draw, length in ((_Block.X, width), (_Block.Y, height))
    )
    along = torch.arange(side, device=draws_BD.device)
    in_columns, in_rows = (
        (along >= start[..., None]) & (along < (start + length)[..., None])
        for start, length in ((left, width), (top, height))
    )
    counts = _counts(unit(draws_BD[:, _Draw.COUNT]))
    used = torch.arange(_BLOCKS, device=draws_BD.device) < counts[:, None]
    covered = (in_rows[..., :, None] & in_columns[..., None, :] & used[..., None, None]).any(dim=1)
    return torch.where(inside_B[:, None, None], covered, ~covered)[:, None]

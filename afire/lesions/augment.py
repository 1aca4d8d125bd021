"""What is done to every training film, pasted or not, so that neither blur nor grey curve gives a paste away.

A film is turned, zoomed, stretched and shifted (one warp), its grey curve bent, shaded, its edges sharpened, blurred,
and strewn with noise, each by an amount that follows from (seed, epoch, row) alone.

Shapes: B films of S x S pixels, C maps that are warped with them, on the film's grid or a coarser one of G x G cells.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from afire.config import Section
from afire.lesions.places import DRAW_BITS, REFERENCE_SIZE, keyed, nth_of_stream, unit

_AUGMENT = 0xA06
_MOTTLE = 0x3077E
"""Keep these draws apart from those of lesions and pastes."""
_CLOUDS = (14, 32, 72)  # cells along a side of what makes up a mottle
_SHADES = 3  # cosines along a side that make up a shading, the constant one among them
_SHARPEST, _WIDEST = 1.0, 6.0  # deviation of what unsharp masking takes off, in px of a 224-px film
_REACH = 3  # half-width of the blur's kernel, in its largest deviations
_DRAWN = (1 << DRAW_BITS) - 1


class AugmentSettings(Section):
    """Random changes of every training film; each amount is drawn evenly up to its limit, and 0 switches it off."""

    turn: float = Field(5.0, ge=0, le=180, description="largest turn either way, in degrees")
    zoom: float = Field(0.1, ge=0, lt=1, description="largest change of size either way, as a share")
    shift: float = Field(0.05, ge=0, lt=1, description="largest shift either way, as a share of the side")
    gamma: float = Field(0.3, ge=0, le=2, description="grey values to the power of up to exp(this), or its reciprocal")
    blur: float = Field(1.0, ge=0, le=20, description="largest deviation of a Gaussian blur, in px of a 224-px film")
    noise: float = Field(0.02, ge=0, le=1, description="largest deviation of Gaussian noise; the film's range is 1")
    stretch: float = Field(0.0, ge=0, lt=1, description="largest change of width, and of height by itself, as a share")
    contrast: float = Field(
        0.0, ge=0, lt=1, description="how far the slope of a smooth, rising grey curve leaves 1, either way"
    )
    shading: float = Field(0.0, ge=0, le=1, description="largest slow change of brightness across the film")
    unsharp: float = Field(0.0, ge=0, le=10, description="largest share of the fine detail that is added once more")
    mottle: float = Field(
        0.0, ge=0, le=1, description="largest deviation of clouds from coarse to fine, each on half of the films"
    )


class _Draw(IntEnum):
    """What each random number decides. Append only: the order is part of what a seed means."""

    TURN = 0
    ZOOM = 1
    SHIFT_X = 2
    SHIFT_Y = 3
    GAMMA = 4
    BLUR = 5
    NOISE = 6
    GRAIN = 7  # opens the stream of the noise itself
    STRETCH_X = 8
    STRETCH_Y = 9
    CURVE_1 = 10  # of the grey curve's first cosine; the others follow
    CURVE_2 = 11
    CURVE_3 = 12
    UNSHARP = 13
    DETAIL = 14  # how fine the detail is that unsharp masking adds
    SHADE = 15  # opens the stream of the shading


@torch.no_grad()
def augmented(
    images_B1SS: Tensor, maps_BCGG: Tensor | None, *, seed: int, epoch: int, rows: Tensor, settings: AugmentSettings
) -> tuple[Tensor, Tensor | None]:
    """Films in [0, 1], changed; the maps that belong to them are warped with them and otherwise stay as they are."""
    draws_BD = keyed(seed ^ _AUGMENT, epoch, rows, 1, 1)[:, 0, 0]
    images, maps = _both_warped(images_B1SS, maps_BCGG, _warp(draws_BD, settings))
    images = _bent(images.clamp(0, 1), draws_BD, settings.gamma)
    images = _curved(images, draws_BD, settings.contrast)
    images = _shaded(images, draws_BD, settings.shading)
    images = _sharpened(images, draws_BD, settings.unsharp)
    if settings.mottle:
        images = _mottled(images, keyed(seed ^ _MOTTLE, epoch, rows, 1, 1)[:, 0, 0], settings.mottle)
    images = _blurred(images, draws_BD, settings.blur)
    return _grainy(images, draws_BD, settings.noise), maps


def moved(images_BCSS: Tensor, share: float, *, seed: int, epoch: int, rows: Tensor) -> Tensor:
    """Films zoomed and shifted by up to ``share`` and not changed otherwise; the channels of a film move together."""
    moves = AugmentSettings(turn=0, zoom=share, shift=share, gamma=0, blur=0, noise=0)
    channels = images_BCSS.flatten(0, 1)[:, None]
    of_channels = rows.repeat_interleave(images_BCSS.shape[1])
    films, _ = augmented(channels, None, seed=seed, epoch=epoch, rows=of_channels, settings=moves)
    return films.view_as(images_BCSS)


def _either_way(draw_B: Tensor, limit: float) -> Tensor:
    return (2 * unit(draw_B) - 1) * limit


def _both_warped(images: Tensor, maps: Tensor | None, warp_B23: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Films and maps by one warp; in one call where they have the same size."""
    if warp_B23 is None:
        return images, maps
    if maps is None:
        return _warped(images, warp_B23), None
    if maps.shape[-2:] != images.shape[-2:]:
        return _warped(images, warp_B23), _warped(maps, warp_B23)
    both = _warped(torch.cat([images, maps], dim=1), warp_B23)
    return both[:, :1], both[:, 1:]


def _warp(draws_BD: Tensor, settings: AugmentSettings) -> Tensor | None:
    """One warp (B, 2, 3) for turn, zoom, stretch and shift; None where there is none of them."""
    if not (settings.turn or settings.zoom or settings.shift or settings.stretch):
        return None
    angle = _either_way(draws_BD[:, _Draw.TURN], math.radians(settings.turn))
    zoom = 1 + _either_way(draws_BD[:, _Draw.ZOOM], settings.zoom)
    x, y = (_either_way(draws_BD[:, shift], 2 * settings.shift) for shift in (_Draw.SHIFT_X, _Draw.SHIFT_Y))
    cosine, sine = angle.cos() / zoom, angle.sin() / zoom
    warp_B23 = torch.stack([torch.stack([cosine, -sine, x], 1), torch.stack([sine, cosine, y], 1)], 1)
    if settings.stretch:
        limit = settings.stretch
        wide, high = (1 + _either_way(draws_BD[:, draw], limit) for draw in (_Draw.STRETCH_X, _Draw.STRETCH_Y))
        warp_B23 /= torch.stack([wide, high, torch.ones_like(wide)], 1)[:, None]
    return warp_B23


def _warped(images_BCSS: Tensor, warp_B23: Tensor) -> Tensor:
    """Beyond its edge, a film continues with its last pixels."""
    grid = F.affine_grid(warp_B23.to(images_BCSS), list(images_BCSS.shape), align_corners=False)
    return F.grid_sample(images_BCSS, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _bent(images: Tensor, draws_BD: Tensor, gamma: float) -> Tensor:
    if not gamma:
        return images
    power = _either_way(draws_BD[:, _Draw.GAMMA], gamma).exp().to(images)
    return images.pow(power[:, None, None, None])


def _curved(images: Tensor, draws_BD: Tensor, contrast: float) -> Tensor:
    """A grey curve from 0 to 1 whose slope is 1 and three cosines that sum to less than 1: it rises everywhere."""
    if not contrast:
        return images
    curve = images.clone()
    for order, draw in enumerate((_Draw.CURVE_1, _Draw.CURVE_2, _Draw.CURVE_3), start=1):
        height = _either_way(draws_BD[:, draw], contrast / 3).to(images)[:, None, None, None]
        curve += height * torch.sin(order * math.pi * images) / (order * math.pi)
    return curve.clamp(0, 1)


def _shaded(images_B1SS: Tensor, draws_BD: Tensor, shading: float) -> Tensor:
    """A sum of slow cosines that reaches as far up or down as the key of its stream says."""
    if not shading:
        return images_B1SS
    height, width = images_B1SS.shape[-2:]
    numbers = normal_numbers(draws_BD[:, _Draw.SHADE], _SHADES**2).to(images_B1SS)
    amount, heights_BRC = unit(draws_BD[:, _Draw.SHADE]).to(images_B1SS) * shading, numbers.view(-1, _SHADES, _SHADES)
    heights_BRC[:, 0, 0] = 0  # brightness as such is the grey curve's
    down, across = (_cosines(side, images_B1SS) for side in (height, width))
    field = down.T @ heights_BRC @ across
    field = field / field.abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-6)
    return (images_B1SS + amount[:, None, None, None] * field[:, None]).clamp(0, 1)


def _cosines(side: int, like: Tensor) -> Tensor:
    """The slowest cosines (_SHADES, side) along a side."""
    at = (torch.arange(side, device=like.device) + 0.5) / side
    return torch.cos(math.pi * torch.arange(_SHADES, device=like.device)[:, None] * at).to(like)


def _sharpened(images_B1SS: Tensor, draws_BD: Tensor, unsharp: float) -> Tensor:
    """Unsharp masking: what a Gaussian of each film's own width removes is added again."""
    if not unsharp:
        return images_B1SS
    pixel = images_B1SS.shape[-1] / REFERENCE_SIZE
    amount = (unit(draws_BD[:, _Draw.UNSHARP]) * unsharp).to(images_B1SS)[:, None, None, None]
    deviation = (_SHARPEST + (_WIDEST - _SHARPEST) * unit(draws_BD[:, _Draw.DETAIL])).to(images_B1SS) * pixel
    smooth = smoothed(images_B1SS, deviation, math.ceil(_REACH * _WIDEST * pixel))
    return (images_B1SS + amount * (images_B1SS - smooth)).clamp(0, 1)


def _blurred(images_B1SS: Tensor, draws_BD: Tensor, blur: float) -> Tensor:
    largest = blur * images_B1SS.shape[-1] / REFERENCE_SIZE
    if not largest:
        return images_B1SS
    deviation = (unit(draws_BD[:, _Draw.BLUR]) * largest).clamp_min(1e-3).to(images_B1SS)
    return smoothed(images_B1SS, deviation, math.ceil(_REACH * largest))


def smoothed(images_BCSS: Tensor, deviation_B: Tensor, reach: int) -> Tensor:
    """A Gaussian of its own for each film: the films are the channels of one image, each with its own kernel.

    Deviations are in pixels and above 0; a kernel ends ``reach`` pixels from its centre.
    """
    channels = images_BCSS.shape[1]
    at = torch.arange(-reach, reach + 1, device=images_BCSS.device)
    kernels = torch.exp(-0.5 * (at / deviation_B.repeat_interleave(channels)[:, None]).square())
    kernels = (kernels / kernels.sum(dim=1, keepdim=True))[:, None, None, :]
    films = F.pad(images_BCSS, (reach, reach, reach, reach), mode="replicate").flatten(0, 1)[None]
    films = F.conv2d(films, kernels, groups=len(kernels))
    return F.conv2d(films, kernels.transpose(2, 3), groups=len(kernels)).view_as(images_BCSS)


def _mottled(images_B1SS: Tensor, draws_BD: Tensor, mottle: float) -> Tensor:
    """Clouds at several scales, so that a film's fine texture gives no hint about its findings."""
    for number, cells in enumerate(_CLOUDS):
        some, amount, stream = (draws_BD[:, 3 * number + place] for place in range(3))
        height = (unit(amount) * mottle * (unit(some) < 0.5)).to(images_B1SS)
        numbers = normal_numbers(stream.to(images_B1SS.device), cells * cells).view(-1, 1, cells, cells)
        clouds = F.interpolate(numbers.to(images_B1SS), images_B1SS.shape[-2:], mode="bicubic", align_corners=False)
        images_B1SS = images_B1SS + height[:, None, None, None] * clouds
    return images_B1SS.clamp(0, 1)


def _grainy(images_B1SS: Tensor, draws_BD: Tensor, noise: float) -> Tensor:
    if not noise:
        return images_B1SS
    amount = (unit(draws_BD[:, _Draw.NOISE]) * noise).to(images_B1SS)
    grain = normal_numbers(draws_BD[:, _Draw.GRAIN].to(images_B1SS.device), images_B1SS[0].numel())
    return (images_B1SS + amount[:, None, None, None] * grain.view_as(images_B1SS)).clamp(0, 1)


def normal_numbers(keys_B: Tensor, count: int) -> Tensor:
    """Numbers (B, count) of a normal distribution that follow from a key each, two from each draw (Box and Muller)."""
    numbers = nth_of_stream(keys_B[:, None], torch.arange(-(-count // 2), device=keys_B.device))
    first, second = unit(numbers & _DRAWN), unit((numbers >> DRAW_BITS) & _DRAWN)
    radius, angle = (-2 * torch.log1p(-first)).sqrt(), 2 * math.pi * second
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]

"""What is done to every training film, pasted or not, so that neither blur nor grey curve gives a paste away.

A film is turned, zoomed and shifted (one warp), its grey curve bent, blurred, and strewn with noise, each by an amount
that follows from (seed, epoch, row) alone.

Shapes: B films of S x S pixels, C maps that are warped with them.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from afire.config import Section
from afire.lesions.places import DRAW_BITS, keyed, nth_of_stream, unit
from afire.lesions.synthesis import REFERENCE_SIZE

_AUGMENT = 0xA06
"""Keeps these draws apart from those of lesions and pastes."""
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


@torch.no_grad()
def augmented(
    images_B1SS: Tensor, maps_BCSS: Tensor | None, *, seed: int, epoch: int, rows: Tensor, settings: AugmentSettings
) -> tuple[Tensor, Tensor | None]:
    """Films in [0, 1], changed; the maps that belong to them are warped with them and otherwise stay as they are."""
    draws_BD = keyed(seed ^ _AUGMENT, epoch, rows, 1, 1)[:, 0, 0]
    both = images_B1SS if maps_BCSS is None else torch.cat([images_B1SS, maps_BCSS], dim=1)
    both = _warped(both, draws_BD, settings)
    images = _bent(both[:, :1].clamp(0, 1), draws_BD, settings.gamma)
    images = _blurred(images, draws_BD, settings.blur)
    images = _grainy(images, draws_BD, settings.noise)
    return images, (None if maps_BCSS is None else both[:, 1:])


def _either_way(draw_B: Tensor, limit: float) -> Tensor:
    return (2 * unit(draw_B) - 1) * limit


def _warped(images_BCSS: Tensor, draws_BD: Tensor, settings: AugmentSettings) -> Tensor:
    """One warp for turn, zoom and shift; beyond its edge a film goes on as it ends."""
    if not (settings.turn or settings.zoom or settings.shift):
        return images_BCSS
    angle = _either_way(draws_BD[:, _Draw.TURN], math.radians(settings.turn))
    zoom = 1 + _either_way(draws_BD[:, _Draw.ZOOM], settings.zoom)
    x, y = (_either_way(draws_BD[:, shift], 2 * settings.shift) for shift in (_Draw.SHIFT_X, _Draw.SHIFT_Y))
    cosine, sine = angle.cos() / zoom, angle.sin() / zoom
    maps_B23 = torch.stack([torch.stack([cosine, -sine, x], 1), torch.stack([sine, cosine, y], 1)], 1).to(images_BCSS)
    grid = F.affine_grid(maps_B23, list(images_BCSS.shape), align_corners=False)
    return F.grid_sample(images_BCSS, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _bent(images: Tensor, draws_BD: Tensor, gamma: float) -> Tensor:
    if not gamma:
        return images
    power = _either_way(draws_BD[:, _Draw.GAMMA], gamma).exp().to(images)
    return images.pow(power[:, None, None, None])


def _blurred(images_B1SS: Tensor, draws_BD: Tensor, blur: float) -> Tensor:
    largest = blur * images_B1SS.shape[-1] / REFERENCE_SIZE
    return blurred(images_B1SS, unit(draws_BD[:, _Draw.BLUR]) * largest, largest) if largest else images_B1SS


def blurred(images_BCSS: Tensor, deviation_B: Tensor, largest: float) -> Tensor:
    """A Gaussian of its own for each film, of at most ``largest`` pixels; a deviation of 0 leaves a film as it is.

    The films are the channels of one image, each with its own kernel.
    """
    C, reach = images_BCSS.shape[1], math.ceil(_REACH * largest)
    deviation = deviation_B.clamp_min(1e-3).to(images_BCSS).repeat_interleave(C)
    at = torch.arange(-reach, reach + 1, device=images_BCSS.device)
    kernels = torch.exp(-0.5 * (at / deviation[:, None]).square())
    kernels = (kernels / kernels.sum(dim=1, keepdim=True))[:, None, None, :]
    films = F.pad(images_BCSS, (reach, reach, reach, reach), mode="replicate").flatten(0, 1)[None]
    films = F.conv2d(films, kernels, groups=len(kernels))
    return F.conv2d(films, kernels.transpose(2, 3), groups=len(kernels))[0].unflatten(0, (-1, C))


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

"""Views of films for methods that compare them: random crops, mirrored, turned, jittered and blurred, on the device.

What is done to a view follows from (seed, epoch, film, view) alone, so a resumed run and any number of processes see
the same views. One warp cuts, mirrors and turns; films are grey, so of colour jitter brightness and contrast remain.

Shapes: B films of S x S pixels, V views of each, N = B * V views with those of a film beside each other, s the side of
a view. A box is (left, top, width, height) in shares of the film's side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from afire.config import Section
from afire.lesions.augment import smoothed
from afire.lesions.places import REFERENCE_SIZE, keyed, unit
from afire.methods.base import Keys

_CROPS = 0xC207
"""Keeps these draws apart from those of lesions, masks and depth."""
_REACH = 3  # half-width of the blur's kernel, in its largest deviations
_NO_BLUR = 1e-3  # a deviation, in pixels, that leaves a view as it is
_STREAM = 0x1_0000_0000  # seeds of different streams never meet: a seed's own bits lie below


class CropSettings(Section):
    """What a random view of a film may be. A chance of 0 switches a change off."""

    area_min: float = Field(0.2, gt=0, le=1, description="smallest area of a view, as a share of the film")
    area_max: float = Field(1.0, gt=0, le=1, description="largest area of a view, as a share of the film")
    aspect: float = Field(4 / 3, ge=1, le=4, description="largest ratio of the sides of what is cut, either way")
    mirror: float = Field(0.5, ge=0, le=1, description="chance that a view is mirrored")
    turn: float = Field(0.0, ge=0, le=180, description="largest turn either way, in degrees")
    jitter: float = Field(0.8, ge=0, le=1, description="chance that brightness and contrast change")
    brightness: float = Field(0.4, ge=0, lt=1, description="largest change of brightness either way, as a factor")
    contrast: float = Field(0.4, ge=0, lt=1, description="largest change of contrast either way, as a factor")
    blur: float = Field(0.5, ge=0, le=1, description="chance of a Gaussian blur")
    blur_min: float = Field(0.1, ge=0, le=20, description="smallest deviation of the blur, in px of a 224-px view")
    blur_max: float = Field(2.0, gt=0, le=20, description="largest deviation of the blur, in px of a 224-px view")
    solarise: float = Field(0.0, ge=0, le=1, description="chance that grey values above one half are turned over")

    @model_validator(mode="after")
    def _ordered(self) -> CropSettings:
        for low, high in (("area_min", "area_max"), ("blur_min", "blur_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} {getattr(self, low)} is larger than {high} {getattr(self, high)}")
        return self


class ViewSettings(Section):
    """Settings with several kinds of views, each with defaults of its own: what is given changes only what it names."""

    @model_validator(mode="before")
    @classmethod
    def _on_defaults(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        own = {name: field.default for name, field in cls.model_fields.items()}
        return {
            name: {**own[name].model_dump(), **value}
            if isinstance(value, Mapping) and isinstance(own.get(name), Section)
            else value
            for name, value in values.items()
        }


class _Draw(IntEnum):
    """What each random number of a view decides. Append only: the order is part of what a seed means."""

    AREA = 0
    ASPECT = 1
    LEFT = 2
    TOP = 3
    MIRROR = 4
    TURN = 5
    JITTER = 6
    BRIGHTNESS = 7
    CONTRAST = 8
    BLUR = 9
    DEVIATION = 10
    SOLARISE = 11


def view_draws(keys: Keys, views: int, stream: int = 0) -> Tensor:
    """Numbers (B, V, D), uniform in [0, 1), of ``views`` views of each film; another ``stream`` has others."""
    return unit(keyed(keys.seed ^ _CROPS ^ (stream * _STREAM), keys.epoch, keys.rows, views, 1))[:, :, 0]


@torch.no_grad()
def crops(
    images_BCSS: Tensor,
    keys: Keys,
    *,
    views: int,
    size: int,
    settings: CropSettings,
    within: Tensor | None = None,
    centred: bool = False,
    stream: int = 0,
) -> Tensor:
    """Random views (N, C, s, s) of films in [0, 1].

    ``within`` (B, V, 4) are boxes to cut from instead of the whole film; ``centred`` views lie around its centre. Views
    of another size or with other settings take a ``stream`` of their own, else they would repeat the draws of the
    first.
    """
    draws_BVD = view_draws(keys, views, stream)
    if centred:
        draws_BVD[..., [_Draw.LEFT, _Draw.TOP]] = 0.5
    boxes_BV4 = drawn_boxes(draws_BVD, settings)
    if within is not None:
        boxes_BV4 = inside(boxes_BV4, within.to(boxes_BV4))
    mirrored_BV = draws_BVD[..., _Draw.MIRROR] < settings.mirror
    angle_BV = (2 * draws_BVD[..., _Draw.TURN] - 1) * math.radians(settings.turn)
    views_NCSS = cut(images_BCSS, boxes_BV4, size, mirrored_BV, angle_BV)
    return toned(views_NCSS, draws_BVD.flatten(0, 1), settings)


def drawn_boxes(draws_BVD: Tensor, settings: CropSettings) -> Tensor:
    """Boxes (B, V, 4): the area is uniform, the ratio of the sides by its logarithm, the place anywhere inside.

    A side that would be longer than the film's is cut off there.
    """
    area = settings.area_min + (settings.area_max - settings.area_min) * draws_BVD[..., _Draw.AREA]
    ratio = ((2 * draws_BVD[..., _Draw.ASPECT] - 1) * math.log(settings.aspect)).exp()
    width, height = (area * ratio).sqrt().clamp_max(1), (area / ratio).sqrt().clamp_max(1)
    left, top = (1 - width) * draws_BVD[..., _Draw.LEFT], (1 - height) * draws_BVD[..., _Draw.TOP]
    return torch.stack([left, top, width, height], dim=-1)


def inside(boxes: Tensor, outer: Tensor) -> Tensor:
    """Boxes (..., 4) that are in shares of the boxes ``outer`` (..., 4), in shares of the film."""
    scale = outer[..., 2:]
    return torch.cat([outer[..., :2] + boxes[..., :2] * scale, boxes[..., 2:] * scale], dim=-1)


@torch.no_grad()
def cut(
    images_BCSS: Tensor, boxes_BV4: Tensor, size: int, mirrored_BV: Tensor | None = None, angle_BV: Tensor | None = None
) -> Tensor:
    """What lies in the boxes, (N, C, s, s), mirrored and then turned about its centre; bilinear, in one warp.

    Beyond its edge, a film continues with its last pixels.
    """
    B, V = boxes_BV4.shape[:2]
    left, top, width, height = boxes_BV4.unbind(-1)
    angle = torch.zeros_like(width) if angle_BV is None else angle_BV
    flip = torch.ones_like(width) if mirrored_BV is None else 1 - 2 * mirrored_BV.to(width)
    # From (-1, 1) of the view to (-1, 1) of the film: mirror, turn, shrink to the box, shift to its centre.
    cosine, sine = angle.cos(), angle.sin()
    across = torch.stack([flip * cosine * width, -sine * width, 2 * left + width - 1], dim=-1)
    down = torch.stack([flip * sine * height, cosine * height, 2 * top + height - 1], dim=-1)
    maps = torch.stack([across, down], dim=-2).flatten(0, 1)
    channels = images_BCSS.shape[1]
    grid = F.affine_grid(maps.to(images_BCSS), [B * V, channels, size, size], align_corners=False)
    # The views of a film below each other in one tall picture: no film is copied for each of its views.
    grid = grid.view(B, V * size, size, 2)
    tall = F.grid_sample(images_BCSS, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return tall.view(B, channels, V, size, size).transpose(1, 2).reshape(B * V, channels, size, size)


@torch.no_grad()
def toned(views_NCSS: Tensor, draws_ND: Tensor, settings: CropSettings) -> Tensor:
    """Views with other brightness and contrast, blurred, turned over; by the draws of each, in this order."""

    def of(draw: _Draw, low: float, high: float) -> Tensor:
        return (low + (high - low) * draws_ND[:, draw])[:, None, None, None]

    def to(numbers: Tensor) -> Tensor:
        return numbers.to(views_NCSS.device)

    if settings.jitter:
        changes = (draws_ND[:, _Draw.JITTER] < settings.jitter)[:, None, None, None]
        brightness = of(_Draw.BRIGHTNESS, 1 - settings.brightness, 1 + settings.brightness).where(changes, 1.0)
        contrast = of(_Draw.CONTRAST, 1 - settings.contrast, 1 + settings.contrast).where(changes, 1.0)
        views_NCSS = (views_NCSS * to(brightness)).clamp_(0, 1)
        mean = views_NCSS.mean(dim=(1, 2, 3), keepdim=True)
        views_NCSS = torch.lerp(mean, views_NCSS, to(contrast)).clamp_(0, 1)
    if settings.blur:
        scale = views_NCSS.shape[-1] / REFERENCE_SIZE
        deviation = of(_Draw.DEVIATION, settings.blur_min, settings.blur_max)[:, 0, 0, 0] * scale
        chosen = draws_ND[:, _Draw.BLUR] < settings.blur
        reach = math.ceil(_REACH * settings.blur_max * scale)
        views_NCSS = smoothed(views_NCSS, to(deviation.where(chosen, 0.0).clamp_min(_NO_BLUR)), reach)
    if settings.solarise:
        over = to((draws_ND[:, _Draw.SOLARISE] < settings.solarise)[:, None, None, None]) & (views_NCSS >= 0.5)
        views_NCSS = torch.where(over, 1 - views_NCSS, views_NCSS)
    return views_NCSS

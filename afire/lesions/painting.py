"""From draws to painted lesions: how many, how large, how strong, with which texture and where; then their pixels.

Only the pixels inside the lesions' boxes are computed, those of all lesions of a group of films at once. The boxes
differ in size, so the pixels of all of them form one flat list of P entries; each entry knows its lesion.

Shapes: B films of H x W, V views, S slots, N lesions in all. A sample is one view of one film; samples are numbered
film by film (film * V + view).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from afire.config import LesionConfig
from afire.lesions.places import Draw, PixelPicker, below, lung_field, unit

REFERENCE_SIZE = 224  # sizes in the settings are pixels of a film this large
HARMONICS = (2, 3, 4, 5)  # of the outline; the first would only shift it
# Lesions add up as whole multiples of 2^-24: integer sums do not depend on the order in which a GPU adds them.
FIXED_POINT = 2**24


@dataclass(frozen=True)
class Lesions:
    """N lesions as columns. A lesion is ``width`` x ``height``, turned by the angle, in the middle of its box."""

    sample: Tensor  # row of the result
    film: Tensor
    left: Tensor  # the box of pixels that the lesion is painted in, always within the film
    top: Tensor
    box_width: Tensor
    box_height: Tensor
    width: Tensor
    height: Tensor
    window_left: Tensor  # the window that the texture is taken from
    window_top: Tensor
    amplitude: Tensor
    cosine: Tensor
    sine: Tensor
    phases: Tensor  # (N, len(HARMONICS))
    haze: Tensor  # bool

    def __len__(self) -> int:
        return len(self.sample)

    def where(self, keep: Tensor | slice) -> Lesions:
        """Some of the lesions."""
        return Lesions(**{column.name: getattr(self, column.name)[keep] for column in fields(self)})


def scaled(size_at_224: float, height: int, width: int) -> int:
    """A size in pixels of this film, at least 1. The shorter side counts: lesions are not stretched with the film."""
    return max(1, round(size_at_224 * min(height, width) / REFERENCE_SIZE))


def window_size(config: LesionConfig, height: int, width: int) -> tuple[int, int]:
    """Width and height of the texture window, never larger than the film."""
    side = scaled(config.texture_window, height, width)
    return min(side, width), min(side, height)


def plan(gray_BHW: Tensor, highlighted: PixelPicker, draws_BVSD: Tensor, config: LesionConfig) -> Lesions:
    """Turn draws into the lesions of every sample."""
    films, views, slots, _ = draws_BVSD.shape
    device = gray_BHW.device
    draws = draws_BVSD.reshape(films, views * slots, -1).unbind(2)
    height_H, width_W = gray_BHW.shape[1:]

    size_low, size_high = (scaled(size, height_H, width_W) for size in (config.size_min, config.size_max))
    width = (size_low + below(draws[Draw.WIDTH], size_high - size_low + 1)).clamp(max=width_W)
    height = (size_low + below(draws[Draw.HEIGHT], size_high - size_low + 1)).clamp(max=height_H)
    cosine, sine = _turn(draws[Draw.ANGLE], config.rotate)
    box_width = _extent(width, height, cosine, sine, width_W)
    box_height = _extent(height, width, cosine, sine, height_H)
    left, top = _place(gray_BHW, draws, box_width, box_height, config)
    window_left, window_top = place_windows(highlighted, draws, window_size(config, height_H, width_W))
    amplitude = config.amplitude_min + unit(draws[Draw.AMPLITUDE]) * (config.amplitude_max - config.amplitude_min)
    turns = torch.stack([unit(draws[Draw.PHASE + order]) for order in range(len(HARMONICS))], 2)

    index = torch.arange(films * views * slots, device=device)
    flat = Lesions(
        sample=index // slots,
        film=index // (slots * views),
        left=left.flatten(),
        top=top.flatten(),
        box_width=box_width.flatten(),
        box_height=box_height.flatten(),
        width=width.flatten(),
        height=height.flatten(),
        window_left=window_left.flatten(),
        window_top=window_top.flatten(),
        amplitude=amplitude.flatten(),
        cosine=cosine.flatten(),
        sine=sine.flatten(),
        phases=turns.flatten(0, 1) * (2 * torch.pi),
        haze=(unit(draws[Draw.KIND]) < config.haze).flatten(),
    )
    count_BV = config.count_min + below(draws_BVSD[:, :, 0, Draw.COUNT], config.count_max - config.count_min + 1)
    present = torch.arange(slots, device=device) < count_BV[:, :, None]
    return flat.where(present.flatten())


def place_windows(highlighted: PixelPicker, draws: tuple[Tensor, ...], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Left and top, each (B, K), of windows centred on a highlighted pixel and pushed into the film.

    A film without highlight (blank, one value) gets its windows anywhere.
    """
    window_width, window_height = size
    height_H, width_W = highlighted.chosen_BHW.shape[1:]
    last_left, last_top = width_W - window_width, height_H - window_height
    column, row = highlighted.pick(draws[Draw.TEXTURE])
    left = (column - window_width // 2).clamp(0, last_left)
    top = (row - window_height // 2).clamp(0, last_top)
    none = (highlighted.count == 0)[:, None]
    return (
        torch.where(none, below(draws[Draw.WINDOW_X], last_left + 1), left),
        torch.where(none, below(draws[Draw.WINDOW_Y], last_top + 1), top),
    )


def _turn(draw: Tensor, rotate: bool) -> tuple[Tensor, Tensor]:
    turn = unit(draw)
    if not rotate:
        return torch.ones_like(turn), torch.zeros_like(turn)
    angle = turn * (2 * torch.pi)
    return angle.cos(), angle.sin()


def _extent(along: Tensor, across: Tensor, cosine: Tensor, sine: Tensor, limit: int) -> Tensor:
    """Side of the upright box around a turned lesion, cut to the film; the lesion's own side when it is not turned."""
    return (along * cosine.abs() + across * sine.abs()).ceil().to(torch.int64).clamp(max=limit)


def _place(
    gray_BHW: Tensor, draws: tuple[Tensor, ...], box_width: Tensor, box_height: Tensor, config: LesionConfig
) -> tuple[Tensor, Tensor]:
    """Left and top of every box: anywhere it fits, or centred on a lung pixel and pushed into the film."""
    height_H, width_W = gray_BHW.shape[1:]
    last_left, last_top = width_W - box_width, height_H - box_height
    if config.place == "anywhere":
        return below(draws[Draw.PLACE_X], last_left + 1), below(draws[Draw.PLACE_Y], last_top + 1)
    column, row = PixelPicker(lung_field(gray_BHW)).pick(draws[Draw.LUNG])
    left = torch.minimum((column - box_width // 2).clamp(min=0), last_left)
    top = torch.minimum((row - box_height // 2).clamp(min=0), last_top)
    return left, top


def paint(gray_BHW: Tensor, lesions: Lesions, samples: int, config: LesionConfig) -> Tensor:
    """What texture adds and, with haze among the settings, how opaque haze is: int32 (layers, samples, H, W).

    In units of 1 / FIXED_POINT.
    """
    height, width = gray_BHW.shape[1:]
    layers = 2 if config.haze > 0 else 1
    pixels = _pixels(lesions, height, width, samples, config.rotate)
    value = _strength(lesions, pixels, config) * _content(gray_BHW, lesions, pixels, config)
    canvas = torch.zeros(layers * samples * height * width, dtype=torch.int32, device=gray_BHW.device)
    canvas.scatter_add_(0, pixels.target, value.mul_(FIXED_POINT).round_().to(torch.int32))
    return canvas.view(layers, samples, height, width)


@dataclass(frozen=True)
class _Pixels:
    """P pixels: whose they are, where they go, and where they lie within their lesion (u, v in [-1, 1])."""

    lesion: Tensor
    target: Tensor
    u: Tensor
    v: Tensor

    def own(self, column: Tensor) -> Tensor:
        """Each pixel's entry of a lesion column. (Plain indexing takes four times as long.)"""
        return column.index_select(0, self.lesion)


def _pixels(lesions: Lesions, height: int, width: int, samples: int, rotate: bool) -> _Pixels:
    areas = lesions.box_width * lesions.box_height
    # int32 halves the traffic; no group of films comes near 2^31 pixels within its boxes.
    lesion = torch.repeat_interleave(torch.arange(len(areas), dtype=torch.int32, device=areas.device), areas)

    def own(column: Tensor) -> Tensor:
        return column.index_select(0, lesion)

    within = torch.arange(len(lesion), dtype=torch.int32, device=areas.device)
    within = within - own((areas.cumsum(0) - areas).to(torch.int32))
    across = own(lesions.box_width.to(torch.int32))
    row = torch.div(within, across, rounding_mode="trunc")
    column = within - row * across

    # Haze goes to the second layer of the canvas, behind the samples of the first.
    origin = ((lesions.sample + samples * lesions.haze) * height + lesions.top) * width + lesions.left
    target = own(origin) + (row * width + column)

    x = column + own(0.5 - lesions.box_width / 2)
    y = row + own(0.5 - lesions.box_height / 2)
    per_x, per_y = 2 / lesions.width, 2 / lesions.height
    u, v = x * own(lesions.cosine * per_x), y * own(lesions.cosine * per_y)
    if rotate:
        u, v = u + y * own(lesions.sine * per_x), v - x * own(lesions.sine * per_y)
    return _Pixels(lesion, target, u, v)


def _strength(lesions: Lesions, pixels: _Pixels, config: LesionConfig) -> Tensor:
    """Amplitude times delta = exp(-(u^2 + v^2) / gamma), 0 beyond the lesion's own box or, with ``fade``, its oval."""
    u, v = pixels.u, pixels.v
    square = u * u + v * v
    if config.irregularity > 0:
        square = square / _outline(lesions, pixels, square, config.irregularity).square()
    delta = torch.exp(square * (-1 / config.gamma))
    if config.fade:
        edge = math.exp(-1 / config.gamma)  # delta where the oval meets its box
        delta = ((delta - edge) * (1 / (1 - edge))).clamp_(min=0)
    elif config.rotate:
        delta = delta.masked_fill((u.abs() > 1) | (v.abs() > 1), 0)
    return delta * pixels.own(lesions.amplitude)


def _outline(lesions: Lesions, pixels: _Pixels, square: Tensor, irregularity: float) -> Tensor:
    """Relative radius in each pixel's direction, in [1 - irregularity, 1]: smooth, closed, within the box.

    The radius is a sum of harmonics of the angle with random phases and weights 1/k. Powers of the unit vector give
    cos(k angle) and sin(k angle) without a trigonometric function for every pixel.
    """
    length = square.sqrt().clamp(min=1e-6)
    one_x, one_y = pixels.u / length, pixels.v / length
    power_x, power_y = one_x, one_y
    wave = torch.zeros_like(length)
    for k, phase in zip(HARMONICS, lesions.phases.unbind(1), strict=True):
        power_x, power_y = power_x * one_x - power_y * one_y, power_x * one_y + power_y * one_x
        wave = wave + power_x * pixels.own(phase.cos() / k) - power_y * pixels.own(phase.sin() / k)
    wave = wave / sum(1 / k for k in HARMONICS)
    return 1 - irregularity * 0.5 * (1 - wave)


def _content(gray_BHW: Tensor, lesions: Lesions, pixels: _Pixels, config: LesionConfig) -> Tensor:
    """The texture eta under each pixel; 1 for haze, which has none."""
    height, width = gray_BHW.shape[1:]
    window_width, window_height = window_size(config, height, width)
    x_low, x_high, x_share = _between(pixels.u, window_width)
    y_low, y_high, y_share = _between(pixels.v, window_height)
    origin = (lesions.film * height + lesions.window_top) * width + lesions.window_left
    upper = pixels.own(origin.to(torch.int32)) + y_low * width
    lower = upper + (y_high - y_low) * width
    flat = gray_BHW.reshape(-1)
    left_share, upper_share = 1 - x_share, 1 - y_share
    above = flat.index_select(0, upper + x_low) * left_share + flat.index_select(0, upper + x_high) * x_share
    under = flat.index_select(0, lower + x_low) * left_share + flat.index_select(0, lower + x_high) * x_share
    texture = above * upper_share + under * y_share
    return texture if config.haze == 0 else texture.masked_fill(pixels.own(lesions.haze), 1)


def _between(position: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """For positions in [-1, 1] across ``size`` pixels: the pixel before, the one after, and how far between."""
    at = ((position + 1) * (size / 2) - 0.5).clamp_(0, size - 1)
    low = at.to(torch.int32)
    return low, (low + 1).clamp_(max=size - 1), at - low

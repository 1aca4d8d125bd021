"""From draws to lesions: how many, how large, how strong, with which texture, and where.

Shapes: B films of H x W, V views, S slots, N lesions in all. A sample is one view of one film; samples are numbered
film by film (film * V + view).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from afire.config import LesionConfig
from afire.lesions.draws import Draw, below, unit
from afire.lesions.lungs import lung_field
from afire.lesions.otsu import PixelPicker

REFERENCE_SIZE = 224  # sizes in the settings are pixels of a film this large
HARMONICS = (2, 3, 4, 5)  # of the outline; the first would only shift it


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

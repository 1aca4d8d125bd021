"""Random crops, turns and mirrors of training films: drawn by key, applied to a whole batch in one warp each.

What happens to a film depends on (seed, step, row) alone: not on its batch, the number of processes or a restart.
Shapes: B films, S pixels a side.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from kornia.geometry.transform import get_affine_matrix2d, warp_affine
from torch import Tensor

from afire.lesions.draws import keyed, unit
from afire.task_config import AugmentConfig


class _Draw(IntEnum):
    """What each random number decides. Append only: the order is part of what a seed means."""

    AREA = 0
    ASPECT = 1
    PLACE_X = 2
    PLACE_Y = 3
    ANGLE = 4
    FLIP = 5


def draw_warps(config: AugmentConfig, size: int, seed: int, step: int, rows: np.ndarray) -> Tensor:
    """Affine maps (B, 2, 3) from the pixels of a film to those of its augmented version; float32 on the CPU."""
    chance = unit(keyed(seed, step, torch.from_numpy(np.ascontiguousarray(rows)), 1, 1)[:, 0, 0])
    area = config.crop_min + (1 - config.crop_min) * chance[:, _Draw.AREA]
    root_aspect = torch.exp((chance[:, _Draw.ASPECT] - 0.5) * float(np.log(config.stretch)))
    # A crop that is nearly the whole film cannot also be stretched: its sides end at the film's.
    sides = torch.stack([area.sqrt() * root_aspect, area.sqrt() / root_aspect], dim=1).clamp(max=1) * size
    corner = chance[:, [_Draw.PLACE_X, _Draw.PLACE_Y]] * (size - sides)
    centre = corner + sides / 2 - 0.5  # pixel centres are whole numbers
    mirror = 1 - 2 * (chance[:, _Draw.FLIP] < config.flip).float()
    scale = size / sides * torch.stack([mirror, torch.ones_like(mirror)], dim=1)
    angle = (2 * chance[:, _Draw.ANGLE] - 1) * config.rotation
    shift = (size - 1) / 2 - centre
    maps: Tensor = get_affine_matrix2d(shift, centre, scale, angle)[:, :2]
    return maps


def warp_films(films: Tensor, maps: Tensor) -> Tensor:
    """Films (B, C, S, S) through ``maps`` (B, 2, 3), bilinear; what lies outside of a film is black."""
    warped: Tensor = warp_affine(films, maps.to(films), films.shape[-2:], mode="bilinear", padding_mode="zeros")
    return warped.clamp_(0, 1)  # bilinear weights add up to one only within rounding


def warp_masks(masks: Tensor, maps: Tensor) -> Tensor:
    """Masks (B, 1, S, S) of zeros and ones through ``maps``, each pixel from its nearest; outside is empty."""
    warped: Tensor = warp_affine(masks, maps.to(masks), masks.shape[-2:], mode="nearest", padding_mode="zeros")
    return warped

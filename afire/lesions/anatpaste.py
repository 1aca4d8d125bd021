"""AnatPaste (Sato et al. 2023), the augmentation of the paper's ablation: one patch, blended into the lung field.

Shapes: B films of H x W with C channels, V views, N = B * V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afire.config import LesionConfig
from afire.lesions.places import Draw, PixelPicker, lung_depth, place_windows, scaled, unit

_FLAT_SHARE = 0.5  # of the radius; from there the patch fades out to its edge


def paste(
    images_BCHW: Tensor, gray_BHW: Tensor, highlighted: PixelPicker, draws_BVSD: Tensor, config: LesionConfig
) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) with one patch each, and the share of the patch in each pixel, (N, 1, H, W).

    The patch is cut around a highlighted pixel, keeps its size, and is pasted around a lung pixel:
    ``x' = x + share * (patch - x)``, with a share that fades out towards the patch's and the lungs' edges.
    """
    films, views = draws_BVSD.shape[:2]
    height, width = gray_BHW.shape[1:]
    draws = draws_BVSD[:, :, 0].unbind(2)  # one lesion for each view: the first slot's draws
    side = scaled(config.paste_size, height, width)
    box_width, box_height = min(side, width), min(side, height)
    depth_BHW = lung_depth(gray_BHW)
    column, row = PixelPicker(depth_BHW > 0).pick(draws[Draw.LUNG])
    left = (column - box_width // 2).clamp(0, width - box_width).flatten()
    top = (row - box_height // 2).clamp(0, height - box_height).flatten()
    from_left, from_top = place_windows(highlighted, draws, (box_width, box_height))

    device = gray_BHW.device
    samples = torch.arange(films * views, device=device)[:, None, None]
    film = samples // views
    across, down = (
        torch.arange(box_width, device=device)[None, None, :],
        torch.arange(box_height, device=device)[None, :, None],
    )
    to_x, to_y = left[:, None, None] + across, top[:, None, None] + down
    patch = gray_BHW[film, from_top.flatten()[:, None, None] + down, from_left.flatten()[:, None, None] + across]
    amplitude = config.amplitude_min + unit(draws[Draw.AMPLITUDE]) * (config.amplitude_max - config.amplitude_min)
    share = amplitude.flatten()[:, None, None] * _fading(box_height, box_width, device) * depth_BHW[film, to_y, to_x]

    mask = torch.zeros(films * views, height, width, device=device)
    mask[samples, to_y, to_x] = share
    lesioned = images_BCHW.repeat_interleave(views, 0).permute(0, 2, 3, 1)  # a view: pixels first, channels last
    under = lesioned[samples, to_y, to_x]
    lesioned[samples, to_y, to_x] = under + share[..., None] * (patch[..., None] - under)
    return lesioned.permute(0, 3, 1, 2), mask[:, None]


def _fading(height: int, width: int, device: torch.device) -> Tensor:
    """1 in the middle of the box, a cosine slope outside, 0 from the inscribed oval on; (h, w)."""
    v = (torch.arange(height, device=device) + 0.5) * (2 / height) - 1
    u = (torch.arange(width, device=device) + 0.5) * (2 / width) - 1
    radius = (u[None, :].square() + v[:, None].square()).sqrt()
    slope = ((radius - _FLAT_SHARE) / (1 - _FLAT_SHARE)).clamp(0, 1)
    return 0.5 + 0.5 * (slope * torch.pi).cos()

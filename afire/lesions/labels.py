"""Which tokens are abnormal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def token_labels(mask: Tensor, patch_size: int) -> Tensor:
    """True (abnormal) where a patch's mean of the mask exceeds the mask's mean over the image.

    mask (B, 1, H, W) >= 0 -> bool (B, L), patches row by row as the patch embedding flattens them. A mask of zeros,
    or of one value everywhere, has no abnormal token.
    """
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise ValueError(f"mask must have shape (B, 1, H, W), got {tuple(mask.shape)}.")
    height, width = mask.shape[-2:]
    if height % patch_size or width % patch_size:
        raise ValueError(f"the mask's {height} x {width} pixels are not a multiple of patch_size {patch_size}.")
    patches = functional.avg_pool2d(mask.to(torch.float32), patch_size).flatten(1)
    # In float64 the mean of equal patches is exactly their value; in float32 rounding could make it a little less.
    exact = patches if patches.device.type == "mps" else patches.to(torch.float64)
    return exact > exact.mean(1, keepdim=True)

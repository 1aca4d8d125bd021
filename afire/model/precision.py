"""Losses and assignments are computed in float32 even when the networks run in bfloat16 or float16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """``with full_precision(x):`` switches autocast off on the device of ``x``."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))

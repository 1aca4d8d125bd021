"""Small convolutional networks: an encoder that halves a film step by step, and a decoder that doubles it back.

Group normalisation, not batch normalisation: a film's result then depends on no other film, so that a batch in pieces
or on several processes gives what the whole batch gives. Doubling is nearest-neighbour and a convolution: transposed
convolutions leave a checkerboard, which an error map would show.

Shapes: B images, C channels, S x S pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_GROUPS = 8
SLOPE = 0.2  # of the leaky rectifier


def norm(channels: int) -> nn.GroupNorm:
    """In groups of equally many channels, eight of them where that is possible."""
    groups = next(count for count in range(min(_GROUPS, channels), 0, -1) if channels % count == 0)
    return nn.GroupNorm(groups, channels)


class Stage(nn.Sequential):
    """A 3 x 3 convolution, normalised and rectified; ``stride`` 2 halves the picture."""

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, 3, stride, padding=1), norm(channels_out), nn.LeakyReLU(SLOPE)
        )


class ConvEncoder(nn.Module):
    """(B, C, S, S) -> (B, widths[-1], S / 2^n, S / 2^n), where n is the number of widths."""

    def __init__(self, channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(before, after, stride=2) for before, after in pairwise([channels, *widths])])

    def forward(self, images: Tensor) -> Tensor:
        return self.levels(images)[-1]

    def levels(self, images: Tensor) -> list[Tensor]:
        """What each stage gives, the finest first."""
        levels, features = [], images
        for stage in self.stages:
            features = stage(features)
            levels.append(features)
        return levels


class ConvDecoder(nn.Module):
    """(B, widths[-1], s, s) -> (B, channels, s * 2^n, s * 2^n): the way back of a :class:`ConvEncoder`."""

    def __init__(self, channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        back = list(reversed(widths))
        self.stages = nn.ModuleList([Stage(before, after) for before, after in pairwise([*back, back[-1]])])
        self.last = nn.Conv2d(back[-1], channels, 3, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        for stage in self.stages:
            features = stage(doubled(features))
        drawn: Tensor = self.last(features)
        return drawn


def doubled(features: Tensor) -> Tensor:
    """Twice as many rows and columns, each value repeated."""
    return F.interpolate(features, scale_factor=2.0, mode="nearest")


def shrunk(images: Tensor, side: int) -> Tensor:
    """Images of at most ``side`` pixels: smaller ones stay as they are."""
    if images.shape[-1] <= side:
        return images
    return F.interpolate(images, size=(side, side), mode="area")


def initialise_conv(module: nn.Module, generator: torch.Generator) -> None:
    """He-normal kernels and matrices, zero biases, in place."""
    gain = nn.init.calculate_gain("leaky_relu", SLOPE)
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv2d):
            fan_in = part.weight[0].numel()
            nn.init.normal_(part.weight, std=gain / fan_in**0.5, generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)

"""An adversary: a small convolutional network that tells drawings from films, and what both sides minimise.

It says a number for every region of a picture, as PatchGAN does (Isola et al. 2017), because what a decoder draws is
given away by its texture. The two losses are those of the first GAN paper, the drawing side in its form that does not
saturate (Goodfellow et al. 2014).

Shapes: B pictures of C channels and S x S pixels, R regions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afire.nn.conv import ConvEncoder, initialise_conv
from afire.nn.vit import at_least_float32


class Adversary(nn.Module):
    """Pictures (B, C, S, S) -> logits (B, R), large where a region looks like a film."""

    def __init__(self, channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.stages = ConvEncoder(channels, widths)
        self.say = nn.Conv2d(widths[-1], 1, 3, padding=1)

    def initialise(self, generator: torch.Generator) -> None:
        """He-normal kernels."""
        initialise_conv(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        said: Tensor = self.say(self.stages(images))
        return said.flatten(1)


def telling_loss(real: Tensor, fake: Tensor) -> Tensor:
    """What the adversary minimises, from its logits of films and of drawings: cross-entropy, a mean of each."""
    return F.softplus(-at_least_float32(real)).mean() + F.softplus(at_least_float32(fake)).mean()


def deceiving_loss(fake: Tensor) -> Tensor:
    """What the drawing side minimises, from the adversary's logits of drawings."""
    return F.softplus(-at_least_float32(fake)).mean()

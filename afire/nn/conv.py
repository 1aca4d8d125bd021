"""Small convolutional networks: an encoder that halves a film step by step, a decoder that doubles it back, a residual
encoder for networks that look and do not draw, with a head that gives numbers at every place, and an adversary.

Group normalisation, not batch normalisation: a film's result then depends on no other film, so that a batch in pieces
or on several processes gives what the whole batch gives. Doubling is nearest-neighbour and a convolution: transposed
convolutions leave a checkerboard, which an error map would show.

The adversary tells drawn pictures from films. It gives a logit for every region of a picture, as PatchGAN does (Isola
et al. 2017), because texture gives away what a decoder draws. The two losses are those of the first GAN paper, the
drawing side in its form that does not saturate (Goodfellow et al. 2014).

Shapes: B images, C channels, S x S pixels, R regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afire.nn.vit import at_least_float32

_GROUPS = 8
SLOPE = 0.2  # of the leaky rectifier
_FLAT = 1e-3  # deviation of an image that has hardly any


def norm(channels: int, groups: int = _GROUPS) -> nn.GroupNorm:
    """In ``groups`` of equally many channels, or in the largest smaller number that divides them."""
    most = next(count for count in range(min(groups, channels), 0, -1) if channels % count == 0)
    return nn.GroupNorm(most, channels)


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
        return self.draw(self.levels(features))

    def levels(self, features: Tensor) -> list[Tensor]:
        """What each stage gives, the coarsest first."""
        levels = []
        for stage in self.stages:
            features = stage(doubled(features))
            levels.append(features)
        return levels

    def draw(self, levels: Sequence[Tensor]) -> Tensor:
        """The picture that the last of the ``levels`` makes."""
        drawn: Tensor = self.last(levels[-1])
        return drawn


class CodeEncoder(nn.Module):
    """(B, channels, side, side) -> (B, numbers): a :class:`ConvEncoder`, and a matrix that reads its last features.

    With one number it is a critic or a discriminator.
    """

    def __init__(self, channels: int, widths: Sequence[int], side: int, numbers: int) -> None:
        super().__init__()
        self.stages = ConvEncoder(channels, widths)
        self.read = nn.Linear(widths[-1] * (side // 2 ** len(widths)) ** 2, numbers)

    def forward(self, images: Tensor) -> Tensor:
        code: Tensor = self.read(self.features(images))
        return code

    def features(self, images: Tensor) -> Tensor:
        """What the matrix reads: (B, F)."""
        features: Tensor = self.stages(images)
        return features.flatten(1)


class CodeDecoder(nn.Module):
    """(B, numbers) -> (B, channels, side, side) in [-1, 1]: the way back of a :class:`CodeEncoder`."""

    def __init__(self, channels: int, widths: Sequence[int], side: int, numbers: int) -> None:
        super().__init__()
        inner = side // 2 ** len(widths)
        self.shape = (widths[-1], inner, inner)
        self.write = nn.Linear(numbers, widths[-1] * inner**2)
        self.stages = ConvDecoder(channels, widths)

    def forward(self, code: Tensor) -> Tensor:
        drawn: Tensor = self.stages(self.write(code).view(-1, *self.shape))
        return drawn.tanh()


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions, added to what came in."""

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.first = Stage(channels_in, channels_out, stride)
        self.second = nn.Sequential(nn.Conv2d(channels_out, channels_out, 3, padding=1), norm(channels_out))
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride)

    def forward(self, features: Tensor) -> Tensor:
        return F.leaky_relu(self.second(self.first(features)) + self.shortcut(features), SLOPE)


class ResidualEncoder(nn.Module):
    """A stem that halves the film, then stages of ``blocks`` residual blocks, each with its width and its stride."""

    def __init__(self, channels: int, widths: Sequence[int], strides: Sequence[int], blocks: int) -> None:
        super().__init__()
        self.stem = Stage(channels, widths[0], stride=2)
        self.stages = nn.ModuleList()
        for (before, after), stride in zip(pairwise([widths[0], *widths]), strides, strict=True):
            more = [ResidualBlock(after, after) for _ in range(blocks - 1)]
            self.stages.append(nn.Sequential(ResidualBlock(before, after, stride), *more))

    def forward(self, images: Tensor) -> Tensor:
        return self.levels(images)[-1]

    def levels(self, images: Tensor) -> list[Tensor]:
        """What each stage gives, the finest first."""
        levels, features = [], self.stem(images)
        for stage in self.stages:
            features = stage(features)
            levels.append(features)
        return levels


class DenseHead(nn.Module):
    """Levels of an encoder, each half as fine as the one before -> ``channels`` numbers at each place of the finest.

    From the coarsest on, a level is doubled and added to the next finer one: places know what surrounds them.
    """

    def __init__(self, channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        back = list(reversed(widths))
        self.narrow = nn.ModuleList([nn.Conv2d(before, after, 1) for before, after in pairwise(back)])
        self.merge = nn.ModuleList([Stage(after, after) for after in back[1:]])
        self.last = nn.Conv2d(back[-1], channels, 1)

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        *finer, features = levels
        for narrow, merge, level in zip(self.narrow, self.merge, reversed(finer), strict=True):
            features = merge(doubled(narrow(features)) + level)
        values: Tensor = self.last(features)
        return values


def doubled(features: Tensor) -> Tensor:
    """Twice as many rows and columns, each value repeated."""
    return F.interpolate(features, scale_factor=2.0, mode="nearest")


def shrunk(images: Tensor, side: int) -> Tensor:
    """Images of at most ``side`` pixels: smaller ones stay as they are."""
    if images.shape[-1] <= side:
        return images
    return F.interpolate(images, size=(side, side), mode="area")


def standardised(images: Tensor) -> Tensor:
    """Each image by its own mean and deviation: exposure and contrast do not count."""
    centred = images - images.mean(dim=(-2, -1), keepdim=True)
    return centred / centred.square().mean(dim=(-2, -1), keepdim=True).sqrt().clamp_min(_FLAT)


def initialise_conv(module: nn.Module, generator: torch.Generator) -> None:
    """He-normal kernels and matrices, zero biases, in place."""
    gain = nn.init.calculate_gain("leaky_relu", SLOPE)
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            fan_in = layer.weight[0].numel()
            nn.init.normal_(layer.weight, std=gain / fan_in**0.5, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


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
        logits: Tensor = self.say(self.stages(images))
        return logits.flatten(1)


def telling_loss(real: Tensor, fake: Tensor) -> Tensor:
    """What the adversary minimises, from its logits of films and of drawings: cross-entropy, a mean of each."""
    return F.softplus(-at_least_float32(real)).mean() + F.softplus(at_least_float32(fake)).mean()


def deceiving_loss(fake: Tensor) -> Tensor:
    """What the drawing side minimises, from the adversary's logits of drawings."""
    return F.softplus(-at_least_float32(fake)).mean()

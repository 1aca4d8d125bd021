"""A light segmentation decoder on the tokens of several depths of a ViT.

The deepest tokens are a coarse map; every stage doubles its sides with an up-convolution and adds what a shallower
depth says about the same places. Nothing but tokens is read, so that the masks measure the representation and not a
second network on pixels. Shapes: B films, G x G tokens, D width of the encoder, w width of a stage, S pixels a side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afire.errors import UserError
from afire.model.pixels import Normalise
from afire.model.vit import VisionTransformer, grid_of, initialise
from afire.task_config import SegDecoderConfig

_SMALLEST_WIDTH = 16
_EPSILON = 1e-6


class Reading(nn.Module):
    """Tokens (B, 1 + L, D) of one depth to a map (B, w, G, G)."""

    def __init__(self, tokens: int, width: int, normalised: bool) -> None:
        super().__init__()
        self.norm = nn.Identity() if normalised else nn.LayerNorm(tokens, eps=_EPSILON)
        self.project = nn.Linear(tokens, width)

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        found: Tensor = self.project(self.norm(tokens[:, 1:]))
        return found.transpose(1, 2).reshape(len(tokens), -1, *grid)


class Stage(nn.Module):
    """A map (B, w, G, G) to twice its sides, (B, w', 2G, 2G), with a shallower map added where there is one."""

    def __init__(self, width: int, new: int) -> None:
        super().__init__()
        # A 2 x 2 up-convolution of stride 2, written as what it is: a linear map of each place to four.
        self.up = nn.Conv2d(width, 4 * new, kernel_size=1)
        self.norm = nn.GroupNorm(math.gcd(new, 8), new)
        self.mix = nn.Conv2d(new, new, kernel_size=3, padding=1)

    def forward(self, coarse: Tensor, shallower: Tensor | None) -> Tensor:
        fine = F.pixel_shuffle(self.up(coarse), 2)
        if shallower is not None:
            fine = fine + F.interpolate(shallower, fine.shape[-2:], mode="bilinear", align_corners=False)
        mixed: Tensor = self.mix(F.gelu(self.norm(fine)))
        return fine + mixed


class SegDecoder(nn.Module):
    """Tokens of several depths, the shallowest first, to logits (B, 1, S, S)."""

    def __init__(self, tokens: int, patch_size: int, config: SegDecoderConfig, levels: int) -> None:
        super().__init__()
        doublings = _doublings(patch_size, config.finest)
        widths = [max(config.width >> number, min(_SMALLEST_WIDTH, config.width)) for number in range(doublings + 1)]
        self.deepest = Reading(tokens, widths[0], normalised=True)
        # Depths beyond the number of stages are read at the coarse end, so that none is read in vain.
        self.readings = nn.ModuleList(
            Reading(tokens, widths[min(number + 1, doublings)], normalised=False) for number in range(levels - 1)
        )
        self.stages = nn.ModuleList(Stage(width, new) for width, new in pairwise(widths))
        self.logits = nn.Conv2d(widths[-1], 1, kernel_size=1)

    def forward(self, levels: Sequence[Tensor], grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
        """Tokens (B, 1 + L, D) of each depth -> logits of the mask at ``size``."""
        shallower = [reading(level, grid) for reading, level in zip(self.readings, levels[-2::-1], strict=True)]
        picture = self.deepest(levels[-1], grid)
        for number, stage in enumerate(self.stages):
            last = number == len(self.stages) - 1
            here = shallower[number:] if last else shallower[number : number + 1]
            picture = stage(picture, torch.stack(here).sum(0) if here else None)
        logits: Tensor = self.logits(picture)
        return F.interpolate(logits, size, mode="bilinear", align_corners=False)


class Segmenter(nn.Module):
    """Films (B, 1, S, S) in [0,1] -> logits (B, 1, S, S)."""

    def __init__(
        self,
        encoder: VisionTransformer,
        normalise: Normalise,
        config: SegDecoderConfig,
        prior: float,
        generator: torch.Generator,
    ) -> None:
        """``prior`` is the share of pixels that lie inside: the last layer starts there."""
        super().__init__()
        self.encoder, self.normalise = encoder, normalise
        self.after = depths(len(encoder.blocks), config.levels)
        self.decoder = SegDecoder(encoder.width, encoder.patch_size, config, len(self.after))
        initialise(self.decoder, generator)
        nn.init.constant_(self.decoder.logits.bias, float(torch.logit(torch.tensor(prior), eps=1e-4)))  # type: ignore[arg-type]

    def forward(self, films: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Films (B, 1, H, W) in [0, 1] -> logits of the mask at their size."""
        levels = self.encoder.levels(self.normalise(films), self.after, generator)
        height, width = films.shape[-2:]
        logits: Tensor = self.decoder(levels, grid_of(height, width, self.encoder.patch_size), (height, width))
        return logits


def depths(blocks: int, levels: int) -> list[int]:
    """After how many blocks tokens are read: evenly spaced, the last included; no depth twice."""
    return sorted({max(1, round(blocks * number / levels)) for number in range(1, levels + 1)})


def _doublings(patch_size: int, finest: int) -> int:
    """How often the sides are doubled; at least once, so that there is a stage."""
    if patch_size <= finest:
        raise UserError(
            f"decoder.finest {finest} is not finer than the encoder's patches of {patch_size} px; choose a smaller one."
        )
    return max(1, round(math.log2(patch_size / finest)))

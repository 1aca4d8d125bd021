"""A residual convolutional trunk: the network inside the detector `taught`, as an encoder for other tasks.

It gives tokens as a vision transformer does, so that probes, fine-tuning, segmentation, PatchCore and figures take
either. A token describes 8 x 8 pixels by the features of all stages at that place, the coarser stages repeated. The
mean of the tokens is therefore the mean of every stage, and where a class token would be stands the maximum of each
feature. :func:`make_trunk` builds whichever trunk the settings describe.

Shapes: B images, H x W pixels, w channels of the stem, L = (H/8) * (W/8) tokens, D = 14 w width of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afire.config import Config, EncoderConfig, ImageConfig
from afire.nn.conv import ResidualBlock, Stage, initialise_conv, standardised
from afire.nn.vit import Grid, VisionTransformer, grid_of, initialise

PATCH = 8  # pixels a side of the finest stage's places
WIDTHS = (2, 4, 8)  # channels of the stages, in multiples of the stem's
_STEM = "stem.1.0.weight"  # the first kernels
_FOLD = 4  # the stem takes squares of 4 x 4 pixels as channels


class ResidualStages(nn.Module):
    """A stem that takes squares of pixels as channels, and three stages that each halve the sides."""

    def __init__(self, stem_width: int, blocks: int) -> None:
        """``blocks`` residual blocks in each of the first two stages, and one in the third."""
        super().__init__()
        widths = [stem_width * times for times in WIDTHS]
        self.stage_widths = widths
        self.stem = nn.Sequential(nn.PixelUnshuffle(_FOLD), Stage(_FOLD**2, stem_width))
        self.stages = nn.ModuleList()
        for (before, after), count in zip(pairwise([stem_width, *widths]), (blocks, blocks, 1), strict=True):
            more = [ResidualBlock(after, after) for _ in range(count - 1)]
            self.stages.append(nn.Sequential(ResidualBlock(before, after, 2), *more))

    def maps(self, standard: Tensor) -> list[Tensor]:
        """Standardised images (B, 1, H, W) -> what each stage gives, the finest first."""
        features, maps = self.stem(standard), []
        for stage in self.stages:
            features = stage(features)
            maps.append(features)
        return maps


class ResidualTrunk(ResidualStages):
    """Images (B, 1, H, W) in [0, 1] -> tokens (B, 1 + L, D), the maxima of all features first."""

    patch_size = PATCH
    drop_path = 0.0  # as in a ViT, but there are no branches to drop

    def __init__(self, stem_width: int, blocks: int, image_size: int = 128) -> None:
        super().__init__(stem_width, blocks)
        self.width = sum(self.stage_widths)
        self.grid: Grid = grid_of(image_size, image_size, PATCH)

    @classmethod
    def from_config(cls, encoder: EncoderConfig, image: ImageConfig) -> ResidualTrunk:
        """The trunk that the settings describe, not yet initialised."""
        return cls(encoder.width // sum(WIDTHS), (encoder.depth - 1) // 2, image.size)

    @property
    def blocks(self) -> nn.ModuleList:
        """What counts as its depth: the stages."""
        return self.stages

    def forward(self, images: Tensor, depth: Tensor | None = None) -> Tensor:
        """Any image size that 8 divides. ``depth``, the draws of stochastic depth, changes nothing here."""
        return self.levels(images, [len(self.stages)], depth)[0]

    def levels(self, images: Tensor, after: Sequence[int], depth: Tensor | None = None) -> list[Tensor]:
        """Tokens (B, 1 + L, D) after the given numbers of stages, rising; later stages are zero in them."""
        grid_of(images.shape[-2], images.shape[-1], PATCH)  # refuses other sizes
        maps = self.maps(standardised(images[:, :1]))
        return [self._tokens(maps[:last]) for last in after]

    def _tokens(self, maps: Sequence[Tensor]) -> Tensor:
        side = maps[0].shape[-2:]
        missing = self.width - sum(self.stage_widths[: len(maps)])
        fine = torch.cat([F.interpolate(features, size=side, mode="nearest") for features in maps], dim=1)
        places = F.pad(fine.flatten(2).transpose(1, 2), (0, missing))
        return torch.cat([places.amax(dim=1, keepdim=True), places], dim=1)


def residual_tensors(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those of a residual trunk among ``tensors`` whose names begin with ``prefix``; none where there is no trunk."""
    named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    trunk = {name: tensor for name, tensor in named.items() if name.startswith(("stem.", "stages."))}
    return trunk if _STEM in trunk else {}


def residual_settings(tensors: Mapping[str, Tensor]) -> EncoderConfig:
    """What the tensors of a residual trunk say about it."""
    blocks = {name.split(".")[2] for name in tensors if name.startswith("stages.0.")}
    width = sum(WIDTHS) * tensors[_STEM].shape[0]
    return EncoderConfig(kind="residual", width=width, depth=2 * len(blocks) + 1, heads=1, patch_size=PATCH)


def residual_config(config: Config, tensors: Mapping[str, Tensor]) -> Config:
    """``config`` with what describes these tensors as an encoder. The network standardises films itself."""
    image = config.image.model_copy(update={"normalise": "none", "channels": 1})
    return config.model_copy(update={"encoder": residual_settings(tensors), "image": image})


Trunk = VisionTransformer | ResidualTrunk


def make_trunk(encoder: EncoderConfig, image: ImageConfig) -> Trunk:
    """The encoder that the settings describe, not yet initialised."""
    kind = ResidualTrunk if encoder.kind == "residual" else VisionTransformer
    return kind.from_config(encoder, image)


def initialise_trunk(trunk: Trunk, generator: torch.Generator) -> None:
    """Random weights as training starts from them, in place."""
    (initialise_conv if isinstance(trunk, ResidualTrunk) else initialise)(trunk, generator)

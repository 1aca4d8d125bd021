"""FAE: an autoencoder of a trunk's features, trained for structure rather than for exact values.

After the paper (Meissen et al., "Unsupervised Anomaly Localization with Structural Feature-Autoencoders",
BrainLes 2022). Features of several depths of a frozen, pre-trained network are laid over each other as the channels of
one picture, and an autoencoder learns to draw that picture of normal films. The two are compared by structural
similarity (SSIM): of a small window around each place, in mean, contrast and pattern, channel by channel. Where a
finding is, the structure comes back wrong. The map is one minus the similarity, mean over the channels; a film's score
is the mean of the highest tenth of its map, as in the authors' code.

Ours: tokens of a vision transformer after a quarter and a half of its blocks in place of layers 1 and 2 of a ResNet-18.
They are standardised by normal films and shifted so that these lie between 0 and 1: SSIM is meant for pictures without
negative numbers, as a ResNet's features are. The picture is coarse; it is halved until two places a side are left, and
not always four times. Group in place of batch normalisation, nearest-neighbour doubling in place of transposed
convolutions, kernels of 3 x 3, no dropout. At the edge a window ends with the picture; the authors' goes on in zeros.

Shapes: B films, C channels, H x W places, L = H * W.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from afire.config import Config
from afire.detect.learned import Examined, LearnedConfig, LevelLearner, LevelSettings, OnTrunk, TrainConfig
from afire.errors import UserError
from afire.methods.base import ALL, Losses, Outputs, Views
from afire.nn import distributed
from afire.nn.conv import Stage, initialise_conv
from afire.nn.vit import Grid, at_least_float32, full_precision

SCORE = "structure_peak"
_HIGHEST = 0.1  # share of the map that makes a film's score
_REACH = 3.0  # sd to either side that are between black and white
_SIGMA = 1.5  # of SSIM's window, in places
_MEAN_FLOOR, _SPREAD_FLOOR = 0.01**2, 0.03**2  # SSIM's C1 and C2
_INNERMOST = 2  # places a side that the autoencoder squeezes a film to
_AUTOENCODER = 0xFAE  # keeps its first weights apart from those of a random trunk


class FAESettings(LevelSettings):
    """The autoencoder and the similarity that it is judged by."""

    blocks: list[int] = Field(
        [], description="tokens after these blocks of the trunk are the features; empty = after 1/4 and 1/2 of them"
    )
    widths: list[int] = Field(
        [100, 150, 200, 300],
        min_length=1,
        description="channels after each halving; where fewer halvings are possible, the last ones count",
    )
    window: int = Field(5, ge=1, le=31, description="side of the similarity's window, in places; odd")


class FAEConfig(LearnedConfig):
    """All settings of fitting the detector `fae`."""

    score: str = Field(SCORE, description="a score, several joined by +, or auto: chosen on held-out normals")
    train: TrainConfig = Field(
        TrainConfig(epochs=80, batch_size=64, learning_rate=2e-4, learning_rate_end=2e-4, clip=0),
        description="as published, where 8,000 films fit: 10,000 updates",
    )
    fae: FAESettings = Field(default_factory=FAESettings)


def blur_matrix(size: int, window: int) -> Tensor:
    """(size, size): each row the Gaussian weights of a window around its place, cut at the edge, adding up to one."""
    places = torch.arange(size, dtype=torch.float64)
    apart = places[:, None] - places
    weights = torch.exp(-apart.square() / (2 * _SIGMA**2)) * (apart.abs() <= window // 2)
    return (weights / weights.sum(dim=1, keepdim=True)).float()


class Similarity(nn.Module):
    """Structural similarity (B, C, H, W) of two pictures (B, C, H, W), at most 1 and there only where they agree.

    The window is Gaussian and so the product of one along rows and one along columns: two small matrix products.
    """

    along_rows: Tensor
    along_columns: Tensor

    def __init__(self, grid: Grid, window: int) -> None:
        super().__init__()
        if window % 2 == 0:
            raise UserError(f"fae.window {window} has no middle; use an odd number such as 5.")
        self.register_buffer("along_rows", blur_matrix(grid[0], window), persistent=False)
        self.register_buffer("along_columns", blur_matrix(grid[1], window), persistent=False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        mean1, mean2 = self._blurred(first), self._blurred(second)
        variance1 = (self._blurred(first.square()) - mean1.square()).clamp_min(0)
        variance2 = (self._blurred(second.square()) - mean2.square()).clamp_min(0)
        covariance = self._blurred(first * second) - mean1 * mean2
        numerator = (2 * mean1 * mean2 + _MEAN_FLOOR) * (2 * covariance + _SPREAD_FLOOR)
        denominator = (mean1.square() + mean2.square() + _MEAN_FLOOR) * (variance1 + variance2 + _SPREAD_FLOOR)
        return numerator / denominator

    def _blurred(self, pictures: Tensor) -> Tensor:
        return self.along_rows.to(pictures) @ pictures @ self.along_columns.to(pictures).T


def as_grey(features: Tensor) -> Tensor:
    """Features in sd of normal films -> numbers that lie between 0 and 1 for nearly all normal films."""
    return at_least_float32(features) / (2 * _REACH) + 0.5


def sides_of(side: int, halvings: int) -> list[int]:
    """The sides of a picture that is halved, rounding up, at most ``halvings`` times and to no less than two places."""
    sides = [side]
    while len(sides) <= halvings and sides[-1] > _INNERMOST:
        sides.append(math.ceil(sides[-1] / 2))
    return sides


class Autoencoder(nn.Module):
    """Pictures (B, C, H, W) of features, squeezed step by step and drawn again."""

    def __init__(self, channels: int, grid: Grid, widths: Sequence[int]) -> None:
        super().__init__()
        self.sides = sides_of(grid[0], len(widths))
        halvings = len(self.sides) - 1
        if halvings == 0:
            raise UserError(
                f"fae squeezes the trunk's {grid[0]} x {grid[1]} places to fewer, and there are too few of them; use "
                "larger films or smaller patches."
            )
        inner_widths = list(widths)[-halvings:]
        self.down = nn.ModuleList(
            [Stage(width_in, width_out, stride=2) for width_in, width_out in pairwise([channels, *inner_widths])]
        )
        back = [*reversed(inner_widths), inner_widths[0]]
        self.up = nn.ModuleList([Stage(width_in, width_out) for width_in, width_out in pairwise(back)])
        self.last = nn.Conv2d(back[-1], channels, 1)

    def forward(self, features: Tensor) -> Tensor:
        for stage in self.down:
            features = stage(features)
        for side, stage in zip(reversed(self.sides[:-1]), self.up, strict=True):
            features = stage(F.interpolate(features, size=(side, side), mode="nearest"))
        drawing: Tensor = self.last(features)
        return drawing


class FeatureAutoencoder(LevelLearner):
    """A frozen trunk and an autoencoder of its tokens."""

    settings_type = FAESettings
    usual = (1 / 4, 1 / 2)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(self.options, FAESettings)
        channels = len(self.after) * self.trunk.width
        self.autoencoder = Autoencoder(channels, self.trunk.grid, self.options.widths)
        self.similarity = Similarity(self.trunk.grid, self.options.window)
        initialise_conv(self.autoencoder, torch.Generator().manual_seed(config.seed ^ _AUTOENCODER))

    def forward(self, views: Views) -> Outputs:
        features = self.features(views["images"])
        return {"features": features, "drawn": self.autoencoder(features)}

    def features(self, images: Tensor) -> Tensor:
        """Films (B, ., S, S) in [0, 1] -> their picture (B, C, H, W), the depths of the trunk as its channels."""
        tokens_BPLD = self.tokens(images)
        return tokens_BPLD.permute(0, 1, 3, 2).reshape(images.shape[0], -1, *self.trunk.grid)

    def dissimilarity(self, features: Tensor, drawing: Tensor) -> Tensor:
        """One minus the structural similarity, mean over the channels (B, L)."""
        with full_precision(drawing):
            similarity: Tensor = self.similarity(as_grey(features), as_grey(drawing))
        return 1 - similarity.mean(dim=1).flatten(1)

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        loss = self.dissimilarity(outputs["features"], outputs["drawn"]).mean()
        loss = distributed.with_global_value(loss)
        return Losses({"structure": loss}, loss)


class FAE(OnTrunk):
    """A structural autoencoder of features."""

    method = "fae"
    Settings = FAEConfig
    Networks = FeatureAutoencoder
    published = "ResNet-18, 128 px, 10,000 updates of 64 (80 epochs of 8,000 films)"
    published_epochs = 80
    meanings: ClassVar[Mapping[str, str]] = {
        SCORE: "structural dissimilarity of features to those drawn, mean of the highest tenth of the film",
        "structure": "the same, mean over the film",
    }
    model: FeatureAutoencoder

    def examine(self, images: Tensor, restore: bool) -> Examined:
        features = self.model.features(images)
        map_BL = self.model.dissimilarity(features, self.model.autoencoder(features))
        highest = math.ceil(_HIGHEST * map_BL.shape[1])
        peak = map_BL.topk(highest, dim=1).values.mean(dim=1)
        return Examined({SCORE: peak, "structure": map_BL.mean(dim=1)}, map_BL)

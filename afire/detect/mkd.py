"""MKD: a small network that learnt to imitate a large one on normal films; elsewhere the two disagree.

After the paper (Salehi et al., "Multiresolution Knowledge Distillation for Anomaly Detection", CVPR 2021). A
frozen, pre-trained source network and a smaller cloner look at the same film. At several critical layers the cloner
has to give what the source gives, in value (squared difference) and in direction (one minus the cosine of the whole
layer). It is trained on normal films only, and fails on anything else. A film's score is the loss that is left.

Ours: a vision transformer in place of VGG-16, with the tokens after each quarter of its blocks in place of the last
layers of its convolutional blocks. The cloner is a transformer of half the width with one block to each critical
layer, and a linear map from its tokens to the source's. Tokens are in sd of
normal films. The map is the loss of each place; the paper takes the gradient of the loss by the pixels.

Shapes: B films, P critical layers, L positions, D width of the source's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from afire.config import Config
from afire.detect.learned import Examined, LearnedConfig, LevelLearner, LevelSettings, OnTrunk, TrainConfig
from afire.methods.base import ALL, AllFilms, Losses, Outputs, Views
from afire.nn import distributed
from afire.nn.vit import VisionTransformer, at_least_float32, full_precision, initialise

SCORE = "discrepancy"
_CLONER = 0xC10  # keeps the cloner's first weights apart from those of a random source
_NOTHING = 1e-12


class MKDSettings(LevelSettings):
    """The cloner, and what it has to imitate."""

    blocks: list[int] = Field(
        [], description="the critical layers: tokens after these blocks of the trunk; empty = after each quarter"
    )
    width: float = Field(0.5, gt=0, le=1, description="width of the cloner, as a share of the trunk's")
    direction: float | None = Field(
        None, ge=0, description="weight of the direction; null: both losses weigh the same before the first update"
    )


class MKDConfig(LearnedConfig):
    """All settings of fitting the detector `mkd`."""

    score: str = Field(SCORE, description="a score, several joined by +, or auto: chosen on held-out normals")
    train: TrainConfig = Field(
        TrainConfig(epochs=200, batch_size=64, learning_rate=1e-3, learning_rate_end=1e-3, clip=0),
        description="as published",
    )
    mkd: MKDSettings = Field(default_factory=MKDSettings)


def value_errors(source_BPLD: Tensor, cloned_BPLD: Tensor) -> Tensor:
    """Squared difference of each token (B, L), mean over its numbers, summed over the critical layers."""
    return (source_BPLD - cloned_BPLD).square().mean(dim=-1).sum(dim=1)


def direction_errors(source_BPLD: Tensor, cloned_BPLD: Tensor) -> Tensor:
    """One minus the cosine of each whole layer, summed over the critical layers (B,)."""
    cosines_BP = F.cosine_similarity(source_BPLD.flatten(2), cloned_BPLD.flatten(2), dim=-1)
    return (1 - cosines_BP).sum(dim=1)


def place_directions(source_BPLD: Tensor, cloned_BPLD: Tensor) -> Tensor:
    """The same of each token by itself (B, L)."""
    return (1 - F.cosine_similarity(source_BPLD, cloned_BPLD, dim=-1)).sum(dim=1)


class Cloner(nn.Module):
    """A small transformer that gives tokens (B, P, L, D) like those of the source at its critical layers."""

    def __init__(self, config: Config, layers: int, share: float) -> None:
        super().__init__()
        source, image = config.encoder, config.image
        unit = math.lcm(4, source.heads)  # sin-cos positions come in fours, and every head is equally wide
        width = unit * max(1, round(share * source.width / unit))
        self.encoder = VisionTransformer(image.size, source.patch_size, image.channels, width, layers, source.heads)
        self.answers = nn.ModuleList(nn.Linear(width, source.width) for _ in range(layers))

    def forward(self, normalised: Tensor) -> Tensor:
        levels = self.encoder.levels(normalised, range(1, len(self.answers) + 1))
        return torch.stack(
            [projection(level[:, 1:]) for projection, level in zip(self.answers, levels, strict=True)], dim=1
        )


class SourceAndCloner(LevelLearner):
    """The frozen source and the cloner that imitates it."""

    settings_type = MKDSettings
    usual = (1 / 4, 1 / 2, 3 / 4, 1)
    weight: Tensor  # of the direction, the paper's lambda

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(self.options, MKDSettings)
        self.cloner = Cloner(config, len(self.after), self.options.width)
        initialise(self.cloner, torch.Generator().manual_seed(config.seed ^ _CLONER))
        direction = self.options.direction
        self.balances = direction is None
        self.register_buffer("weight", torch.tensor(1.0 if direction is None else direction))

    @torch.no_grad()
    def prepare(self, epoch: int, films: AllFilms) -> None:
        """Also the weight of the direction, from the errors of the untrained cloner on all films: the paper's rule."""
        super().prepare(epoch, films)
        if epoch > 0 or not self.balances:
            return
        errors = []
        for images, _ in films():
            source, cloned = self.both(images)
            errors.append(torch.stack([value_errors(source, cloned).mean(dim=1), direction_errors(source, cloned)]))
        value, direction = torch.cat(errors, dim=1).cpu().double().mean(dim=1)
        self.weight.copy_(value / direction.clamp_min(_NOTHING))

    def forward(self, views: Views) -> Outputs:
        source, cloned = self.both(views["images"])
        return {"source": source, "cloned": cloned}

    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of source and cloner at the critical layers, each (B, P, L, D)."""
        return self.tokens(images), self.cloner(self.normalise(images))

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        with full_precision(outputs["cloned"]):
            source, cloned = (at_least_float32(outputs[name]) for name in ("source", "cloned"))
            value = value_errors(source, cloned).mean()
            direction = direction_errors(source, cloned).mean()
        value, direction = distributed.with_global_value(value), distributed.with_global_value(direction)
        return Losses({"value": value, "direction": direction}, value + self.weight * direction)


class MKD(OnTrunk):
    """A source network and its cloner."""

    method = "mkd"
    Settings = MKDConfig
    Networks = SourceAndCloner
    published = "VGG-16, 200 epochs of 5,000 images (CIFAR-10); 50 for MNIST, 600 for MVTec"
    published_epochs = 200
    meanings: ClassVar[Mapping[str, str]] = {
        SCORE: "how far the cloner is from the source, in value and direction, over all critical layers",
        "direction": "the same in direction alone",
    }
    model: SourceAndCloner

    def examine(self, images: Tensor, restore: bool) -> Examined:
        source, cloned = self.model.both(images)
        values_BL, direction_B = value_errors(source, cloned), direction_errors(source, cloned)
        scores = {SCORE: values_BL.mean(dim=1) + self.model.weight * direction_B, "direction": direction_B}
        return Examined(scores, values_BL + self.model.weight * place_directions(source, cloned))

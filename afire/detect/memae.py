"""MemAE: an autoencoder that may only draw what lies in a memory of normal patterns.

After the paper (Gong et al., "Memorizing Normality to Detect Anomaly: Memory-augmented Deep Autoencoder for
Unsupervised Anomaly Detection", ICCV 2019). Every place of the encoder's map asks a memory: it is replaced by a mix of
memory items, weighted by their likeness to it, small weights set to nothing. What no mix of few normal patterns
explains is drawn badly. A film's score is its mean squared restoration error.

Ours: a temperature of the likeness. As printed, the weights are a softmax of cosines, of which none can be more than
e^2 times another: a place is then a mix of nearly all items, and the memory holds little back. ``memae.temperature`` 1
is as printed. Also group in place of batch normalisation, and nearest-neighbour doubling in place of transposed
convolutions.

Shapes: B films, s x s pixels as the networks see them, Q places that ask, D channels, N items of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from afire.config import Config, Section
from afire.detect.learned import (
    Examined,
    FilmLearner,
    LearnedConfig,
    LearnedDetector,
    TrainConfig,
    by_place,
    check_halvings,
    restored_films,
)
from afire.methods.base import ALL, Losses, Outputs, Views
from afire.nn import distributed
from afire.nn.conv import ConvDecoder, ConvEncoder, initialise_conv
from afire.nn.vit import at_least_float32, full_precision

_NOTHING = 1e-12
SCORE = "error"


class MemAESettings(Section):
    """The autoencoder and its memory."""

    side: int = Field(128, ge=16, description="films larger than this are shrunk to it, in pixels")
    width: int = Field(32, ge=1, description="channels of the first stage; each of the three doubles them")
    items: int = Field(2000, ge=2, description="patterns in the memory")
    shrink: float = Field(
        1.0, ge=0, le=3, description="weights below this share of 1 / items are set to nothing; 0 = none are"
    )
    temperature: float = Field(0.1, gt=0, description="of the likeness between places and items; 1 = as printed")
    entropy: float = Field(2e-4, ge=0, description="weight of the loss that asks for few items at each place")


class MemAEConfig(LearnedConfig):
    """All settings of fitting the detector `memae`."""

    score: str = Field(SCORE, description="a score, several joined by +, or auto: chosen on held-out normals")
    train: TrainConfig = Field(
        TrainConfig(epochs=200, batch_size=16, learning_rate=1e-4, learning_rate_end=1e-4), description="as published"
    )
    memae: MemAESettings = Field(default_factory=MemAESettings)


class PatternMemory(nn.Module):
    """Queries (..., D) -> mixes of the memory's items (..., D), and the weights of the items (..., N)."""

    def __init__(self, items: int, width: int, shrink: float, temperature: float) -> None:
        super().__init__()
        self.items = nn.Parameter(torch.zeros(items, width))
        self.shrink, self.temperature = shrink / items, temperature

    def initialise(self, generator: torch.Generator) -> None:
        """Uniform, as long as a linear layer's rows."""
        bound = self.items.shape[1] ** -0.5
        nn.init.uniform_(self.items, -bound, bound, generator=generator)

    def forward(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        likeness = F.normalize(queries, dim=-1) @ F.normalize(self.items, dim=-1).T
        weights = shrunken((likeness / self.temperature).softmax(dim=-1), self.shrink)
        return weights @ self.items, weights


def shrunken(weights: Tensor, limit: float) -> Tensor:
    """Weights (..., N) below ``limit`` set to nothing, the others adding up to one: the paper's hard shrinkage.

    Where none reaches the limit all stay: a place without any item could learn nothing.
    """
    remaining = torch.where(weights > limit, weights, 0.0)
    total = remaining.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, remaining / total.clamp_min(_NOTHING), weights)


def entropy_of(weights: Tensor) -> Tensor:
    """Mean over places of -sum w log w: small where few items are used."""
    return -(weights * weights.clamp_min(_NOTHING).log()).sum(dim=-1).mean()


class MemoryAutoencoder(FilmLearner):
    """Three halvings, a memory at every place, three doublings."""

    settings_type = MemAESettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(self.options, MemAESettings)
        widths = [self.options.width * 2**stage for stage in range(3)]
        self.side = check_halvings(config, self.options.side, len(widths), "memae")
        self.encoder, self.decoder = ConvEncoder(1, widths), ConvDecoder(1, widths)
        self.memory = PatternMemory(self.options.items, widths[-1], self.options.shrink, self.options.temperature)
        self.entropy = self.options.entropy
        generator = torch.Generator().manual_seed(config.seed)
        initialise_conv(self, generator)
        self.memory.initialise(generator)

    def forward(self, views: Views) -> Outputs:
        drawing, weights = self.draw(views["images"])
        return {"drawn": drawing, "weights": weights, "images": views["images"]}

    def draw(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The film as drawn from the memory (B, 1, s, s), and the weights (B, Q, N) of its items."""
        features_BDhw = self.encoder(images)
        remembered_BQD, weights = self.memory(features_BDhw.flatten(2).transpose(1, 2))
        drawing: Tensor = self.decoder(remembered_BQD.transpose(1, 2).view_as(features_BDhw))
        return drawing, weights

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        with full_precision(outputs["drawn"]):
            error = (at_least_float32(outputs["drawn"]) - outputs["images"]).square().mean()
            entropy = entropy_of(at_least_float32(outputs["weights"]))
        error, entropy = distributed.with_global_value(error), distributed.with_global_value(entropy)
        return Losses({"error": error, "entropy": entropy}, error + self.entropy * entropy)


class MemAE(LearnedDetector):
    """An autoencoder with a memory of normal patterns."""

    method = "memae"
    Settings = MemAEConfig
    Networks = MemoryAutoencoder
    published = "2,000 items on video, 500 on CIFAR-10"
    published_epochs = 200
    meanings: ClassVar[Mapping[str, str]] = {SCORE: "squared restoration error, mean over the film"}
    model: MemoryAutoencoder

    def examine(self, images: Tensor, restore: bool) -> Examined:
        inputs = self.model.as_inputs(images)
        drawing, _ = self.model.draw(inputs)
        errors = (drawing - inputs).square()
        restored = restored_films(drawing, images) if restore else None
        return Examined({SCORE: errors.mean(dim=(1, 2, 3))}, by_place(errors, self.grid), restored)

"""AE-U: an autoencoder that also predicts its uncertainty at every pixel.

After the paper (Mao et al., "Abnormality Detection in Chest X-ray Images Using Uncertainty Prediction
Autoencoders", MICCAI 2020). The decoder draws two pictures, the film and the log variance of its error. Edges of ribs
and heart are never drawn exactly; the variance is large there, and errors count for less. A film's score is the mean
of its squared errors, each divided by its predicted variance.

Ours: group in place of batch normalisation, and nearest-neighbour doubling in place of transposed convolutions.

Shapes: B films, s x s pixels as the networks see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
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

_LIMIT = 10.0  # of the log variance: beyond it exp leaves half precision
SCORE = "uncertain_error"


class AEUSettings(Section):
    """The autoencoder."""

    side: int = Field(64, ge=16, description="films larger than this are shrunk to it, in pixels")
    latent: int = Field(16, ge=1, description="numbers that a film is squeezed through")
    width: int = Field(16, ge=1, description="channels of the first stage; each of the four doubles them")


class AEUConfig(LearnedConfig):
    """All settings of fitting the detector `aeu`."""

    score: str = Field(SCORE, description="a score, several joined by +, or auto: chosen on held-out normals")
    train: TrainConfig = Field(
        TrainConfig(epochs=250, batch_size=64, learning_rate=5e-4, learning_rate_end=5e-4), description="as published"
    )
    aeu: AEUSettings = Field(default_factory=AEUSettings)


def uncertain_error(drawing: Tensor, log_variance: Tensor, images: Tensor) -> Tensor:
    """Squared error of each pixel over its predicted variance (B, 1, s, s)."""
    return torch.exp(-log_variance) * (images - drawing).square()


class UncertainAutoencoder(FilmLearner):
    """Four halvings, a bottleneck, four doublings; two pictures come out."""

    settings_type = AEUSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(self.options, AEUSettings)
        widths = [self.options.width * 2**stage for stage in range(4)]
        self.side = check_halvings(config, self.options.side, len(widths), "aeu")
        inner = self.side // 2 ** len(widths)
        self.shape = (widths[-1], inner, inner)
        size = widths[-1] * inner * inner
        self.encoder, self.decoder = ConvEncoder(1, widths), ConvDecoder(2, widths)
        self.squeeze, self.expand = nn.Linear(size, self.options.latent), nn.Linear(self.options.latent, size)
        initialise_conv(self, torch.Generator().manual_seed(config.seed))

    def forward(self, views: Views) -> Outputs:
        drawing, log_variance = self.draw(views["images"])
        return {"drawn": drawing, "log_variance": log_variance, "images": views["images"]}

    def draw(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The film and the log variance of its error, each (B, 1, s, s)."""
        code = self.squeeze(self.encoder(images).flatten(1))
        drawing, log_variance = self.decoder(self.expand(code).view(-1, *self.shape)).chunk(2, dim=1)
        return drawing, log_variance.clamp(-_LIMIT, _LIMIT)

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """-log of the Gaussian likelihood of every pixel, but for constants."""
        with full_precision(outputs["drawn"]):
            drawing, log_variance = (at_least_float32(outputs[name]) for name in ("drawn", "log_variance"))
            error = uncertain_error(drawing, log_variance, outputs["images"]).mean()
            spread = log_variance.mean()
        error, spread = distributed.with_global_value(error), distributed.with_global_value(spread)
        return Losses({"error": error, "log_variance": spread}, error + spread)


class AEU(LearnedDetector):
    """An autoencoder that predicts its own uncertainty."""

    method = "aeu"
    Settings = AEUConfig
    Networks = UncertainAutoencoder
    published = "64 px, 250 epochs"
    published_epochs = 250
    meanings: ClassVar[Mapping[str, str]] = {
        SCORE: "squared restoration error over its predicted variance, mean over the film",
        "error": "squared restoration error, mean over the film",
    }
    model: UncertainAutoencoder

    def examine(self, images: Tensor, restore: bool) -> Examined:
        inputs = self.model.as_inputs(images)
        drawing, log_variance = self.model.draw(inputs)
        errors = uncertain_error(drawing, log_variance, inputs)
        plain = (drawing - inputs).square()
        scores = {SCORE: errors.mean(dim=(1, 2, 3)), "error": plain.mean(dim=(1, 2, 3))}
        return Examined(scores, by_place(errors, self.grid), restored_films(drawing, images) if restore else None)

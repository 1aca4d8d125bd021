"""SALAD, in our reading: normal films survive the way from film to code and back, and from code to film and back.

After Zhao et al., "Anomaly Detection for Medical Images Using Self-Supervised and Translation-Consistent Features",
IEEE TMI 2021. (The SALAD of Bozorgtabar et al., MICCAI 2020, is another method.) There is no public code, and this file
follows no more of the paper than what it is known for: an adversarial autoencoder of normal films whose translation is
held consistent in both spaces, in that of films by a structural similarity loss and in that of codes by a centre
constraint, together with a self-supervised task that restores films whose pixels were corrupted and shuffled. All else
is ours: networks, weights of the losses, the number of epochs, and how the score is put together. Numbers of this file
are not those of the paper.

How it works here: some cells of a film are blanked and in some the pixels are shuffled. The encoder turns it into a
code, the decoder draws the whole film from that, and the drawing is encoded again. The drawing has to look like the
film before corruption (squared error and structural similarity) and real to a discriminator; its code has to be the one
it was drawn from; and codes stay near their running mean, the centre. A film's score is the squared error of its
drawing plus that of the drawing's code, weighted as in training.

Codes have mean 0 and length sqrt(Z), so that no loss can be made small by shrinking them. Group normalisation
throughout.

Shapes: B films, s x s pixels as the networks see them, c x c pixels of a cell, G = (s / c)² cells, Z numbers of a code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

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
    mean_square,
    restored_films,
)
from afire.methods.base import ALL, Keys, Losses, Outputs, Views, learns, uniform_draws
from afire.nn import distributed
from afire.nn.conv import CodeDecoder, CodeEncoder, initialise_conv
from afire.nn.vit import at_least_float32, full_precision, patchify, unpatchify

_CORRUPTION = 0x5A1AD  # keeps these draws apart from others of the same key
_WINDOW = 7  # pixels that structure is compared in, along each side
_STEADY_MEAN, _STEADY_SPREAD = 0.01**2, 0.03**2  # as in the paper of SSIM, for pixels in [0, 1]
SCORE = "translation"


class SALADSettings(Section):
    """Encoder, decoder, discriminator and what is done to films."""

    side: int = Field(128, ge=32, description="films larger than this are shrunk to it, in pixels")
    latent: int = Field(128, ge=2, description="numbers that a film is squeezed through")
    width: int = Field(16, ge=1, description="channels of the first stage; the next three double them, the fifth not")
    cell: Literal[4, 8, 16, 32] = Field(8, description="pixels of a corrupted cell, along each side")
    shuffled: float = Field(0.2, ge=0, le=1, description="share of cells whose pixels are shuffled")
    blanked: float = Field(0.2, ge=0, le=1, description="share of cells that become one grey")
    structure: float = Field(0.5, ge=0, description="weight of 1 - structural similarity")
    consistency: float = Field(0.1, ge=0, description="weight of the drawing's code, in the loss and the score")
    centre: float = Field(1e-3, ge=0, description="weight of the distance of codes from their centre")
    adversarial: float = Field(5e-3, ge=0, description="weight of what the discriminator says")
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the centre that a step keeps")


class SALADConfig(LearnedConfig):
    """All settings of fitting the detector `salad`."""

    score: str = Field(SCORE, description="a score, several joined by +, or auto: chosen on held-out normals")
    train: TrainConfig = Field(
        TrainConfig(epochs=200, batch_size=32, learning_rate=2e-4, learning_rate_end=2e-5, beta1=0.5),
        description="ours",
    )
    salad: SALADSettings = Field(default_factory=SALADSettings)


def corrupted(images: Tensor, cell: int, shuffled: Tensor, blanked: Tensor, order: Tensor, greys: Tensor) -> Tensor:
    """Images (B, 1, s, s) with cells shuffled and others blanked.

    ``shuffled`` and ``blanked`` (B, G) say which cells; ``order`` (B, c²) is the order that the shuffled pixels of a
    film come in, and ``greys`` (B, G) what the blanked cells become.
    """
    along = images.shape[-1] // cell
    cells_BGP = patchify(images, cell)
    mixed = cells_BGP.gather(2, order[:, None].expand_as(cells_BGP))
    changed = torch.where(shuffled[..., None], mixed, cells_BGP)
    return unpatchify(torch.where(blanked[..., None], greys[..., None], changed), cell, (along, along))


def structural_similarity(first: Tensor, second: Tensor) -> Tensor:
    """SSIM (B,) of images (B, 1, s, s) in [-1, 1]: the mean over square windows of even weight."""
    with full_precision(first):
        # In [0, 1], for which it is meant: of negative means the product would be positive again.
        a, b = ((at_least_float32(images) + 1) / 2 for images in (first, second))

        def mean(values: Tensor) -> Tensor:
            return F.avg_pool2d(values, _WINDOW, stride=1)

        mean_a, mean_b = mean(a), mean(b)
        spread_a, spread_b = mean(a * a) - mean_a * mean_a, mean(b * b) - mean_b * mean_b
        shared = mean(a * b) - mean_a * mean_b
        likeness = (2 * mean_a * mean_b + _STEADY_MEAN) * (2 * shared + _STEADY_SPREAD)
        limit = (mean_a * mean_a + mean_b * mean_b + _STEADY_MEAN) * (spread_a + spread_b + _STEADY_SPREAD)
        return (likeness / limit).flatten(1).mean(dim=1)


class SALADNetworks(FilmLearner):
    """Encoder and decoder in one turn, the discriminator in the other; five stages each."""

    settings_type = SALADSettings
    turns = ("discriminator", "restorer")
    centre: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(self.options, SALADSettings)
        self.settings = options = self.options
        widths = [options.width * 2**stage for stage in (0, 1, 2, 3, 3)]
        self.side = check_halvings(config, options.side, len(widths), "salad")
        self.encoder = CodeEncoder(1, widths, self.side, options.latent)
        self.decoder = CodeDecoder(1, widths, self.side, options.latent)
        self.discriminator = CodeEncoder(1, widths, self.side, 1)
        self.register_buffer("centre", torch.zeros(options.latent))
        initialise_conv(self, torch.Generator().manual_seed(config.seed))

    def parameters_of(self, turn: str) -> Iterator[tuple[str, nn.Parameter]]:
        for name, weight in self.named_parameters():
            if name.startswith("discriminator.") == (turn == "discriminator"):
                yield name, weight

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """Films, and the same with some cells shuffled and others blanked."""
        inputs, settings = self.as_inputs(images), self.settings
        cells, pixels = (self.side // settings.cell) ** 2, settings.cell**2
        draws = uniform_draws(2 * cells + pixels, keys.seed ^ _CORRUPTION, keys.step, keys.rows).to(images.device)
        fate, greys, order = draws[:, :cells], draws[:, cells : 2 * cells], draws[:, 2 * cells :]
        shuffled = fate < settings.shuffled
        blanked = ~shuffled & (fate < settings.shuffled + settings.blanked)
        broken = corrupted(inputs, settings.cell, shuffled, blanked, order.argsort(dim=1), greys * 2 - 1)
        return {"images": inputs, "corrupted": broken}

    def forward(self, views: Views) -> Outputs:
        """What the turn at hand needs: (B,) each, and the codes (B, Z)."""
        images = views["images"]
        code = self.code(views["corrupted"])
        drawing = self.decoder(code)
        outputs = {"fake": self.discriminator(drawing)[:, 0]}
        if learns(self.discriminator):
            outputs["real"] = self.discriminator(images)[:, 0]
        if learns(self.encoder):
            outputs["error"] = mean_square(drawing - images)
            outputs["structure"] = 1 - structural_similarity(drawing, images)
            outputs["consistency"] = mean_square(self.code(drawing) - code)
            outputs["codes"] = code
        return outputs

    def code(self, images: Tensor) -> Tensor:
        """(B, 1, s, s) -> (B, Z), each of mean 0 and standard deviation 1."""
        code = self.encoder(images)
        return F.layer_norm(code, code.shape[1:])

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        def mean(values: Tensor) -> Tensor:
            return distributed.with_global_value(at_least_float32(values).mean())

        fake = at_least_float32(outputs["fake"])
        if turn == "discriminator":
            loss = mean(F.softplus(-at_least_float32(outputs["real"]))) + mean(F.softplus(fake))
            return Losses({"discriminator": loss}, loss)
        codes, weights = at_least_float32(outputs["codes"]), self.settings
        terms = {name: mean(outputs[name]) for name in ("error", "structure", "consistency")}
        terms |= {"centre": mean((codes - self.centre).square()), "restorer": mean(F.softplus(-fake))}
        total = terms["error"] + weights.structure * terms["structure"] + weights.consistency * terms["consistency"]
        total = total + weights.centre * terms["centre"] + weights.adversarial * terms["restorer"]
        centre = distributed.total(codes.mean(dim=0)) / distributed.world_size()
        return Losses(terms, total, {"centre": centre})

    def after_step(self, losses: Losses) -> None:
        self.centre.lerp_(losses.pending["centre"].to(self.centre), 1 - self.settings.momentum)


class SALAD(LearnedDetector):
    """An autoencoder that is consistent in the spaces of films and of codes."""

    method = "salad"
    Settings = SALADConfig
    Networks = SALADNetworks
    published = "our reading: no public code; length and sizes are ours"
    published_epochs = 200
    meanings: ClassVar[Mapping[str, str]] = {
        SCORE: "squared error of the drawing, and weighted, that of its code, means",
        "error": "squared error of the drawing, mean over the film",
        "consistency": "squared error of the drawing's code, mean over its numbers",
        "centre": "squared distance of the code from the centre of normal codes, mean over its numbers",
    }
    model: SALADNetworks

    def examine(self, images: Tensor, restore: bool) -> Examined:
        inputs = self.model.as_inputs(images)
        code = self.model.code(inputs)
        drawing = self.model.decoder(code)
        error, consistency = mean_square(drawing - inputs), mean_square(self.model.code(drawing) - code)
        scores = {
            SCORE: error + self.model.settings.consistency * consistency,
            "error": error,
            "consistency": consistency,
            "centre": mean_square(code - self.model.centre),
        }
        restored = restored_films(drawing, images) if restore else None
        return Examined(scores, by_place((drawing - inputs).square(), self.grid), restored)

"""PANDA: a pre-trained trunk whose features of normal films are drawn together without becoming all the same.

After the paper (Reiss et al., "PANDA: Adapting Pretrained Features for Anomaly Detection and Segmentation", CVPR
2021). The last half of the trunk is trained so that the features of normal films come near their first mean. Left
alone, that ends in a trunk with the same features for every film. Two ways prevent it: stop after a fixed number of
updates (`early`), or hold every weight near its first value, the more so the more the features depend on it (`ewc`:
elastic weight consolidation, whose stiffness is the diagonal of the Fisher information). A film's score is its mean
squared distance from the two nearest normal films.

Ours: a vision transformer in place of a ResNet-152, its last half in place of the last two of four stages, the mean of
its tokens in place of average-pooled features. The Fisher information is that of the features of normal films, taken
as the means of Gaussians; the paper's is of ImageNet's classes, whose images and labels are not at hand. It is larger,
and its weight of 100 in place of 10,000 leaves normal films about as much room to come together as an early stop does.
The map is how far each token is from the mean of normal ones at its place; the paper's segmentation keeps all tokens of
all films.

Shapes: B films, N normal films, L positions, D width of a token, W weights that are trained, k neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from afire.config import Config, Section
from afire.detect.base import NormalFilms
from afire.detect.learned import Examined, LearnedConfig, OnTrunk, TrainConfig, TrunkLearner
from afire.detect.normals import Fitted
from afire.errors import UserError
from afire.methods.base import ALL, AllFilms, Losses, Outputs, Progress, Views
from afire.nn import distributed
from afire.nn.vit import at_least_float32, full_precision, run_blocks
from afire.tasks.settings import DetectorConfig

SCORE = "neighbours"
_SIGNS = 0xE3C  # keeps the draws of the Fisher information apart from other draws of the seed


class PANDASettings(Section):
    """What is adapted, and what keeps it from collapsing."""

    against: Literal["ewc", "early"] = Field(
        "ewc", description="against collapse: weights held near their first values, or an early stop"
    )
    blocks: int = Field(0, ge=0, description="last blocks of the trunk that are trained; 0 = the last half")
    stiffness: float = Field(
        100.0, ge=0, description="weight of the loss that holds weights (ewc); 1e4 lets hardly anything move"
    )
    fisher_films: int = Field(512, ge=1, description="most normal films that say which weights matter (ewc)")
    updates: int = Field(2300, ge=1, description="updates after which nothing moves any more (early)")
    neighbours: int = Field(2, ge=1, le=8, description="nearest normal films that a film is compared with")


class PANDAConfig(LearnedConfig):
    """All settings of fitting the detector `panda`."""

    score: str = Field(SCORE, description="a score, several joined by +, or auto: chosen on held-out normals")
    train: TrainConfig = Field(
        TrainConfig(epochs=50, batch_size=32, learning_rate=1e-2, learning_rate_end=1e-2, weight_decay=5e-5, clip=1e-3),
        description="as published: SGD, whose momentum is beta1, with very short steps",
    )
    panda: PANDASettings = Field(default_factory=PANDASettings)

    @model_validator(mode="after")
    def _ends_once(self) -> PANDAConfig:
        if self.panda.against == "early" and (self.train.film_views_min or self.train.minutes):
            raise ValueError(
                "panda.against=early ends after panda.updates; leave out --minutes, train.minutes and "
                "train.film_views_min"
            )
        return self


class Compacted(TrunkLearner):
    """A trunk whose last blocks draw normal films together."""

    settings_type = PANDASettings
    prepares = True
    optimizer = "sgd"
    centre: Tensor  # (D,): mean feature of the normal films before the first update
    start: Tensor  # (W,): the trained weights before the first update; empty without ewc
    fisher: Tensor  # (W,): how much the features depend on each

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(self.options, PANDASettings)
        depth = len(self.trunk.blocks)
        if self.options.blocks > depth:
            raise UserError(f"panda.blocks is {self.options.blocks}, but the trunk has {depth} blocks.")
        self.first = depth - (self.options.blocks or math.ceil(depth / 2))
        for module in (*self.trunk.blocks[self.first :], self.trunk.norm):
            module.requires_grad_(True)
        self.sizes = [weight.numel() for weight in self.trained()]
        self.early = self.options.against == "early"
        count = 0 if self.early else sum(self.sizes)
        self.register_buffer("centre", torch.zeros(self.trunk.width))
        self.register_buffer("start", torch.zeros(count))
        self.register_buffer("fisher", torch.zeros(count))

    def trained(self) -> list[nn.Parameter]:
        """Weights of the last blocks and of the norm behind them, in a fixed order."""
        return [
            weight for module in (*self.trunk.blocks[self.first :], self.trunk.norm) for weight in module.parameters()
        ]

    # Networks

    def forward(self, views: Views) -> Outputs:
        features = self.tokens(views["images"]).mean(dim=1)
        if self.early:
            return {"features": features}
        # Once for each film, so that outputs of the pieces of a batch can be joined.
        return {"features": features, "drift": self.drift().expand(features.shape[0])}

    def tokens(self, images: Tensor) -> Tensor:
        """Films (B, ., S, S) in [0, 1] -> tokens (B, L, D)."""
        return self._through_last_blocks(self._before_last_blocks(images))

    @torch.no_grad()
    def _before_last_blocks(self, images: Tensor) -> Tensor:
        return self.trunk.levels(self.normalise(images), [self.first])[0]

    def _through_last_blocks(self, tokens: Tensor) -> Tensor:
        blocks = self.trunk.blocks[self.first :]
        normed: Tensor = self.trunk.norm(run_blocks(blocks, tokens, self.trunk.gradient_checkpointing))
        return normed[:, 1:]

    def drift(self) -> Tensor:
        """Half the sum of (weight - start)^2, each by its Fisher information."""
        triples = zip(
            self.trained(), torch.split(self.start, self.sizes), torch.split(self.fisher, self.sizes), strict=True
        )
        squares = [(fisher * (weight.flatten() - start).square()).sum() for weight, start, fisher in triples]
        return torch.stack(squares).sum() / 2

    # Learning

    def prepare(self, epoch: int, films: AllFilms) -> None:
        """Statistics of the normal films before the first update: their mean feature, and which weights matter."""
        if epoch > 0:
            return
        count, total = 0, torch.zeros(self.trunk.width, dtype=torch.float64)
        with torch.no_grad():
            for images, _ in films():
                total += self.tokens(images).mean(dim=1).cpu().double().sum(dim=0)
                count += len(images)
            self.centre.copy_(total / count)
            if self.early:
                return
            self.start.copy_(torch.cat([weight.flatten() for weight in self.trained()]))
        self.fisher.copy_(self._fisher_information(films, count))

    def _fisher_information(self, films: AllFilms, count: int) -> Tensor:
        """(W,): the mean over films of the squared gradients of all D numbers of the feature, summed and divided by D.

        The sum over the numbers is not taken one by one: with random signs before them, the squared gradient of their
        sum has the same mean.
        """
        assert isinstance(self.options, PANDASettings)
        every = math.ceil(count / self.options.fisher_films)
        generator = torch.Generator().manual_seed(self.config.seed ^ _SIGNS)
        squares = [torch.zeros_like(weight) for weight in self.trained()]
        films_counted = 0
        for tokens in self._every(films, every):
            feature_D = at_least_float32(self._through_last_blocks(tokens)).mean(dim=(0, 1))
            signs_D = torch.randint(2, feature_D.shape, generator=generator).to(feature_D) * 2 - 1
            gradients = torch.autograd.grad((feature_D * signs_D).sum(), self.trained())
            for square, gradient in zip(squares, gradients, strict=True):
                square.addcmul_(gradient, gradient)
            films_counted += 1
        return torch.cat([square.flatten() for square in squares]) / (films_counted * self.trunk.width)

    def _every(self, films: AllFilms, step: int) -> Iterator[Tensor]:
        """Each ``step``-th film as tokens (1, 1 + L, D) before the last blocks."""
        position = 0
        for images, _ in films():
            numbers = [place for place in range(len(images)) if (position + place) % step == 0]
            position += len(images)
            if numbers:
                yield from torch.split(self._before_last_blocks(images[numbers]), 1)

    def frozen(self, progress: Progress) -> Iterable[nn.Parameter]:
        assert isinstance(self.options, PANDASettings)
        return self.trained() if self.early and progress.step >= self.options.updates else ()

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        assert isinstance(self.options, PANDASettings)
        with full_precision(outputs["features"]):
            compact = (at_least_float32(outputs["features"]) - self.centre).square().mean()
        compact = distributed.with_global_value(compact)
        if self.early:
            return Losses({"compactness": compact}, compact)
        drift = distributed.with_global_value(outputs["drift"].mean())
        return Losses({"compactness": compact, "drift": drift}, compact + self.options.stiffness * drift)


class NormalFeatures(Fitted):
    """What normal films are like after the training: the feature of each, and the mean token of each place."""

    features: Tensor  # (N, D), relative to ``centre``
    centre: Tensor  # (D,): distances are differences of large numbers without it
    places: Tensor  # (L, D)

    def __init__(self) -> None:
        super().__init__()
        for name in ("features", "centre", "places"):
            self.register_buffer(name, torch.zeros(0))

    def fit(self, features_ND: Tensor, places_LD: Tensor) -> None:
        """From normal films."""
        self.centre, self.places = features_ND.mean(dim=0), places_LD
        self.features = features_ND - self.centre

    def distances(self, features_BD: Tensor, neighbours: int) -> Tensor:
        """Mean squared distance (B,) from the nearest normal films."""
        centred = features_BD - self.centre
        # |x|^2 is the same for all and changes no order.
        squares_BN = self.features.square().sum(dim=1) - 2 * centred @ self.features.T
        nearest_Bk = squares_BN.topk(neighbours, dim=1, largest=False).indices
        # Again as a difference: the product finds the nearest, but small distances only roughly.
        apart = centred[:, None] - self.features[nearest_Bk]
        return apart.square().sum(dim=-1).mean(dim=1)

    def from_centre(self, features_BD: Tensor) -> Tensor:
        """Squared distance (B,) from the mean of normal films."""
        return (features_BD - self.centre).square().sum(dim=1)

    def from_places(self, tokens_BLD: Tensor) -> Tensor:
        """Squared distance (B, L) of each token from the mean of normal ones at its place."""
        return (tokens_BLD - self.places).square().sum(dim=-1)


class PANDA(OnTrunk):
    """An adapted trunk and the features of normal films."""

    method = "panda"
    Settings = PANDAConfig
    Networks = Compacted
    published = "ResNet-152, 50 epochs of 5,000 images (ewc); 2,300 updates of 32 (early)"
    published_epochs = 50
    meanings: ClassVar[Mapping[str, str]] = {
        SCORE: "squared distance of the film's feature from those of the nearest normal films, mean",
        "centre": "squared distance of the film's feature from the mean of normal films",
    }
    model: Compacted

    def __init__(self, config: Config, settings: DetectorConfig) -> None:
        super().__init__(config, settings)
        self.normals = NormalFeatures()

    @classmethod
    def config_of(cls, config: Config, settings: DetectorConfig, films: int | None = None) -> Config:
        """As for any, but for an early stop: no more epochs than it takes to get there."""
        config = super().config_of(config, settings, films)
        assert isinstance(settings, PANDAConfig)
        if settings.panda.against == "ewc" or films is None:
            return config
        epochs = math.ceil(settings.panda.updates / (films // config.training.batch_size))
        training = config.training.model_copy(update={"epochs": min(config.training.epochs, epochs)})
        return config.model_copy(update={"training": training})

    def learn(self, normals: NormalFilms) -> None:
        features, total = [], torch.zeros(self.grid[0] * self.grid[1], self.model.trunk.width, dtype=torch.float64)
        for images in normals.batches("features of normal films"):
            tokens_BLD = self.model.tokens(self.prepared(images))
            features.append(tokens_BLD.mean(dim=1))
            total += tokens_BLD.cpu().double().sum(dim=0)
        self.normals.fit(torch.cat(features), (total / len(normals)).float().to(self.device))

    def examine(self, images: Tensor, restore: bool) -> Examined:
        assert isinstance(self.settings, PANDAConfig)
        tokens_BLD = self.model.tokens(images)
        features_BD = tokens_BLD.mean(dim=1)
        scores = {
            SCORE: self.normals.distances(features_BD, self.settings.panda.neighbours),
            "centre": self.normals.from_centre(features_BD),
        }
        return Examined(scores, self.normals.from_places(tokens_BLD))

"""CutPaste: a classifier that separates films from films with a piece of themselves pasted elsewhere.

After the paper (Li et al., "CutPaste: Self-Supervised Learning for Anomaly Detection and Localization", CVPR
2021). A network learns three classes: the film as it is, with a patch of it pasted elsewhere (2 to 15 % of the film),
and with a thin turned scar of it pasted elsewhere. To do so it has to know what belongs where. Then the classifier is
left aside: a Gaussian is fitted to the network's features of normal films before its head, and a film's score is its
distance from it.

Ours: a small residual network with group normalisation, 8 pixels to a place, in place of ResNet-18; Adam in place of
SGD; an epoch is a pass over the films, where the paper's is 256 updates; the Gaussian's covariance is shrunk (Ledoit
and Wolf). The heatmap is the paper's for whole films, GradCAM; the one it learns from patches is not here.

Shapes: B films, V versions of each, the first one as it is, s x s pixels as the networks see them, D width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from afire.config import Config, Section
from afire.detect.base import NormalFilms
from afire.detect.learned import Examined, LearnedConfig, LearnedDetector, TrainConfig, by_place, check_halvings
from afire.detect.normals import Gaussian
from afire.lesions.augment import AugmentSettings, augmented
from afire.lesions.pastes import CutPasteLimits, cut_and_pasted
from afire.methods.base import ALL, Keys, Learner, Losses, Outputs, Views
from afire.nn import distributed
from afire.nn.conv import SLOPE, ResidualEncoder, initialise_conv, shrunk, standardised
from afire.nn.vit import Grid, at_least_float32, full_precision
from afire.tasks.settings import DetectorConfig

_STRIDES = (2, 2, 1)  # behind a stem that halves as well: 8 pixels to a place
_HALVINGS = 3
SCORE = "density"
# What the authors do to every film: a little shift and jitter, no blur and no noise.
PUBLISHED_AUGMENT = AugmentSettings(turn=0, zoom=0, shift=0.04, gamma=0.1, blur=0, noise=0)


class ClassifierSettings(Section):
    """A classifier of pasted films."""

    side: int = Field(256, ge=16, description="films larger than this are shrunk to it, in pixels")
    width: int = Field(32, ge=1, description="channels of the first stage; each of the three doubles them")
    blocks: int = Field(2, ge=1, description="residual blocks of a stage")
    augment: AugmentSettings = Field(PUBLISHED_AUGMENT, description="what is done to every film before it is pasted to")


class CutPasteSettings(ClassifierSettings):
    """The classifier and what is pasted."""

    paste: CutPasteLimits = Field(default_factory=CutPasteLimits)


class CutPasteConfig(LearnedConfig):
    """All settings of fitting the detector `cutpaste`."""

    score: str = Field(SCORE, description="a score, several joined by +, or auto: chosen on held-out normals")
    train: TrainConfig = Field(
        TrainConfig(epochs=256, batch_size=32, learning_rate=1e-3, learning_rate_end=0, weight_decay=3e-5),
        description="the published batch and number of epochs, see its page",
    )
    cutpaste: CutPasteSettings = Field(default_factory=CutPasteSettings)


class PasteClassifier(Learner):
    """Three residual stages, their mean over the film, and a head that classifies the version of a film."""

    settings_type: ClassVar[type[Section]] = ClassifierSettings
    name: ClassVar[str]
    versions: ClassVar[tuple[str, ...]]
    """What the classes are called; the first is the film as it is."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(self.options, ClassifierSettings)
        self.side = check_halvings(config, self.options.side, _HALVINGS, self.name)
        self.augment = self.options.augment
        widths = [self.options.width * 2**stage for stage in range(len(_STRIDES))]
        self.encoder = ResidualEncoder(1, widths, _STRIDES, self.options.blocks)
        self.hidden, self.last = nn.Linear(widths[-1], widths[-1]), nn.Linear(widths[-1], len(self.versions))
        initialise_conv(self, torch.Generator().manual_seed(config.seed))

    @abstractmethod
    def pasted(self, films_B1ss: Tensor, keys: Keys) -> list[Tensor]:
        """The other versions of films in [0, 1], each like the films."""

    def views(self, images: Tensor, keys: Keys) -> Views:
        films, _ = augmented(
            shrunk(images[:, :1], self.side),
            None,
            seed=keys.seed,
            epoch=keys.epoch,
            rows=keys.rows,
            settings=self.augment,
        )
        return {"images": standardised(torch.stack([films, *self.pasted(films, keys)], dim=1))}

    def forward(self, views: Views) -> Outputs:
        images_BV1ss = views["images"]
        features = self.encoder(images_BV1ss.flatten(0, 1)).mean(dim=(2, 3))
        return {"logits": self.head(features).view(*images_BV1ss.shape[:2], -1)}

    def head(self, features_BD: Tensor) -> Tensor:
        """Logits (B, V) of the versions."""
        logits: Tensor = self.last(F.leaky_relu(self.hidden(features_BD), SLOPE))
        return logits

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        logits_BVV = outputs["logits"]
        with full_precision(logits_BVV):
            truth = torch.arange(len(self.versions), device=logits_BVV.device).expand(len(logits_BVV), -1)
            loss = F.cross_entropy(at_least_float32(logits_BVV).flatten(0, 1), truth.flatten())
        loss = distributed.with_global_value(loss)
        return Losses({"version": loss}, loss)

    def features(self, images: Tensor) -> Tensor:
        """Features (B, D, h, w) of films (B, C, S, S) in [0, 1]."""
        features: Tensor = self.encoder(standardised(shrunk(images[:, :1], self.side)))
        return features

    def odds(self, features_BD: Tensor) -> Tensor:
        """Log odds (B,) that a film is of any pasted version, not as it is."""
        logits = self.head(features_BD)
        return torch.logsumexp(logits[:, 1:], dim=1) - logits[:, 0]

    def cam(self, features_BDhw: Tensor) -> Tensor:
        """How much each place raises the odds, to first order (B, 1, h, w): GradCAM, its gradient written out."""
        pooled_BD = features_BDhw.mean(dim=(2, 3))
        logits = self.head(pooled_BD)
        by_logit = torch.cat([-torch.ones_like(logits[:, :1]), logits[:, 1:].softmax(dim=1)], dim=1)
        slopes = torch.where(self.hidden(pooled_BD) > 0, 1.0, SLOPE)
        gradient_BD = ((by_logit @ self.last.weight) * slopes) @ self.hidden.weight
        return (gradient_BD[:, :, None, None] * features_BDhw).sum(dim=1, keepdim=True)


class CutPasteClassifier(PasteClassifier):
    """Three classes: the film, a patch of it pasted elsewhere, a scar of it pasted elsewhere."""

    settings_type = CutPasteSettings
    name = "cutpaste"
    versions = ("normal", "patch", "scar")

    def pasted(self, films_B1ss: Tensor, keys: Keys) -> list[Tensor]:
        assert isinstance(self.options, CutPasteSettings)
        limits = self.options.paste
        key = {"seed": keys.seed, "epoch": keys.epoch}
        return [
            cut_and_pasted(films_B1ss, **key, rows=keys.rows, kind="patch", limits=limits)[0],
            cut_and_pasted(films_B1ss, **key, rows=keys.rows, kind="scar", limits=limits)[0],
        ]


class OneClassDetector(LearnedDetector):
    """A classifier of pasted films, and a Gaussian of its features of normal ones."""

    meanings: ClassVar[Mapping[str, str]] = {
        SCORE: "distance of the film's representation from the Gaussian of normal films",
        "classifier": "log odds that something was pasted into the film",
    }
    model: PasteClassifier

    def __init__(self, config: Config, settings: DetectorConfig) -> None:
        super().__init__(config, settings)
        self.gaussian = Gaussian()

    @classmethod
    def grid_of(cls, config: Config) -> Grid:
        """The places of the last stage."""
        side = min(config.image.size, int(config.options["side"])) // 2**_HALVINGS
        return side, side

    def learn(self, normals: NormalFilms) -> None:
        self.gaussian.fit(
            self.model.features(self.prepared(images)).mean(dim=(2, 3))
            for images in normals.batches("representations of normal films")
        )
        self.gaussian.to(self.device)

    def examine(self, images: Tensor, restore: bool) -> Examined:
        features_BDhw = self.model.features(images)
        pooled = features_BDhw.mean(dim=(2, 3))
        scores = {SCORE: self.gaussian(pooled), "classifier": self.model.odds(pooled)}
        return Examined(scores, by_place(self.model.cam(features_BDhw), self.grid))


class CutPaste(OneClassDetector):
    """A classifier of cut and pasted films, and a Gaussian of its features of normal ones."""

    method = "cutpaste"
    Settings = CutPasteConfig
    Networks = CutPasteClassifier
    published = "256 px, 65,536 updates of 96 versions, ResNet-18"
    published_epochs = 256

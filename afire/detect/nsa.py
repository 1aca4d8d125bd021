"""NSA: a network that points at patches of other films, blended into a film without a seam.

After the paper (Schlueter et al., "Natural Synthetic Anomalies for Self-Supervised Anomaly Detection and
Localization", ECCV 2022). One to three patches of another film, scaled, are blended into a film (Poisson blending), and
a network learns to say of every place how much it was changed: a bounded function of the change in grey levels, so
that a patch that happens to fit is not called a defect. A film's score is the mean of the network's outputs.

Ours: patches are cut from the chest and put around points of the lungs, half of them mirrored, and blended in either
of the paper's two ways; half of the films with anything on them have smooth haze on their lungs in place of patches
(``haze=0`` for none), half of all films have nothing on them (``clean=0`` for none). Every film, clean or not, is
turned, changed in its grey curve, blurred and given noise, so that what resampling does to a patch does not give it
away. A small residual network with group normalisation, 4 pixels to a place, in place of a ResNet-18 with a decoder;
the change is averaged over its surroundings, not median-filtered.

Patches come from a sample of the training films, which is looked up at the start of a run and never saved: a detector
holds no film of a patient.

Shapes: B films, s x s pixels as the networks see them, h x w places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from afire.config import Config, Section
from afire.detect.learned import (
    Examined,
    LearnedConfig,
    LearnedDetector,
    TrainConfig,
    by_place,
    check_halvings,
)
from afire.detect.maps import peak
from afire.lesions.augment import AugmentSettings, augmented
from afire.lesions.blend import Blend
from afire.lesions.pastes import Donors, change_labels, naturally_pasted
from afire.lesions.places import keyed, unit
from afire.lesions.synthesis import synthesize_keyed
from afire.methods.base import ALL, Keys, Learner, Losses, Outputs, ReadFilms, Views
from afire.methods.donors import read_donors
from afire.nn import distributed
from afire.nn.conv import DenseHead, ResidualEncoder, initialise_conv, shrunk, standardised
from afire.nn.vit import Grid, at_least_float32, full_precision
from afire.tasks.settings import DETECTION_LESIONS

_STRIDES = (2, 2, 2)  # behind a stem that halves as well
_HALVINGS, _CELL = 4, 8
_ABNORMAL, _FAINT = 0.05, 0.1  # share of places, and size of the last kernel, that the network starts with
_KINDS = 0x115A  # keeps the draws of what a film gets apart from those of the pastes themselves
HAZE = DETECTION_LESIONS.model_copy(update={"haze": 1.0})
SCORE = "mean"


class NSASettings(Section):
    """The network, and what is drawn on films."""

    side: int = Field(224, ge=16, description="films larger than this are shrunk to it, in pixels")
    width: int = Field(32, ge=1, description="channels of the first stage; each of the three doubles them")
    blocks: int = Field(2, ge=1, description="residual blocks of a stage")
    clean: float = Field(0.5, ge=0, lt=1, description="share of films that nothing is drawn on; published: 0")
    haze: float = Field(0.5, ge=0, le=1, description="share of the others that have haze, not patches; published: 0")
    patches: int = Field(3, ge=1, le=16, description="most patches in a film; one for sure, each further one by a coin")
    donors: int = Field(128, ge=0, description="training films that patches are cut from; 0 = each film is its own")
    blend: Blend = Field(
        "either",
        description="mixed: the larger step of film and patch (published for chest films); poisson: the patch's own; "
        "either: by a coin; coons: rough, a little faster; none: patches keep their seams",
    )
    label: Literal["logistic", "binary"] = Field("logistic", description="how abnormal a change is: by size, or yes")
    label_middle: float = Field(4.0, ge=0, description="change that is half abnormal (logistic), of 255 grey levels")
    label_steepness: float = Field(0.5, gt=0, description="how fast that rises around the middle")
    augment: AugmentSettings = Field(default_factory=AugmentSettings)


class NSAConfig(LearnedConfig):
    """All settings of fitting the detector `nsa`."""

    score: str = Field(SCORE, description="a score, several joined by +, or auto: chosen on held-out normals")
    train: TrainConfig = Field(
        TrainConfig(epochs=240, batch_size=64, learning_rate=1e-3, learning_rate_end=1e-6), description="as published"
    )
    nsa: NSASettings = Field(default_factory=NSASettings)


class DefectFinder(Learner):
    """Three residual stages and the way back to the finest: one logit for every place."""

    settings_type = NSASettings
    options: NSASettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.side = check_halvings(config, self.options.side, _HALVINGS, "nsa")
        widths = [self.options.width * 2**stage for stage in range(len(_STRIDES))]
        self.encoder = ResidualEncoder(1, widths, _STRIDES, self.options.blocks)
        self.head = DenseHead(1, widths)
        # No buffers: pixels of patients must not be saved with the weights.
        self.donors: Donors | None = None
        initialise_conv(self, torch.Generator().manual_seed(config.seed))
        # It starts by predicting for every place what most places are: to learn that first would take many steps.
        assert self.head.last.bias is not None
        self.head.last.weight.data.mul_(_FAINT)
        self.head.last.bias.data.fill_(math.log(_ABNORMAL / (1 - _ABNORMAL)))

    def begin_run(self, rows: Tensor, read: ReadFilms) -> None:
        self.donors = read_donors(rows, self.options.donors, self.config.seed, read, self.side)

    def views(self, images: Tensor, keys: Keys) -> Views:
        films = shrunk(images[:, :1], self.side)
        drawing = self.with_defects(films, keys)
        options = self.options
        labels = change_labels(films, drawing, options.label, options.label_steepness, options.label_middle)
        inputs, labels_too = augmented(
            drawing, labels, seed=keys.seed, epoch=keys.epoch, rows=keys.rows, settings=options.augment
        )
        assert labels_too is not None
        return {"images": standardised(inputs), "labels": F.avg_pool2d(labels_too, self.side // self.places)}

    @property
    def places(self) -> int:
        """Along a side of the map."""
        return self.side // 4

    def with_defects(self, films_B1ss: Tensor, keys: Keys) -> Tensor:
        """Films in [0, 1] with patches, with haze, or as they are."""
        numbers = unit(keyed(keys.seed ^ _KINDS, keys.epoch, keys.rows, 1, 1)[:, 0, 0, :2])
        clean, hazy = numbers[:, 0] < self.options.clean, numbers[:, 1] < self.options.haze
        films = films_B1ss.clone()
        for mask, draw in ((~clean & hazy, self._with_haze), (~clean & ~hazy, self._with_patches)):
            indices = mask.nonzero()[:, 0]
            if len(indices):
                places = indices.to(films.device)
                films[places] = draw(films_B1ss[places], keys._replace(rows=keys.rows[indices]))
        return films

    def _with_patches(self, films_B1ss: Tensor, keys: Keys) -> Tensor:
        return naturally_pasted(
            films_B1ss,
            self.donors,
            seed=keys.seed,
            epoch=keys.epoch,
            rows=keys.rows,
            most=self.options.patches,
            blend=self.options.blend,
        )

    def _with_haze(self, films_B1ss: Tensor, keys: Keys) -> Tensor:
        return synthesize_keyed(
            films_B1ss, seed=keys.seed, epoch=keys.epoch, indices=keys.rows, config=HAZE, check_values=False
        )[0]

    def forward(self, views: Views) -> Outputs:
        logits = self.head(self.encoder.levels(views["images"]))
        return {"logits": logits, "labels": views["labels"]}

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        with full_precision(outputs["logits"]):
            logits = at_least_float32(outputs["logits"])
            loss = F.binary_cross_entropy_with_logits(logits, outputs["labels"].to(logits.dtype))
        loss = distributed.with_global_value(loss)
        return Losses({"places": loss}, loss)

    def abnormality(self, images: Tensor) -> Tensor:
        """How abnormal each place of films (B, C, S, S) in [0, 1] is: (B, 1, h, w), in [0, 1]."""
        inputs = standardised(shrunk(images[:, :1], self.side))
        return torch.sigmoid(self.head(self.encoder.levels(inputs)))


class NSA(LearnedDetector):
    """A network that points at what does not belong."""

    method = "nsa"
    Settings = NSAConfig
    Networks = DefectFinder
    published = "224 px, 240 epochs, ResNet-18 with a decoder"
    published_epochs = 240
    meanings: ClassVar[Mapping[str, str]] = {
        SCORE: "how abnormal its places are, mean over the film",
        "peak": "how abnormal its places are, highest tenth",
    }
    model: DefectFinder

    @classmethod
    def grid_of(cls, config: Config) -> Grid:
        """Two by two places of the network, as it sees films."""
        side = min(config.image.size, int(config.options["side"])) // _CELL
        return side, side

    def examine(self, images: Tensor, restore: bool) -> Examined:
        abnormality = self.model.abnormality(images)
        places = abnormality.flatten(1)
        return Examined({SCORE: places.mean(dim=1), "peak": peak(places)}, by_place(abnormality, self.grid))

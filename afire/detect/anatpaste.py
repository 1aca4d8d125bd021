"""AnatPaste: a classifier that tells films from films with a piece of themselves blended into their lungs.

After the paper (Sato et al., "Anatomy-aware self-supervised learning for anomaly detection in chest
radiographs", iScience 2023). Like CutPaste, but placed by anatomy: the lungs are found by a threshold, and a patch
of the film is pasted around a point in them, half transparent, fading at its edge and at that of the lungs, as an
opacity would. The network learns two classes; a Gaussian is fitted to its features of normal films, and a film's score
is its distance from it.

Ours: what :mod:`afire.detect.cutpaste` says of network, optimiser, epochs and heatmap; patches are ovals cut around a
bright pixel, of one of a few sizes (the published 2 to 15 % of the film), as in AFiRe's ablation
(:mod:`afire.lesions.synthesis`), and lungs are found as everywhere in afire.

Shapes: B films, s x s pixels as the networks see them.
"""

from __future__ import annotations

import torch
from pydantic import Field, model_validator
from torch import Tensor

from afire.config import LesionConfig
from afire.detect.cutpaste import SCORE, ClassifierSettings, OneClassDetector, PasteClassifier
from afire.detect.learned import LearnedConfig, TrainConfig
from afire.lesions.places import below, keyed
from afire.lesions.synthesis import synthesize_keyed
from afire.methods.base import Keys

_SIZES = 0xA7A  # keeps the draws of sizes apart from those of the pastes themselves


class AnatPasteSettings(ClassifierSettings):
    """The classifier and what is pasted."""

    sizes: list[float] = Field(
        [32, 44, 56, 72, 87], min_length=1, description="sides of a patch, in pixels of a 224-px film; one is drawn"
    )
    opacity_min: float = Field(0.6, gt=0, le=1, description="smallest share of the patch in its middle")
    opacity_max: float = Field(1.0, gt=0, le=1, description="largest share of the patch in its middle")

    @model_validator(mode="after")
    def _ordered(self) -> AnatPasteSettings:
        if self.opacity_min > self.opacity_max:
            raise ValueError(f"opacity_min {self.opacity_min} is larger than opacity_max {self.opacity_max}")
        if min(self.sizes) <= 0:
            raise ValueError(f"sizes {self.sizes} have one that is not larger than 0")
        return self


class AnatPasteConfig(LearnedConfig):
    """All settings of fitting the detector `anatpaste`."""

    score: str = Field(SCORE, description="a score, several joined by +, or auto: chosen on held-out normals")
    train: TrainConfig = Field(
        TrainConfig(epochs=256, batch_size=64, learning_rate=1e-3, learning_rate_end=0, weight_decay=3e-5),
        description="the published batch and number of epochs, see its page",
    )
    anatpaste: AnatPasteSettings = Field(default_factory=AnatPasteSettings)


class AnatPasteClassifier(PasteClassifier):
    """Two classes: the film, and a patch of it blended into its lungs."""

    settings_type = AnatPasteSettings
    name = "anatpaste"
    versions = ("normal", "pasted")

    def pasted(self, films_B1ss: Tensor, keys: Keys) -> list[Tensor]:
        """Films that drew the same size are pasted to together."""
        assert isinstance(self.options, AnatPasteSettings)
        options, pasted = self.options, films_B1ss.clone()
        size_numbers = below(keyed(keys.seed ^ _SIZES, keys.epoch, keys.rows, 1, 1)[:, 0, 0, 0], len(options.sizes))
        for number in torch.unique(size_numbers).tolist():
            rows = (size_numbers == number).nonzero()[:, 0]
            config = LesionConfig(
                kind="anatpaste",
                paste_size=options.sizes[number],
                amplitude_min=options.opacity_min,
                amplitude_max=options.opacity_max,
            )
            places = rows.to(films_B1ss.device)
            pasted[places] = synthesize_keyed(
                films_B1ss[places],
                seed=keys.seed,
                epoch=keys.epoch,
                indices=keys.rows[rows],
                config=config,
                check_values=False,
            )[0]
        return [pasted]


class AnatPaste(OneClassDetector):
    """A classifier of films with patches in their lungs, and a Gaussian of its features of normal ones."""

    method = "anatpaste"
    Settings = AnatPasteConfig
    Networks = AnatPasteClassifier
    published = "256 px, 65,536 updates of 128 versions, ResNet-18"
    published_epochs = 256

"""Supervised: the trunk learns the labels of the training films, for comparison with methods that see none.

A linear layer on the mean token says each label; the loss is binary cross-entropy over the labels that are known, all
equally, so a film with one label counts for less than a film with fourteen. Views are those that detectors train on:
turned, zoomed, shifted, with another grey curve, blurred and with noise. Nothing of this is published as such; it is
the usual recipe.

Labels are those of the films of the run and of no others: the command hands over training films only.

Shapes: B films, C labels, N films of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from afire.config import Config, Section
from afire.errors import UserError
from afire.lesions.augment import AugmentSettings, augmented
from afire.methods.base import ALL, Keys, Labels, Losses, Method, Outputs, Panel, Views, depth_draws
from afire.methods.health import Health, effective_rank
from afire.methods.twins import HEALTH_FILMS, Pool, pooled
from afire.nn import distributed
from afire.nn.vit import VisionTransformer, at_least_float32, check_films, full_precision, initialise


class SupervisedSettings(Section):
    """Settings of learning from labels."""

    labels: tuple[str, ...] = Field((), description="labels to learn; none = all that the films have, filled in")
    pool: Pool = Field("mean", description="what stands for a film: the mean of its tokens, or the class token")
    augment: AugmentSettings = Field(default_factory=AugmentSettings)


def label_loss(logits_BC: Tensor, labels_BC: Tensor) -> Tensor:
    """Binary cross-entropy, mean over the known labels of the films of all processes; NaN is unknown, 0 without any."""
    with full_precision(logits_BC):
        known = ~labels_BC.isnan()
        target = labels_BC.nan_to_num(0.0).to(torch.float32)
        losses = F.binary_cross_entropy_with_logits(at_least_float32(logits_BC), target, reduction="none")
        number = distributed.total(known.sum()).clamp_min(1)
        # DDP takes the mean of the processes' gradients: see afire.nn.distributed.
        own = (losses * known).sum() * (distributed.world_size() / number)
        return distributed.with_global_value(own)


class Supervised(Method):
    """An encoder and a linear layer."""

    networks = ("encoder",)
    sections = ()
    settings_type = SupervisedSettings
    options: SupervisedSettings
    learns_from_labels = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.encoder = VisionTransformer.from_config(config.encoder, config.image)
        self.says = nn.Linear(config.encoder.width, max(len(self.options.labels), 1))
        initialise(self, torch.Generator().manual_seed(config.seed))
        # No buffer: labels of patients do not belong into weights.
        self.labels: Labels | None = None

    @classmethod
    def asked_labels(cls, config: Config) -> tuple[str, ...]:
        return SupervisedSettings.model_validate(config.options).labels

    @classmethod
    def settled(cls, config: Config, films: int, labels: tuple[str, ...]) -> Config:
        """The labels are a setting: the network has an output for each of them."""
        options: dict[str, Any] = {**config.options, "labels": [*labels]}
        return config.model_copy(update={"options": options})

    def begin_labels(self, labels: Labels) -> None:
        both = (labels.values == 1).any(dim=0) & (labels.values == 0).any(dim=0)
        if not both.any():
            raise UserError(
                "no label is both present and absent in the training films, so there is nothing to learn; choose "
                "others with --set options.labels=[...], or another split."
            )
        self.labels = labels

    @torch.no_grad()
    def views(self, images: Tensor, keys: Keys) -> Views:
        """The films, changed, and their labels (B, C)."""
        changed, _ = augmented(
            images, None, seed=keys.seed, epoch=keys.epoch, rows=keys.rows, settings=self.options.augment
        )
        views = {"images": changed, "labels": self._labels_of(keys.rows).to(images)}
        if self.config.encoder.drop_path > 0:
            draws = depth_draws(self.config.encoder.depth, keys.seed, keys.step, keys.rows)
            views["depth"] = draws.to(images.device)
        return views

    def _labels_of(self, rows_B: Tensor) -> Tensor:
        if self.labels is None:  # outside a run, as when operations are counted
            return torch.full((len(rows_B), self.says.out_features), torch.nan)
        return self.labels.values[torch.searchsorted(self.labels.rows, rows_B)]

    def forward(self, views: Views) -> Outputs:
        """Logits (B, C) beside the labels."""
        check_films(views["images"], self.config.image.channels, "images", values=self.config.run.check_images)
        return {"logits": self._logits(views["images"], views.get("depth")), "labels": views["labels"]}

    def _logits(self, images: Tensor, depth: Tensor | None = None) -> Tensor:
        logits: Tensor = self.says(pooled(self.encoder(self.normalise(images), depth), self.options.pool))
        return logits

    def losses(self, outputs: Outputs, turn: str = ALL) -> Losses:
        """The one loss there is."""
        loss = label_loss(outputs["logits"], outputs["labels"].detach())
        return Losses({"labels": loss}, loss)

    @torch.no_grad()
    def health(self, views: Views, losses: Mapping[str, float]) -> Health:
        """The known failure: every film gets the labels' mean frequency, whatever it shows."""
        shown = {name: view[:HEALTH_FILMS] for name, view in views.items()}
        logits, labels = self._logits(shown["images"]).float(), shown["labels"].float()
        known = ~labels.isnan()
        frequency = self._frequencies(labels)
        loss = label_loss_of_one(logits.sigmoid(), labels, known)
        constant = label_loss_of_one(frequency.expand_as(labels), labels, known)
        explained = 1 - loss / max(constant, 1e-12)
        rank = effective_rank(self.encode(shown["images"]).flatten(0, 1))
        numbers = {"effective_rank": rank, "explained": explained, "labels": losses["labels"]}
        text = f"rank {rank:.0f}, {explained:.0%} of the labels' entropy explained"
        if rank < 2:
            reason = f"collapse: the encoder's features have one direction left (effective rank {rank:.1f})"
            return Health(numbers, "red", reason, text)
        if explained < 0.01:
            reason = "labels are told no better than by their frequency in the training films so far"
            return Health(numbers, "amber", reason, text)
        return Health(numbers, "green", "labels are told from the films", text)

    def _frequencies(self, labels_BC: Tensor) -> Tensor:
        """How often each label is present in the training films."""
        values = labels_BC if self.labels is None else self.labels.values.to(labels_BC)
        return values.nanmean(dim=0).nan_to_num(0.5).clamp(1e-3, 1 - 1e-3)

    def panels(self, views: Views, count: int) -> list[Panel]:
        """The films as the network saw them."""
        return [Panel("film as it was shown", views["images"][:count])]

    @classmethod
    def trunk_prefix(cls, network: str | None = None) -> str:
        return f"{cls.network(network)}."


def label_loss_of_one(says_BC: Tensor, labels_BC: Tensor, known_BC: Tensor) -> float:
    """Binary cross-entropy of probabilities on the films of this process alone."""
    if not known_BC.any():
        return 0.0
    return float(F.binary_cross_entropy(says_BC[known_BC], labels_BC[known_BC]))

"""What changes with the step: learning rate, weight decay, EMA momentum, teacher temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass

from afire.config import LossConfig, TrainingConfig


@dataclass(frozen=True)
class StepSettings:
    """The values in force at one step."""

    learning_rate: float
    weight_decay: float
    teacher_momentum: float
    teacher_temperature: float


@dataclass(frozen=True)
class Schedules:
    """Values by step, counted from 0. ``films_per_step`` is the global batch of one update, before views."""

    training: TrainingConfig
    losses: LossConfig
    steps_per_epoch: int
    films_per_step: int

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.steps_per_epoch * self.training.epochs

    @property
    def peak_learning_rate(self) -> float:
        """The linear scaling rule: the setting is for a global batch of 256."""
        return self.training.learning_rate * self.films_per_step / 256

    def at(self, step: int) -> StepSettings:
        """The values of ``step``."""
        recipe, losses = self.training, self.losses
        warmup = min(round(recipe.warmup_epochs * self.steps_per_epoch), self.steps)
        if step < warmup:
            rate = self.peak_learning_rate * (step + 1) / warmup
        else:
            rate = cosine(self.peak_learning_rate, recipe.learning_rate_end, step - warmup, self.steps - warmup)
        warming = losses.teacher_temperature_epochs * self.steps_per_epoch
        share = min(step / warming, 1.0) if warming else 1.0
        start, end = losses.teacher_temperature_start, losses.teacher_temperature
        return StepSettings(
            learning_rate=rate,
            weight_decay=cosine(recipe.weight_decay, recipe.weight_decay_end, step, self.steps),
            teacher_momentum=cosine(recipe.teacher_momentum, 1.0, step, self.steps),
            teacher_temperature=start + (end - start) * share,
        )


def cosine(start: float, end: float, step: int, steps: int) -> float:
    """Half a cosine from ``start`` at step 0 to ``end`` at the last of ``steps`` steps."""
    share = min(step / max(steps - 1, 1), 1.0)
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * share))

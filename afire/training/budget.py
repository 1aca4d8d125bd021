"""How long a run is: in epochs, in film views, or in minutes. All of them become epochs, once, before the first step.

The number is recorded in ``config.yaml`` of the run, and a resumed run reads it there: nothing is measured twice. What
a recipe gives in epochs, such as a warm-up, keeps its share of the run, so that a long run is a short one stretched.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from afire.config import Config, RunConfig
from afire.errors import UserError
from afire.settings import load_config
from afire.training.run_folder import CONFIG, RunFolder

logger = logging.getLogger("afire")
_EVERY = ("checkpoint_epochs", "picture_epochs", "probe_epochs")  # of the group run: how often something is done


@dataclass(frozen=True)
class Speed:
    """Seconds that a step takes, the end of an epoch, a checkpoint, and all pictures and probes once."""

    step: float
    epoch_end: float = 0.0
    checkpoint: float = 0.0
    observers: float = 0.0

    def epochs(self, config: Config, steps_per_epoch: int) -> int:
        """How many epochs take ``training.minutes``; at least one."""
        run, recipe = config.run, config.training
        each, once = steps_per_epoch * self.step + self.epoch_end, 0.0
        for name, cost in (("checkpoint_epochs", self.checkpoint), (_observing(run), self.observers)):
            every = getattr(run, name)
            if not every:
                continue
            if name in run.model_fields_set:
                each += cost / every
            else:  # stretched with the run: as often in a long run as in a short one
                once += cost * math.ceil(recipe.epochs / every)
        return max(1, math.floor((60 * recipe.minutes - once) / each))


def _observing(run: RunConfig) -> str:
    """The setting by which observers look most often."""
    return min(("picture_epochs", "probe_epochs"), key=lambda name: getattr(run, name) or math.inf)


def lasting(config: Config, epochs: int) -> Config:
    """The same recipe for another number of epochs: what is given in epochs keeps its share of the run.

    Warm-ups decide about the weights and always follow. How often checkpoints and pictures are made follows unless it
    was asked for.
    """
    share = epochs / config.training.epochs
    if share == 1:
        return config
    recipe, losses, run = config.training, config.losses, config.run
    training = {
        "epochs": epochs,
        "warmup_epochs": recipe.warmup_epochs * share,
        "freeze_last_layer_epochs": _whole(recipe.freeze_last_layer_epochs, share),
    }
    temperature = {"teacher_temperature_epochs": _whole(losses.teacher_temperature_epochs, share)}
    every = {name: _whole(getattr(run, name), share) for name in _EVERY if name not in run.model_fields_set}
    return config.model_copy(
        update={
            "training": recipe.model_copy(update=training),
            "losses": losses.model_copy(update=temperature),
            "run": RunConfig.model_construct(run.model_fields_set, **{**run.model_dump(), **every}),
        }
    )


def _whole(epochs: int, share: float) -> int:
    """At least one, unless there was none."""
    return max(1, round(epochs * share)) if epochs else 0


def enough_epochs(config: Config, films: int) -> Config:
    """With the epochs in which ``films`` are looked at ``training.film_views_min`` times in all, where that is more."""
    needed = math.ceil(config.training.film_views_min / films)
    return lasting(config, max(needed, config.training.epochs))


def in_epochs(config: Config, films: int) -> Config:
    """The same, said in epochs alone: what studies do, whose trials are to be equally long."""
    if config.training.minutes:
        raise UserError("training.minutes would make every trial as long as its machine is fast; set training.epochs.")
    settled = enough_epochs(config, films)
    return settled.model_copy(update={"training": settled.training.model_copy(update={"film_views_min": 0})})


def as_begun(config: Config, folder: RunFolder) -> Config | None:
    """With the epochs that the run in ``folder`` was begun with; None where it says another budget than ``config``.

    A run of before there were film views counts epochs, and goes on to do so.
    """
    if not folder.exists:
        return None
    recipe, begun = config.training, load_config(file=folder.path / CONFIG).training
    if (recipe.film_views_min, recipe.minutes) == (begun.film_views_min, begun.minutes):
        return lasting(config, begun.epochs) if recipe.film_views_min or recipe.minutes else config
    if recipe.epochs == begun.epochs and not (begun.film_views_min or begun.minutes or recipe.minutes):
        return config.model_copy(update={"training": recipe.model_copy(update={"film_views_min": 0})})
    return None


def message(asked: Config, settled: Config, films: int, speed: Speed | None, steps_per_epoch: int) -> str:
    """What was derived, for people; empty where nothing was."""
    before, after = asked.training, settled.training
    if speed is not None:
        why = (
            f"{before.minutes:g} minutes at {speed.step:.3g} s a step of {before.batch_size} films and "
            f"{speed.epoch_end:.2g} s at the end of an epoch"
        )
    elif before.epochs != after.epochs:
        why = f"{before.film_views_min:,} film views of {films:,} films (training.film_views_min)"
    else:
        return ""
    count = f"{after.epochs:,} epoch{'s' if after.epochs > 1 else ''}"
    clauses = [f"{why}: {count} in place of {before.epochs:,}, {after.epochs * steps_per_epoch:,} steps"]
    alone = (steps_per_epoch * speed.step + speed.epoch_end) / 60 if speed is not None else 0.0
    if alone > before.minutes:
        clauses.append(f"an epoch alone takes {alone:.3g} minutes")
    if before.warmup_epochs:
        clauses.append(f"warm-up of {after.warmup_epochs:.3g} epochs, the same share of the run")
    return "; ".join(clauses)

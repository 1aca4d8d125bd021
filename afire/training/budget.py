"""How long a run is: in epochs, in film views, or in minutes.

All of them become epochs, once, before the first step. The number is recorded in ``config.yaml`` of the run, and a
resumed run reads it there: nothing is measured twice. What a recipe gives in epochs, such as a warm-up, keeps its share
of the run, so that a long run is a short one stretched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from afire.config import Config, RunConfig
from afire.errors import UserError
from afire.settings import load_config
from afire.training.run_folder import CONFIG, RunFolder

_MUCH = 0.05  # of the minutes: what is said before the first step
_EVERY = ("checkpoint_epochs", "picture_epochs", "probe_epochs")  # of the group run: how often something is done


@dataclass(frozen=True)
class Speed:
    """Seconds that a step takes, the end of an epoch, a checkpoint, all pictures and probes once, and what comes first.

    What comes first is all that is done before the first step, such as drawing what the films are compared with.
    """

    step: float
    epoch_end: float = 0.0
    checkpoint: float = 0.0
    observers: float = 0.0
    first: float = 0.0

    def epochs(self, config: Config, steps_per_epoch: int) -> int:
        """How many epochs take ``training.minutes``; at least one."""
        run, recipe = config.run, config.training
        per_epoch, once = steps_per_epoch * self.step + self.epoch_end, self.first
        for name, cost in (("checkpoint_epochs", self.checkpoint), (_observing(run), self.observers)):
            every = getattr(run, name)
            if not every:
                continue
            if name in run.model_fields_set:
                per_epoch += cost / every
            else:  # stretched with the run: as often in a long run as in a short one
                once += cost * math.ceil(recipe.epochs / every)
        return max(1, math.floor((60 * recipe.minutes - once) / per_epoch))


def _observing(run: RunConfig) -> str:
    """The setting that makes observers look most often."""
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
    """``epochs`` scaled by ``share``, at least one; 0 stays 0."""
    return max(1, round(epochs * share)) if epochs else 0


def enough_epochs(config: Config, films: int) -> Config:
    """With as many epochs as ``training.film_views_min`` views of ``films`` need, where that is more."""
    needed = math.ceil(config.training.film_views_min / films)
    return lasting(config, max(needed, config.training.epochs))


def in_epochs(config: Config, films: int) -> Config:
    """The same in epochs alone, for studies, whose trials must be equally long."""
    if config.training.minutes:
        raise UserError("training.minutes would make every trial as long as its machine is fast; set training.epochs.")
    settled = enough_epochs(config, films)
    return settled.model_copy(update={"training": settled.training.model_copy(update={"film_views_min": 0})})


def as_begun(config: Config, folder: RunFolder) -> Config | None:
    """With the epochs that the run in ``folder`` began with; None where its budget differs from that of ``config``.

    A run from before there were film views counts epochs, and continues so.
    """
    if not folder.exists:
        return None
    recipe, begun = config.training, load_config(file=folder.path / CONFIG).training
    if (recipe.film_views_min, recipe.minutes) == (begun.film_views_min, begun.minutes):
        return lasting(config, begun.epochs) if recipe.film_views_min or recipe.minutes else config
    if recipe.epochs == begun.epochs and not (begun.film_views_min or begun.minutes or recipe.minutes):
        return config.model_copy(update={"training": recipe.model_copy(update={"film_views_min": 0})})
    return None


def budget_message(config: Config, settled: Config, films: int, speed: Speed | None, steps_per_epoch: int) -> str:
    """A message about the epochs that were derived; empty where none were."""
    before, after = config.training, settled.training
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
    if speed is not None and speed.first > _MUCH * 60 * before.minutes:
        clauses.append(f"{speed.first:.2g} s pass before the first step")
    if alone > before.minutes:
        clauses.append(f"an epoch alone takes {alone:.3g} minutes")
    if before.warmup_epochs:
        clauses.append(f"warm-up of {after.warmup_epochs:.3g} epochs, the same share of the run")
    return "; ".join(clauses)

"""Pre-training: how long the run is to be, by a short trial where it is given in minutes; then the run itself."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from afire.config import Config
from afire.data.pack import Films
from afire.errors import UserError
from afire.methods import method_type
from afire.methods.base import Learner
from afire.nn import distributed
from afire.training.budget import Speed, as_begun, budget_message, enough_epochs, lasting
from afire.training.engine import any_process
from afire.training.journal import PretrainingJournal
from afire.training.pretraining import Observer, Pretraining, PretrainResult, Start
from afire.training.run_folder import RunFolder

logger = logging.getLogger("afire")

_WARM_STEPS, _FEWEST_STEPS, _TRIAL_SECONDS = 2, 3, 10.0
_LONG = 1000  # times as many epochs as the run: a trial ends by the clock


def pretrain(
    config: Config,
    films: Films,
    out: Path,
    rows: np.ndarray | None = None,
    *,
    source: str = "",
    learner: type[Learner] | None = None,
    start: Start | None = None,
    behind: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    device: str = "auto",
    observers: Sequence[Observer] | Callable[[Config], Sequence[Observer]] = (),
) -> PretrainResult:
    """Train on the ``rows`` of ``films`` (all of them by default) and write the run folder ``out``.

    ``learner`` is what learns, made from ``config``: by default the method that ``config`` names. ``start`` gives it
    its first weights, those of the run ``behind``, whose films this run has seen as well. ``observers`` are called at
    the end of an epoch on the first process; numbers they return are logged. Where they depend on how long the run is,
    they are made from its settings, in which film views and minutes have become epochs (:mod:`afire.training.budget`).
    """
    learner = learner or method_type(config.method)
    make = observers if callable(observers) else lambda _: observers
    with RunFolder(out) as folder:
        config = _settled(config, learner, films, folder, rows, start, resume, force, device, make)
        watching = make(config)
        run = Pretraining(config, learner, films, folder, rows, source, start, behind, resume, force, device, watching)
        ending = run.train()
        if not learner.trains:
            run.save()
        return run.result(ending)


def _settled(
    config: Config,
    learner: type[Learner],
    films: Films,
    folder: RunFolder,
    rows: np.ndarray | None,
    start: Start | None,
    resume: bool,
    force: bool,
    device: str,
    observers: Callable[[Config], Sequence[Observer]],
) -> Config:
    """The settings with the number of epochs that the run begins with, or began with."""
    begun = as_begun(config, folder) if resume else None
    if begun is not None:
        return begun
    count = len(films) if rows is None else len(rows)
    steps_per_epoch, speed = count // config.training.batch_size, None
    if not (config.training.minutes and learner.trains):
        settled = enough_epochs(config, count)
    elif folder.exists and not force:
        return config  # which the run will be refused for: nothing to measure
    else:
        speed = _measured(config, learner, films, folder.path.parent, rows, start, device, observers(config))
        settled = lasting(config, speed.epochs(config, steps_per_epoch))
    message = budget_message(config, settled, count, speed, steps_per_epoch)
    if message and os.environ.get("RANK", "0") == "0":
        logger.info("%s", message)
    return settled


def _measured(
    config: Config,
    learner: type[Learner],
    films: Films,
    beside: Path,
    rows: np.ndarray | None,
    start: Start | None,
    device: str,
    observers: Sequence[Observer],
) -> Speed:
    """The speed of the run, measured in a short trial that leaves no files; the same on every process."""
    longer = lasting(config, _LONG * config.training.epochs)
    begun = time.perf_counter()
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-trial-", dir=beside) as name, RunFolder(Path(name)) as folder:
        trial = _Trial(longer, learner, films, folder, rows, "", start, None, False, False, device, observers)
        trial.begun = begun
        trial.train()
        if trial.speed is None:
            raise UserError("stopped while the speed was measured; nothing was written.")
        return trial.speed


class _Trial(Pretraining):
    """The first steps of a run, for its speed: then one end of an epoch, one checkpoint, and every observer once."""

    speed: Speed | None = None
    begun: float
    clock: tuple[float, ...] = ()

    def after_update(self) -> None:
        super().after_update()
        self.clock = (*self.clock, time.perf_counter())
        timed, spent = len(self.clock) - _WARM_STEPS, self.clock[-1] - self.clock[0]
        limit = min(_TRIAL_SECONDS, 60 * self.config.training.minutes / 20)
        if any_process(self.accelerator, timed >= _FEWEST_STEPS and spent > limit):
            step = (self.clock[-1] - self.clock[_WARM_STEPS - 1]) / timed
            idle = self._seconds(lambda: super(_Trial, self).end_epoch(1))
            watching = self._seconds(lambda: super(_Trial, self).end_epoch(0))  # a multiple of every number of epochs
            saving = self._seconds(super().save)
            first = self.clock[0] - self.begun
            measured = [step, idle, saving, max(watching - idle, 0.0), first]
            seconds = torch.tensor(measured, device=self.accelerator.device)
            self.speed = Speed(*distributed.maximum(seconds).tolist())

    def _seconds(self, call: Callable[[], None]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def is_over(self) -> bool:
        return self.speed is not None

    def end_epoch(self, epoch: int) -> None:
        """Only in the measurement."""

    def save(self) -> None:
        """Only in the measurement."""

    def make_journal(self) -> PretrainingJournal:
        """A journal that shows and writes nothing."""
        self.journal = PretrainingJournal(
            self.folder.path,
            first_step=0,
            epochs=self.config.training.epochs,
            steps_per_epoch=self.plan.steps_per_epoch,
            films_per_step=self.plan.batch_size,
            main=False,
        )
        return self.journal

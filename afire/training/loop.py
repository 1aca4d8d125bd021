"""The training loop, from one CPU to many nodes: pre-training and learning from labels both run in it.

One process needs nothing; several are started with ``torchrun`` or ``accelerate launch``. Everything random follows
from (seed, epoch or step, film), so a resumed run and a run on another number of processes see the same.

A :class:`Trainer` knows batches, gradients, updates, checkpoints and signals. What is learnt, what an epoch ends with
and when a run is over is up to its subclasses: :mod:`afire.training.pretraining` and :mod:`afire.tasks.supervised`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from afire.config import Section
from afire.data.keys import changed_films
from afire.data.pack import Films, PackedFilms
from afire.errors import UserError
from afire.files import write_json
from afire.nn import distributed
from afire.training import run_folder as checkpoints
from afire.training.batches import Batch, Plan, Prefetcher
from afire.training.engine import StopSignals, agree, explain, is_sharded, on_first_process
from afire.training.journal import Journal
from afire.training.run_folder import RunFolder, Tensors, collect


class RunSettings(Protocol):
    """What the loop reads of the group ``run``."""

    @property
    def checkpoint_minutes(self) -> float: ...
    @property
    def checkpoint_epochs(self) -> int: ...
    @property
    def keep_checkpoints(self) -> int: ...
    @property
    def on_bad_film(self) -> Literal["skip", "stop"]: ...


@dataclass(frozen=True)
class Ending:
    """How a run ended: ``finished``, ``stopped`` by a signal (its number is in ``signal``), or a name of its own."""

    status: str
    signal: int
    images_per_second: float
    data_wait: float
    bad_films: int


class Trainer(ABC):
    """One run. A subclass makes model, optimisers and plan in its ``__init__`` and ends it with :meth:`wrap`."""

    def __init__(
        self,
        accelerator: Accelerator,
        films: Films,
        plan: Plan,
        steps: int,
        folder: RunFolder,
        run: RunSettings,
        clip: float,
    ) -> None:
        self.accelerator, self.films, self.plan, self.steps = accelerator, films, plan, steps
        self.folder, self.run, self.clip = folder, run, clip
        self.step = self.first_step = 0
        self.last_save = time.monotonic()
        self.losses: dict[str, float] = {}
        self.model: nn.Module
        self.optimizers: dict[str, torch.optim.Optimizer]
        self.wrapped: nn.Module
        self.wrapped_optimizers: dict[str, Any]

    # What a subclass says

    @abstractmethod
    def begin_step(self) -> Mapping[str, float]:
        """Set what changes with the step; what it returns is logged."""

    @abstractmethod
    def forward_backward(self, batches: Sequence[Batch], turn: str) -> dict[str, float]:
        """Add up the gradients of one update of ``turn``; the losses over all processes."""

    @abstractmethod
    def end_epoch(self, epoch: int) -> None:
        """Evaluate the epoch that ended, counted from 1. A collective call."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside weights, optimisers and the step."""

    @abstractmethod
    def make_journal(self) -> Journal:
        """Where numbers are written and shown."""

    def rests(self, turn: str) -> bool:
        """Whether the optimiser ``turn`` leaves this step out; never all of them."""
        return False

    def before_clip(self) -> None:  # noqa: B027  most have nothing to drop
        """Drop gradients that must not count."""

    def after_update(self) -> None:  # noqa: B027
        """Update what the optimisers do not."""

    def is_over(self) -> bool:
        """Whether there is nothing left to do."""
        return self.step >= self.steps

    def ends_as(self) -> str | None:
        """The status of a run that ends before its last step by its own rules, else None."""
        return None

    def before_step(self) -> None:  # noqa: B027
        """Called when a batch is there: a new epoch or phase may begin."""

    # What it does

    def resume_from(
        self, config: Section, data: Mapping[str, Any], resume: bool, force: bool
    ) -> checkpoints.Checkpoint | None:
        """Hold and open the run folder; the checkpoint to go on from, if any, on every process. A collective call."""
        main, begun = self.accelerator.is_main_process, None

        def begin() -> None:
            nonlocal begun
            self.folder.hold()
            changed = changed_films(self.folder.path, self.films, self.plan.rows) if resume else []
            begun = self.folder.begin(config, data, resume, force, changed, self._check_fits)

        on_first_process(self.accelerator, begin, "in its run folder")
        self.accelerator.wait_for_everyone()
        checkpoint = begun if main or not resume else checkpoints.newest_checkpoint(self.folder.path)
        if checkpoint is not None:
            self._check_same_steps(checkpoint)
            self.step = self.first_step = checkpoint.step
        return checkpoint

    def _check_fits(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Whether the run can go on from it; its weights are put into the model once more by :meth:`wrap`."""
        self._check_same_steps(checkpoint)
        checkpoints.restore_model(checkpoint, self.model)

    def _check_same_steps(self, checkpoint: checkpoints.Checkpoint) -> None:
        """A step must mean the same films before and after, or schedules and epochs would diverge."""
        before = checkpoint.state.get("steps_per_epoch")
        if before is not None and int(before) != self.plan.steps_per_epoch:
            raise UserError(
                f"{checkpoint.folder} counts {before} steps in an epoch, but batches of {self.plan.batch_size} films "
                f"make {self.plan.steps_per_epoch}; resume with the batch of all "
                f"processes together that the run was begun with: {self._batch_of(int(before))}."
            )

    def _batch_of(self, steps_per_epoch: int) -> str:
        films = len(self.plan.rows) * self.plan.passes
        low, high = films // (steps_per_epoch + 1) + 1, films // steps_per_epoch
        return f"training.batch_size={high}" if low == high else f"training.batch_size from {low} to {high}"

    def wrap(self, checkpoint: checkpoints.Checkpoint | None) -> None:
        """Restore what a checkpoint holds, and hand model and optimisers to accelerate."""
        if checkpoint is not None:
            checkpoints.restore_model(checkpoint, self.model)
        if is_sharded(self.model):  # by an earlier phase; only the optimisers are new
            optimizers = [self.accelerator.prepare_optimizer(optimizer) for optimizer in self.optimizers.values()]
        else:
            self.wrapped, *optimizers = self.accelerator.prepare(self.model, *self.optimizers.values())
        self.wrapped_optimizers = dict(zip(self.optimizers, optimizers, strict=True))
        if checkpoint is not None:  # after accelerate has given the optimisers the weights that they move
            checkpoints.restore_optimizers(checkpoint, self.model, list(self.optimizers.values()))
        if checkpoint is not None and self.accelerator.scaler is not None and checkpoint.state.get("scaler"):
            self.accelerator.scaler.load_state_dict(dict(checkpoint.state["scaler"]))

    def train(self) -> Ending:
        """Run to the end, to a signal or to an end of its own; the last checkpoint is always of the last whole step."""
        journal = self.journal = self.make_journal()
        batches = Prefetcher(self.films, self.plan, self.first_step, self.steps, self.run.on_bad_film)
        status, signal = "finished", 0
        try:
            with StopSignals() as stop, journal:
                for pieces in batches if not self.is_over() else ():
                    self.before_step()
                    rates = self.begin_step()
                    for turn in [turn for turn in self.optimizers if not self.rests(turn)]:
                        losses = self.forward_backward(pieces, turn)
                        norm = self._clip(turn)
                        finite = bool(np.isfinite([*losses.values()]).all() and self._usable(norm))
                        flags = agree(self.accelerator, finite, stop.received, self._clock_is_due())
                        if flags.not_finite:
                            self._give_up(losses, norm, pieces)
                        self._update(turn)
                        self.losses = {**self.losses, **losses}
                    self.after_update()
                    self.step += 1
                    journal.step(self.step, self.losses, rates, norm, batches.waited, len(batches.reader.bad))
                    ends_epoch = self.step % self.plan.steps_per_epoch == 0
                    if ends_epoch:
                        self.end_epoch(self.step // self.plan.steps_per_epoch)
                    own_end = self.ends_as()
                    if self._save_is_due(ends_epoch, flags.save) or flags.stop or own_end:
                        self.save()
                    if flags.stop and not self.is_over():
                        status, signal = "stopped", flags.signal
                    elif own_end:
                        status = own_end
                    if flags.stop or own_end or self.is_over():
                        break
        except RuntimeError as error:
            raise explain(error, self.plan.world, self.step) from error
        finally:
            batches.close()
        speed, wait = journal.images_per_second, journal.data_wait(batches.waited)
        return Ending(status, signal, speed, wait, len(batches.reader.bad))

    def images(self, batch: Batch) -> Tensor:
        """A batch as images (B, 1, S, S) in [0, 1] on the device."""
        raw = batch.raw.to(self.accelerator.device, non_blocking=True)
        return self.films.to_unit(raw) if isinstance(self.films, PackedFilms) else raw

    def _clip(self, turn: str) -> float:
        """Limit the norm of the gradients; the norm before the limit."""
        self.before_clip()
        parameters = self.wrapped.parameters()
        if len(self.optimizers) > 1:
            parameters = (weight for group in self.optimizers[turn].param_groups for weight in group["params"])
        norm = self.accelerator.clip_grad_norm_(parameters, self.clip or float("inf"))
        return float(distributed.whole(norm))

    def _usable(self, norm: float) -> bool:
        """A gradient scaler deals with an infinite norm itself: it skips the step and scales down."""
        return bool(np.isfinite(norm)) or self.accelerator.scaler is not None

    def _update(self, turn: str) -> None:
        self.wrapped_optimizers[turn].step()
        for optimizer in self.wrapped_optimizers.values():
            optimizer.zero_grad()

    def _save_is_due(self, ends_epoch: bool, by_clock: bool) -> bool:
        every = self.run.checkpoint_epochs * self.plan.steps_per_epoch
        return by_clock or self.is_over() or bool(ends_epoch and every and self.step % every == 0)

    def _clock_is_due(self) -> bool:
        return time.monotonic() - self.last_save > 60 * self.run.checkpoint_minutes

    def save(self) -> None:
        """Write a checkpoint. A collective call."""
        tensors = self._tensors()
        on_first_process(self.accelerator, lambda: self.write_checkpoint(tensors), "its checkpoint")
        self.last_save = time.monotonic()

    def _tensors(self) -> Tensors:
        """Weights and moments, whole on the first process. A collective call."""
        optimizers, main = list(self.optimizers.values()), self.accelerator.is_main_process
        return collect(self.model, optimizers, keep=main)

    def write_checkpoint(self, tensors: Tensors) -> None:
        """On the first process."""
        optimizers, keep = list(self.optimizers.values()), self.run.keep_checkpoints
        checkpoints.save_checkpoint(self.folder.path, self.model, optimizers, self.whole_state(), keep, tensors)

    def whole_state(self) -> dict[str, Any]:
        """What ``state.json`` of a checkpoint says."""
        scaler = self.accelerator.scaler
        return {
            "step": self.step,
            "epoch": self.step // self.plan.steps_per_epoch,
            "steps_per_epoch": self.plan.steps_per_epoch,
            "processes": self.plan.world,
            "scaler": scaler.state_dict() if scaler is not None else None,
            **self.state(),
        }

    def _give_up(self, losses: Mapping[str, float], norm: float, pieces: Sequence[Batch]) -> None:
        """Save the state before the update and the films of every process, then end with a message."""
        rank, folder = self.plan.rank, self.folder.path / "failure"
        rows = [int(row) for batch in pieces for row in batch.rows]
        report = {
            "step": self.step,
            "epoch": self.step // self.plan.steps_per_epoch,
            "rank": rank,
            "rows": rows,
            "images": self.films.manifest.table["image"].iloc[rows].tolist(),
            "losses": {name: repr(value) for name, value in losses.items()},
            "gradient_norm": repr(norm),
        }
        write_json(folder / f"rank-{rank}.json", report)
        tensors = self._tensors()
        if self.accelerator.is_main_process:
            checkpoints.write_folder(folder / "state", *tensors, self.whole_state())
        bad = [name for name, value in losses.items() if not np.isfinite(value)] or ["gradient"]
        raise UserError(
            f"{', '.join(bad)} is not finite at step {self.step} (rows {rows[:6]}...); nothing was updated. "
            f"{folder} holds the weights before it and names its films; try a lower training.learning_rate."
        )

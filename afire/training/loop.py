"""The pre-training loop, from one CPU to many nodes.

One process needs nothing; several are started with ``torchrun`` or ``accelerate launch``. Everything random follows
from (seed, epoch, row of the film, view), so a resumed run and a run on another number of processes see the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from afire.config import Config
from afire.data.keys import remember_behind, remember_films
from afire.data.pack import Films, PackedFilms, check_reading
from afire.errors import UserError
from afire.files import write_json
from afire.lesions.synthesis import synthesize_keyed, token_labels
from afire.methods.afire import AFiRe, Losses, count_parameters
from afire.methods.health import Health, measure
from afire.training import checkpoint as checkpoints
from afire.training.batches import Batch, Plan, Prefetcher
from afire.training.engine import (
    Schedules,
    StepSettings,
    StopSignals,
    agree,
    data_hash,
    depth_generator,
    explain,
    gradient_exchange,
    make_accelerator,
    make_optimizer,
    on_first_process,
)
from afire.training.journal import Metrics
from afire.training.run_folder import RunFolder

logger = logging.getLogger("afire")


@dataclass(frozen=True)
class EpochView:
    """What an observer sees at the end of an epoch: the model, some films with their lesions, and the health."""

    model: AFiRe
    out: Path
    epoch: int  # counted from 1: the epochs that are done
    step: int
    images: Tensor
    lesioned: Tensor
    mask: Tensor
    health: Health | None


Observer = Callable[[EpochView], Mapping[str, float] | None]


@dataclass(frozen=True)
class PretrainResult:
    """How a run ended: ``finished``, ``stopped`` by a signal, or ``collapsed`` by its own setting."""

    status: str
    signal: int
    step: int
    steps: int
    losses: Mapping[str, float]
    images_per_second: float
    data_wait: float


def pretrain(
    config: Config,
    films: Films,
    out: Path,
    rows: np.ndarray | None = None,
    *,
    source: str = "",
    init: str | Path | None = None,
    first_weights: Mapping[str, Tensor] | None = None,
    resume: bool = False,
    force: bool = False,
    device: str = "auto",
    observers: Sequence[Observer] = (),
) -> PretrainResult:
    """Pre-train AFiRe on the ``rows`` of ``films`` (all of them by default) and write the run folder ``out``.

    ``init`` gives the encoder its first weights; ``first_weights``, the state of a model of these settings, gives all
    parts theirs (both networks, decoder, prototypes). ``observers`` are called at the end of an epoch on the first
    process; numbers they return are logged.
    """
    return Run(config, films, out, rows, source, init, first_weights, resume, force, device, observers).train()


class Run:
    """One pre-training run: everything is made in ``__init__``, :meth:`train` is the loop."""

    def __init__(
        self,
        config: Config,
        films: Films,
        out: Path,
        rows: np.ndarray | None,
        source: str,
        init: str | Path | None,
        first_weights: Mapping[str, Tensor] | None,
        resume: bool,
        force: bool,
        device: str,
        observers: Sequence[Observer],
    ) -> None:
        self.config, self.films, self.observers = config, films, observers
        if films.size != config.image.size:
            raise UserError(
                f"the films are {films.size} px, but image.size is {config.image.size}; pack them at that size, or set "
                f"image.size={films.size}."
            )
        check_reading(films, config.image)
        self.accelerator = make_accelerator(config.training.precision, device)
        rows = np.arange(len(films)) if rows is None else np.sort(np.asarray(rows, dtype=np.int64))
        recipe, ranks = config.training, self.accelerator
        self.plan = Plan(
            rows, config.seed, recipe.batch_size, ranks.num_processes, ranks.process_index, recipe.accumulate
        )
        self.schedules = Schedules(recipe, config.losses, self.plan.steps_per_epoch, self.plan.films_per_step)
        self.data = {"source": source, "films": len(films), "used": len(rows), "hash": data_hash(films, rows)}
        self.model = AFiRe(config)
        if init is not None:
            self._start_from(init)
        if first_weights is not None:
            self.model.load_state_dict(first_weights)
        self.folder = RunFolder(out)  # from here on something is written: what can be refused was refused before
        found = self.folder.begin(config, self.data, resume, force) if ranks.is_main_process else None
        if ranks.is_main_process:
            remember_films(out, films, rows)
            if init is not None:
                remember_behind(out, init)
        ranks.wait_for_everyone()
        found = found if ranks.is_main_process or not resume else checkpoints.newest_checkpoint(out)

        self.model.to(ranks.device).train()
        self.optimizer = make_optimizer(self.model, config)
        if found is not None:
            checkpoints.restore(found, self.model, self.optimizer)
        self.first_step = found.step if found else 0
        if config.training.compile:
            self.model.compile()
        self.wrapped, self.wrapped_optimizer = ranks.prepare(self.model, self.optimizer)
        if found is not None and ranks.scaler is not None and found.state.get("scaler"):
            ranks.scaler.load_state_dict(dict(found.state["scaler"]))
        self.step = self.first_step
        # Of the last step and epoch: a run that was killed after its last checkpoint has nothing left to measure.
        before = found.state if found is not None else {}
        self.losses: dict[str, float] = dict(before.get("losses") or {})
        self.health: Health | None = Health(**before["health"]) if before.get("health") else None
        self.red_epochs = int(before.get("red_epochs", 0))
        self.last_save = time.monotonic()

    def _start_from(self, init: str | Path) -> None:
        from afire.weights.open import start_from

        start_from(init)(self.model)

    def train(self) -> PretrainResult:
        """Run to the end, to a signal or to a collapse; the last checkpoint is always of the last whole step."""
        plan, config = self.plan, self.config
        metrics = Metrics(self.folder.path, config, self.schedules, self.first_step, self.accelerator.is_main_process)
        batches = Prefetcher(self.films, plan, self.first_step, self.schedules.steps, config.run.on_bad_film)
        status = "finished"
        try:
            with StopSignals() as stop, metrics:
                for parts in batches:
                    settings = self.schedules.at(self.step)
                    bank_before = self._bank_copy()
                    losses, last = self._forward_backward(parts, settings)
                    norm = self._clip()
                    finite = np.isfinite(losses["total"]) and (np.isfinite(norm) or self.accelerator.scaler is not None)
                    flags = agree(self.accelerator, bool(finite), stop.received, self._clock_is_due())
                    if flags.not_finite:
                        self._give_up(losses, norm, parts, bank_before)
                    self._update(settings)
                    self.losses = losses
                    metrics.step(self.step, losses, settings, norm, batches.waited, len(batches.reader.bad))
                    ends_epoch = self.step % plan.steps_per_epoch == 0
                    if ends_epoch:
                        self._end_epoch(last, metrics)
                    collapsed = config.run.stop_on_collapse and self.red_epochs >= 2
                    if self._save_is_due(ends_epoch, flags.save) or flags.stop or collapsed:
                        self._save()
                    if flags.stop or collapsed:
                        status = "stopped" if flags.stop else "collapsed"
                        break
        except RuntimeError as error:
            raise explain(error, plan.world, self.step) from error
        finally:
            batches.close()
        return self._finish(status, flags.signal if status == "stopped" else 0, metrics, batches)

    def _forward_backward(
        self, parts: list[Batch], settings: StepSettings
    ) -> tuple[dict[str, float], tuple[Tensor, ...]]:
        """Add up the gradients of one update; the mean losses and the tensors of the last part."""
        self.model.teacher_temperature = settings.teacher_temperature
        drops = self.config.encoder.drop_path > 0
        generator = depth_generator(self.config.seed, self.step, self.plan.rank) if drops else None
        sums: dict[str, float] = {}
        for number, batch in enumerate(parts):
            images, lesioned, mask = self._draw(batch)
            with gradient_exchange(self.accelerator, self.wrapped, now=number == len(parts) - 1):
                with self.accelerator.autocast():
                    losses: Losses = self.wrapped(images, lesioned, mask, generator)
                self.accelerator.backward(losses.total / len(parts))
            for name, value in losses.as_floats().items():
                sums[name] = sums.get(name, 0.0) + value / len(parts)
        return sums, (images, lesioned, mask)

    def _draw(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Films on the device, and their lesions, drawn there."""
        raw = batch.raw.to(self.accelerator.device, non_blocking=True)
        images = self.films.to_unit(raw) if isinstance(self.films, PackedFilms) else raw
        epoch = self.step // self.plan.steps_per_epoch
        rows = torch.from_numpy(batch.rows)
        lesioned, mask = synthesize_keyed(
            images, seed=self.config.seed, epoch=epoch, indices=rows, config=self.config.lesions
        )
        return images, lesioned, mask

    def _clip(self) -> float:
        """Drop the gradient of a frozen last layer and limit the norm of the rest; the norm before the limit."""
        if self.step < self.config.training.freeze_last_layer_epochs * self.plan.steps_per_epoch:
            for parameter in self.model.last_layer_parameters():
                parameter.grad = None
        limit = self.config.training.clip or float("inf")
        return float(self.accelerator.clip_grad_norm_(self.wrapped.parameters(), limit))

    def _update(self, settings: StepSettings) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate
            group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0
        self.wrapped_optimizer.step()
        self.wrapped_optimizer.zero_grad()
        self.model.update_teacher(settings.teacher_momentum)
        self.step += 1

    def _end_epoch(self, last: tuple[Tensor, ...], metrics: Metrics) -> None:
        images, lesioned, mask = (tensor[:64] for tensor in last)
        self.health = self._measure(images, lesioned[:: self.config.lesions.views], mask[:: self.config.lesions.views])
        if self.health is not None:
            self.red_epochs = self.red_epochs + 1 if self.health.verdict()[0] == "red" else 0
        if self.accelerator.is_main_process:
            epoch = self.step // self.plan.steps_per_epoch
            view = EpochView(self.model, self.folder.path, epoch, self.step, images, lesioned, mask, self.health)
            found: dict[str, float] = {}
            self.model.eval()
            for observer in self.observers:
                found.update(observer(view) or {})
            self.model.train()
            metrics.epoch(self.step, epoch, self.health, found)
        self.accelerator.wait_for_everyone()

    @torch.no_grad()
    def _measure(self, images: Tensor, lesioned: Tensor, mask: Tensor) -> Health | None:
        """Health on one batch of this process; None for models without clusters or prototypes."""
        model, losses = self.model, self.config.losses
        if model.bank is None or losses.contrast != "probability":
            return None
        count = min(len(images), len(lesioned))
        student = model.assign(lesioned[:count], "student").exp()
        tokens = model.encode(images[:count], "teacher")
        teacher = model.assign_tokens(tokens, "teacher").exp()
        labels = token_labels(mask[:count], model.patch_size)
        return measure(student, teacher, tokens, labels, model.prototypes, self.losses["structure"])

    def _save_is_due(self, ends_epoch: bool, by_clock: bool) -> bool:
        every = self.config.run.checkpoint_epochs * self.plan.steps_per_epoch
        return by_clock or self.step == self.schedules.steps or bool(ends_epoch and every and self.step % every == 0)

    def _clock_is_due(self) -> bool:
        return time.monotonic() - self.last_save > 60 * self.config.run.checkpoint_minutes

    def _save(self) -> None:
        def write() -> None:
            keep = self.config.run.keep_checkpoints
            checkpoints.save_checkpoint(self.folder.path, self.model, self.optimizer, self._state(), keep)

        on_first_process(self.accelerator, write, "its checkpoint")
        self.last_save = time.monotonic()

    def _state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "step": self.step,
            "epoch": self.step // self.plan.steps_per_epoch,
            "steps_per_epoch": self.plan.steps_per_epoch,
            "processes": self.plan.world,
            "data_hash": self.data["hash"],
            "losses": self.losses,
            "health": _if_finite(self.health.as_dict()) if self.health is not None else None,
            "red_epochs": self.red_epochs,
            "config": self.config.model_dump(),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }

    def _bank_copy(self) -> Tensor | None:
        return None if self.model.bank is None else self.model.bank.prototypes.clone()

    def _give_up(self, losses: Mapping[str, float], norm: float, parts: list[Batch], bank: Tensor | None) -> None:
        """Save the state before the update and the films of every process, then end with a sentence."""
        rank, folder = self.plan.rank, self.folder.path / "failure"
        rows = [int(row) for batch in parts for row in batch.rows]
        names = self.films.manifest.table["image"].iloc[rows].tolist()
        if bank is not None and self.model.bank is not None:
            self.model.bank.prototypes.copy_(bank)
        report = {
            "step": self.step,
            "epoch": self.step // self.plan.steps_per_epoch,
            "rank": rank,
            "rows": rows,
            "images": names,
            "losses": {name: repr(value) for name, value in losses.items()},
            "gradient_norm": repr(norm),
        }
        write_json(folder / f"rank-{rank}.json", report)
        if self.accelerator.is_main_process:
            tensors = checkpoints.optimizer_state(self.model, self.optimizer)
            checkpoints.write_folder(folder / "state", self.model.state_dict(), tensors, self._state())
        bad = [name for name, value in losses.items() if not np.isfinite(value)] or ["gradient"]
        raise UserError(
            f"{', '.join(bad)} is not finite at step {self.step} (rows {rows[:6]}...); nothing was updated. "
            f"{folder} holds the weights before it and names its films; try a lower training.learning_rate."
        )

    def _finish(self, status: str, signal: int, metrics: Metrics, batches: Prefetcher) -> PretrainResult:
        speed, wait = metrics.images_per_second, metrics.data_wait(batches.waited)
        if self.accelerator.is_main_process:
            colour, reason = self.health.verdict() if self.health else ("-", "not measured")
            summary = {
                "status": status,
                "step": self.step,
                "steps": self.schedules.steps,
                "epoch": self.step // self.plan.steps_per_epoch,
                "losses": self.losses,
                "health": [colour, reason],
                "images_per_second": speed,
                "data_wait": wait,
                "processes": self.plan.world,
                "parameters": count_parameters(self.model)["trained"],
                "bad_films": len(batches.reader.bad),
                "peak_memory_bytes": metrics.peak_memory(),
            }
            self.folder.finish(self.config, self.data, summary)
        return PretrainResult(status, signal, self.step, self.schedules.steps, self.losses, speed, wait)


def _if_finite(numbers: dict[str, float]) -> dict[str, float] | None:
    """``numbers``, unless one of them could not be stored as JSON."""
    return numbers if np.isfinite(list(numbers.values())).all() else None

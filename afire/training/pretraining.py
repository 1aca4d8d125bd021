"""What a pre-training does in every step, phase and epoch: any :class:`~afire.methods.base.Learner` in the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from afire.config import Config
from afire.data.keys import remember_behind, remember_films
from afire.data.pack import Films, check_reading
from afire.errors import UserError
from afire.methods import complete
from afire.methods.base import Keys, Learner, Losses, Outputs, Progress, Views, count_parameters, train_only
from afire.methods.health import Health
from afire.training import tracking
from afire.training.batches import Batch, Plan, Reader, run_labels
from afire.training.engine import (
    Schedules,
    any_process,
    compile_networks,
    data_hash,
    gathered,
    gradient_exchange,
    in_full_precision,
    is_sharded,
    make_accelerator,
    make_optimizer,
)
from afire.training.journal import PretrainingJournal, run_page
from afire.training.loop import Ending, Trainer
from afire.training.run_folder import RunFolder

Start = Callable[[Any], None]
"""Gives a learner its first weights."""

_RED_EPOCHS = 2  # in a row end a run that is to stop on collapse
_PASS_BATCH = 64


@dataclass(frozen=True)
class EpochView:
    """What an observer sees at the end of an epoch: the learner, views of some films, and the health."""

    model: Learner
    out: Path
    epoch: int  # counted from 1: the epochs that are done
    step: int
    views: Views
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


class Pretraining(Trainer):
    """One pre-training run."""

    model: Learner

    def __init__(
        self,
        config: Config,
        learner: type[Learner],
        films: Films,
        folder: RunFolder,
        rows: np.ndarray | None,
        source: str,
        start: Start | None,
        behind: str | Path | None,
        resume: bool,
        force: bool,
        device: str,
        observers: Sequence[Observer],
    ) -> None:
        rows = np.arange(len(films)) if rows is None else np.sort(np.asarray(rows, dtype=np.int64))
        config = complete(config, learner)
        label_names = learner.asked_labels(config)
        labels = run_labels(films.manifest, rows, label_names) if learner.learns_from_labels else None
        self.config = config = learner.settled(config, len(rows), labels.names if labels else ())
        self.observers, recipe = observers, config.training
        if not learner.trains and start is None:
            raise UserError(f"the method {config.method} learns nothing by itself; give it weights with --init.")
        if films.size != config.image.size:
            raise UserError(
                f"the films are {films.size} px, but image.size is {config.image.size}; pack them at that size, or set "
                f"image.size={films.size}."
            )
        check_reading(films, config.image)
        tracking.require(config.run.tracking)
        turns = len(learner.turns)
        ranks = make_accelerator(recipe.precision, device, unused_parameters=turns > 1, shard=recipe.shard)
        plan = Plan(rows, config.seed, recipe.batch_size, ranks.num_processes, ranks.process_index, recipe.accumulate)
        self.schedules = Schedules(recipe, plan.steps_per_epoch)
        steps = self.schedules.steps if learner.trains else 0
        super().__init__(ranks, films, plan, steps, folder, config.run, recipe.clip)
        self.data = {"source": source, "films": len(films), "used": len(rows), "hash": data_hash(films, rows)}
        self.model = learner(config)
        if recipe.frozen_blocks and start is None and not resume:
            raise UserError("training.frozen_blocks keeps blocks as they start: at random; give weights with --init.")
        self.model.hold_blocks()
        self._check_phases()
        if labels is not None:
            self.model.begin_labels(labels)
        if start is not None:
            start(self.model)
        # From here on something is written: what can be refused was refused before.
        checkpoint = self.resume_from(config, self.data, resume, force)
        if ranks.is_main_process:
            remember_films(folder.path, films, rows, beside_earlier=resume)
            if behind is not None:
                remember_behind(folder.path, behind)
        self.phase = self._phase_at(self.step)
        self.model.begin_phase(self.phase)
        self.model.to(ranks.device).train()
        self._make_optimizers()
        if recipe.compile:
            compile_networks(self.model, ranks)
        self.wrap(checkpoint)
        self.model.begin_run(torch.from_numpy(rows), self._read)
        # Of the last step and epoch: a run that was killed after its last checkpoint has nothing left to measure.
        before = checkpoint.state if checkpoint is not None else {}
        self.losses = dict(before.get("losses") or {})
        self.health = _read_health(before.get("health"))
        self.red_epochs = int(before.get("red_epochs", 0))
        self.views: Views = {}
        self.judged: Losses | None = None

    def _read(self, rows: Tensor) -> Tensor:
        """Films of some rows as images; a bad film is replaced by the next one."""
        return self.images(Reader(self.films, self.plan.rows, self.run.on_bad_film).read(rows.numpy()))

    def _make_optimizers(self) -> None:
        recipe, kind = self.config.training, self.model.optimizer
        self.optimizers = {
            turn: make_optimizer(self.model.parameters_of(turn), recipe, kind, self.model.layers_behind)
            for turn in self.model.turns
        }

    def train(self) -> Ending:
        try:
            return super().train()
        finally:
            self.model.end_run()

    # Phases

    def _check_phases(self) -> None:
        total = sum(phase.epochs for phase in self.model.phases())
        if total != self.config.training.epochs:
            raise UserError(
                f"the phases of {self.config.method} have {total} epochs, but training.epochs is "
                f"{self.config.training.epochs}."
            )

    def _phase_at(self, step: int) -> str:
        epoch, end = step // self.plan.steps_per_epoch, 0
        for phase in self.model.phases():
            end += phase.epochs
            if epoch < end:
                return phase.name
        return self.model.phases()[-1].name

    def before_step(self) -> None:
        epoch, within = divmod(self.step, self.plan.steps_per_epoch)
        if within:
            return
        phase = self._phase_at(self.step)
        if phase != self.phase:
            self.phase = phase
            self._only(None)  # else what the last turn left frozen would stay out of the phase
            self.model.begin_phase(phase)
            self._make_optimizers()  # other parameters are trained now: old moments would move what is frozen
            self.wrap(None)
        if self.model.prepares:
            with gathered(self.model):
                self.model.prepare(epoch, self._all_films)

    def _all_films(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every film of the run, in the order of the manifest, on every process."""
        for start in range(0, len(self.plan.rows), _PASS_BATCH):
            rows = self.plan.rows[start : start + _PASS_BATCH]
            yield self._read(torch.from_numpy(rows)), torch.from_numpy(rows)

    # A step

    def begin_step(self) -> Mapping[str, float]:
        rates = self.schedules.at(self.step)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rates.learning_rate * group["scale"]
                group["weight_decay"] = rates.weight_decay if group["decays"] else 0.0
        return {**rates._asdict(), **self.model.schedule(self._progress())}

    def _progress(self) -> Progress:
        return Progress(self.step, self.steps, self.plan.steps_per_epoch)

    def forward_backward(self, batches: Sequence[Batch], turn: str) -> dict[str, float]:
        self._only(turn)
        if len(batches) == 1:
            self.views = self._draw(batches[0])
            outputs = self._look(self.wrapped, self.views)
            self.judged = self.model.losses(outputs, turn)
            self.accelerator.backward(self.judged.total)
        else:
            self._accumulate(batches, turn)
        assert self.judged is not None
        return self.judged.as_floats()

    def _accumulate(self, batches: Sequence[Batch], turn: str) -> None:
        """The losses of the whole batch, though only a piece of it fits into memory with its gradients.

        First every piece without gradients, joined and judged as one; then each piece again, with the gradient that
        the losses have for its outputs. So prototypes, Sinkhorn and contrasts see the batch they are meant for.
        """
        with torch.no_grad():
            pieces = [self._look(self.model, self._draw(batch)) for batch in batches]
        outputs = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        joined = {name: value.detach().requires_grad_(value.is_floating_point()) for name, value in outputs.items()}
        self.judged = self.model.losses(joined, turn)
        scaler, total = self.accelerator.scaler, self.judged.total
        (scaler.scale(total) if scaler is not None else total).backward()
        sizes = {name: [len(piece[name]) for piece in pieces] for name in pieces[0]}
        for number, batch in enumerate(batches):
            self.views = self._draw(batch)
            with gradient_exchange(self.accelerator, self.wrapped, now=number == len(batches) - 1):
                self._backward(self._look(self.wrapped, self.views), joined, sizes, number)

    def _look(self, networks: nn.Module, views: Views) -> Outputs:
        """The networks' outputs, in full precision whatever they are computed in."""
        with self.accelerator.autocast():
            outputs: Outputs = networks(views)
        # Elsewhere accelerate does it in `prepare`.
        return in_full_precision(outputs) if is_sharded(networks) else outputs

    def _backward(self, outputs: Outputs, joined: Outputs, sizes: Mapping[str, Sequence[int]], number: int) -> None:
        """Carry the gradients of the joined outputs on into the networks, for the piece ``number``."""
        tensors, gradients = [], []
        for name, output in outputs.items():
            gradient = joined[name].grad
            if output.requires_grad and gradient is not None:
                first = sum(sizes[name][:number])
                tensors.append(output)
                gradients.append(gradient[first : first + len(output)].to(output.dtype))
        torch.autograd.backward(tensors, gradients)

    def rests(self, turn: str) -> bool:
        return self.model.rests(turn, self._progress())

    def _only(self, turn: str | None) -> None:
        """With several optimisers, only the parameters of ``turn`` get gradients; None: those of all turns again."""
        if len(self.optimizers) > 1:
            trained = {
                name: [parameter for group in optimizer.param_groups for parameter in group["params"]]
                for name, optimizer in self.optimizers.items()
            }
            train_only(turn, trained)

    def _draw(self, batch: Batch) -> Views:
        epoch = self.step // self.plan.steps_per_epoch
        return self.model.views(
            self.images(batch), Keys(self.config.seed, epoch, self.step, torch.from_numpy(batch.rows))
        )

    def before_clip(self) -> None:
        for parameter in self.model.frozen(self._progress()):
            parameter.grad = None

    def after_update(self) -> None:
        assert self.judged is not None
        self.model.after_step(self.judged)

    # An epoch

    def end_epoch(self, epoch: int) -> None:
        self.model.eval()  # no stochastic depth: health is about the networks, not about a draw
        with gathered(self.model):
            self.health = self.model.health(self.views, self.losses)
            # Every process judges its own films; they act on it together, or one would leave and the others wait.
            red = any_process(self.accelerator, self.health is not None and self.health.colour == "red")
            self.red_epochs = self.red_epochs + 1 if red else 0
            if self.accelerator.is_main_process:
                view = EpochView(self.model, self.folder.path, epoch, self.step, self.views, self.health)
                numbers: dict[str, float] = {}
                for observer in self.observers:
                    numbers.update(observer(view) or {})
                self.journal.epoch(self.step, epoch, self.health, numbers)
        self.model.train()
        self.accelerator.wait_for_everyone()

    def ends_as(self) -> str | None:
        return "collapsed" if self.config.run.stop_on_collapse and self.red_epochs >= _RED_EPOCHS else None

    def state(self) -> dict[str, Any]:
        return {
            "data_hash": self.data["hash"],
            "losses": self.losses,
            "health": self.health.as_json() if self.health is not None else None,
            "red_epochs": self.red_epochs,
            "config": self.config.model_dump(),
        }

    def make_journal(self) -> PretrainingJournal:
        self.journal: PretrainingJournal = PretrainingJournal(
            self.folder.path,
            first_step=self.first_step,
            epochs=self.config.training.epochs,
            steps_per_epoch=self.plan.steps_per_epoch,
            films_per_step=self.plan.batch_size * self.model.views_per_film,
            main=self.accelerator.is_main_process,
            tracking=self.config.run.tracking,
            settings=self.config.model_dump(),
        )
        return self.journal

    def result(self, ending: Ending) -> PretrainResult:
        """Write the summary of a run that ended."""
        if self.accelerator.is_main_process:
            health = [self.health.colour, self.health.reason] if self.health else ["-", "not measured"]
            summary = {
                "status": ending.status,
                "step": self.step,
                "steps": self.steps,
                "epoch": self.step // self.plan.steps_per_epoch,
                "losses": self.losses,
                "health": health,
                "images_per_second": ending.images_per_second,
                "data_wait": ending.data_wait,
                "processes": self.plan.world,
                "parameters": count_parameters(self.model)["trained"],
                "bad_films": ending.bad_films,
                "peak_memory_bytes": self.journal.peak_memory(),
            }
            self.folder.finish(run_page(self.config, self.data, summary), summary)
        speed, wait = ending.images_per_second, ending.data_wait
        return PretrainResult(ending.status, ending.signal, self.step, self.steps, self.losses, speed, wait)


def _read_health(stored: Mapping[str, Any] | None) -> Health | None:
    """The health in a checkpoint; those of version 0.1 hold only its numbers."""
    return Health(**stored) if stored and "numbers" in stored else None

"""Random crops, turns and mirrors of training films: drawn by key, applied to a whole batch in one warp each.

What happens to a film depends on (seed, step, row) alone: not on its batch, the number of processes or a restart.
Shapes: B films, S pixels a side.

Optimizer and learning rate of the supervised tasks: AdamW with layer-wise decay, warm-up and a cosine.

Learning from labels: the loop that fine-tuning and segmentation share.

As in pre-training, everything random follows from (seed, step, row), a checkpoint is whole or not there, and a run that
was killed ends bit by bit as one that was not. The weights that did best on validation films are kept beside the
checkpoints; when no epoch was better for ``patience`` epochs, or the epochs are over, they are the result.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from kornia.geometry.transform import get_affine_matrix2d, warp_affine
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from afire.data.pack import Films
from afire.errors import UserError
from afire.files import write_atomic
from afire.lesions.places import keyed, unit
from afire.nn import distributed
from afire.nn.vit import VisionTransformer
from afire.tasks.features import predict, to_device
from afire.tasks.settings import AugmentConfig, FinetuneConfig, SegmentConfig, SupervisedConfig
from afire.training import checkpoint as checkpoints
from afire.training.batches import Batch, Plan, Prefetcher
from afire.training.engine import (
    StopSignals,
    agree,
    cosine,
    decays,
    depth_generator,
    explain,
    gradient_exchange,
    on_first_process,
)
from afire.training.journal import TaskJournal
from afire.training.run_folder import RunFolder


class _Draw(IntEnum):
    """What each random number decides. Append only: the order is part of what a seed means."""

    AREA = 0
    ASPECT = 1
    PLACE_X = 2
    PLACE_Y = 3
    ANGLE = 4
    FLIP = 5


def draw_warps(config: AugmentConfig, size: int, seed: int, step: int, rows: np.ndarray) -> Tensor:
    """Affine maps (B, 2, 3) from the pixels of a film to those of its augmented version; float32 on the CPU."""
    chance = unit(keyed(seed, step, torch.from_numpy(np.ascontiguousarray(rows)), 1, 1)[:, 0, 0])
    area = config.crop_min + (1 - config.crop_min) * chance[:, _Draw.AREA]
    root_aspect = torch.exp((chance[:, _Draw.ASPECT] - 0.5) * float(np.log(config.stretch)))
    # A crop that is nearly the whole film cannot also be stretched: its sides end at the film's.
    sides = torch.stack([area.sqrt() * root_aspect, area.sqrt() / root_aspect], dim=1).clamp(max=1) * size
    corner = chance[:, [_Draw.PLACE_X, _Draw.PLACE_Y]] * (size - sides)
    centre = corner + sides / 2 - 0.5  # pixel centres are whole numbers
    mirror = 1 - 2 * (chance[:, _Draw.FLIP] < config.flip).float()
    scale = size / sides * torch.stack([mirror, torch.ones_like(mirror)], dim=1)
    angle = (2 * chance[:, _Draw.ANGLE] - 1) * config.rotation
    shift = (size - 1) / 2 - centre
    maps: Tensor = get_affine_matrix2d(shift, centre, scale, angle)[:, :2]
    return maps


def warp_films(films: Tensor, maps: Tensor) -> Tensor:
    """Films (B, C, S, S) through ``maps`` (B, 2, 3), bilinear; what lies outside of a film is black."""
    warped: Tensor = warp_affine(films, maps.to(films), films.shape[-2:], mode="bilinear", padding_mode="zeros")
    return warped.clamp_(0, 1)  # bilinear weights add up to one only within rounding


def warp_masks(masks: Tensor, maps: Tensor) -> Tensor:
    """Masks (B, 1, S, S) of zeros and ones through ``maps``, each pixel from its nearest; outside is empty."""
    warped: Tensor = warp_affine(masks, maps.to(masks), masks.shape[-2:], mode="nearest", padding_mode="zeros")
    return warped


def make_layered_optimizer(model: nn.Module, depth: int, config: SupervisedConfig) -> torch.optim.AdamW:
    """AdamW whose groups carry ``scale``: ``layer_decay`` once for each layer between a parameter and the end.

    ``depth`` is the number of encoder blocks; the encoder's parameters are named ``encoder.*``.
    """
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((layer_of(name, depth), decays(name, parameter)), []).append(parameter)
    settings = [
        {
            "params": parameters,
            "scale": config.layer_decay ** (depth + 1 - layer),
            "weight_decay": config.weight_decay if decayed else 0.0,
        }
        for (layer, decayed), parameters in sorted(groups.items())
    ]
    return torch.optim.AdamW(settings, lr=config.learning_rate, fused=True)


def layer_of(name: str, depth: int) -> int:
    """0 for patches, tokens and positions, 1 + i for block i, depth + 1 for the norm and everything outside."""
    if name.startswith("encoder.blocks."):
        return 1 + int(name.split(".")[2])
    return 0 if name.startswith("encoder.") and not name.startswith("encoder.norm.") else depth + 1


def learning_rate(config: SupervisedConfig, step: int, steps_per_epoch: int) -> float:
    """The rate of ``step``, counted from 0, before the scale of a group."""
    steps = config.epochs * steps_per_epoch
    warmup = min(round(config.warmup_epochs * steps_per_epoch), steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    return cosine(config.learning_rate, config.learning_rate_end, step - warmup, steps - warmup)


Rows = NDArray[np.int64]


class TaskModel(Protocol):
    """Films (B, 1, S, S) in [0,1] to outputs; its parameters outside of ``encoder`` are the new layers."""

    encoder: VisionTransformer

    def __call__(self, films: Tensor, generator: torch.Generator | None = None) -> Tensor: ...


class Objective(Protocol):
    """What the loop asks of a task."""

    metric: str  # the validation result that early stopping watches; larger is better
    spatial: bool  # whether targets are masks (B, 1, S, S), which move with their film

    def targets(self, rows: Rows) -> Tensor:
        """What the films of ``rows`` should give, (B, ...) on the CPU."""
        ...

    def terms(self, targets: Tensor) -> Tensor:
        """How many terms the loss of these films has, a scalar; a loss is the mean over the terms of all processes."""
        ...

    def loss(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The parts of the loss, each *summed* over its terms; the loss is their sum."""
        ...

    def keep(self, outputs: Tensor, rows: Rows) -> Tensor:
        """What validation keeps of each film, (B, ...)."""
        ...

    def score(self, kept: NDArray[Any], rows: Rows) -> float:
        """The validation result of what was kept of the films of ``rows``."""
        ...


@dataclass(frozen=True)
class Job:
    """One run: what to learn from which rows, with which settings, into which folder."""

    model: nn.Module
    objective: Objective
    films: Films
    train: Rows
    val: Rows
    config: FinetuneConfig | SegmentConfig
    data: Mapping[str, Any]  # what data.json says: hashes of films and weights
    out: Path


@dataclass(frozen=True)
class Learnt:
    """How a run ended: ``finished`` or ``stopped`` by a signal; the best validation result and the epoch it is from."""

    status: str
    signal: int
    value: float
    epoch: int
    epochs: int
    steps: int
    images_per_second: float


def learn(job: Job, accelerator: Accelerator, resume: bool = False, force: bool = False) -> Learnt:
    """Run a job to its end or to a signal. A finished job's model holds the best weights. A collective call."""
    return _Loop(job, accelerator, resume, force).run()


def plan_batches(rows: Rows, seed: int, config: FinetuneConfig | SegmentConfig, world: int, rank: int) -> Plan:
    """Which films are in which step: as many as the setting says, fewer where there are fewer."""
    recipe = config.training
    pieces = world * recipe.accumulate
    if recipe.batch_size % pieces:
        raise UserError(
            f"training.batch_size {recipe.batch_size} cannot be shared by {world} processes in {recipe.accumulate} "
            f"parts; choose a multiple of {pieces}."
        )
    batch = min(recipe.batch_size, len(rows)) // pieces
    if batch == 0:
        raise UserError(f"{len(rows)} training films are too few for {world} processes in {recipe.accumulate} parts.")
    passes = max(1, math.ceil(recipe.min_epoch_steps * batch * pieces / len(rows)))
    return Plan(np.repeat(np.sort(rows), passes), seed, batch, world, rank, recipe.accumulate)


class _Loop:
    """One run: everything is made in ``__init__``, :meth:`run` is the loop."""

    def __init__(self, job: Job, accelerator: Accelerator, resume: bool, force: bool) -> None:
        self.job, self.accelerator, self.recipe = job, accelerator, job.config.training
        self.plan = plan_batches(
            job.train, job.config.seed, job.config, accelerator.num_processes, accelerator.process_index
        )
        self.steps = self.recipe.epochs * self.plan.steps_per_epoch
        self.folder = RunFolder(job.out)
        main = accelerator.is_main_process
        found = self.folder.begin(job.config, job.data, resume, force) if main else None
        accelerator.wait_for_everyone()
        found = found if main or not resume else checkpoints.newest_checkpoint(job.out)

        self.model = job.model.to(accelerator.device).train()
        encoder: VisionTransformer = job.model.encoder  # type: ignore[assignment]
        encoder.drop_path = self.recipe.drop_path
        self.optimizer = make_layered_optimizer(self.model, len(encoder.blocks), self.recipe)
        if found is not None:
            checkpoints.restore(found, self.model, self.optimizer)
        self.wrapped, self.wrapped_optimizer = accelerator.prepare(self.model, self.optimizer)
        if found is not None and accelerator.scaler is not None and found.state.get("scaler"):
            accelerator.scaler.load_state_dict(dict(found.state["scaler"]))
        self.step = self.first_step = found.step if found else 0
        self.best: dict[str, Any] | None = found.state["best"] if found else None
        self.stale = int(found.state["stale"]) if found else 0
        self.last_save = time.monotonic()

    def run(self) -> Learnt:
        plan, job = self.plan, self.job
        main = self.accelerator.is_main_process
        journal = TaskJournal(
            job.out,
            first_step=self.first_step,
            steps_per_epoch=plan.steps_per_epoch,
            epochs=self.recipe.epochs,
            films_per_step=plan.films_per_step,
            main=main,
        )
        if self.best is not None:
            journal.note_best(job.objective.metric, self.best["value"], self.best["epoch"])
        batches = Prefetcher(job.films, plan, self.first_step, self.steps, job.config.run.on_bad_film)
        signal = 0
        try:
            with StopSignals() as stop, journal:
                for parts in batches if not self._is_over() else ():
                    rate = learning_rate(self.recipe, self.step, plan.steps_per_epoch)
                    losses = self._forward_backward(parts)
                    norm = float(self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self._limit()))
                    flags = agree(self.accelerator, self._finite(losses, norm), stop.received, self._clock_is_due())
                    if flags.not_finite:
                        self._give_up(losses, parts)
                    self._update(rate)
                    journal.update(self.step, losses, rate, norm, batches.waited, len(batches.reader.bad))
                    ends_epoch = self.step % plan.steps_per_epoch == 0
                    if ends_epoch:
                        self._validate(journal)
                    if self._save_is_due(ends_epoch, flags.save) or flags.stop:
                        self._save()
                    if self._is_over():
                        break
                    if flags.stop:
                        signal = flags.signal
                        break
        except RuntimeError as error:
            raise explain(error, plan.world, self.step) from error
        finally:
            batches.close()
        return self._end(signal, journal)

    def _is_over(self) -> bool:
        return self.step >= self.steps or self.stale >= self.recipe.patience

    def _limit(self) -> float:
        return self.recipe.clip or float("inf")

    def _forward_backward(self, parts: list[Batch]) -> dict[str, float]:
        """Add up the gradients of one update; the parts of the loss as means over all processes."""
        objective, rank = self.job.objective, self.plan.rank
        targets = [objective.targets(batch.rows).to(self.accelerator.device) for batch in parts]
        terms = distributed.total(torch.stack([objective.terms(target) for target in targets]).sum())
        # DDP averages gradients over the processes; times their number, over the global count, gives the global mean.
        weight = self.plan.world / terms.clamp_min(1)
        generator = depth_generator(self.job.config.seed, self.step, rank) if self.recipe.drop_path else None
        sums: dict[str, Tensor] = {}
        for number, (batch, target) in enumerate(zip(parts, targets, strict=True)):
            films, target = self._augment(batch, target)
            with gradient_exchange(self.accelerator, self.wrapped, now=number == len(parts) - 1):
                with self.accelerator.autocast():
                    outputs = self.wrapped(films, generator)
                losses = {name: weight * value for name, value in objective.loss(outputs.float(), target).items()}
                self.accelerator.backward(torch.stack(list(losses.values())).sum())
            for name, value in losses.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value.detach()
        values = distributed.total(torch.stack(list(sums.values()))) / self.plan.world
        return dict(zip(sums, values.tolist(), strict=True))

    def _augment(self, batch: Batch, target: Tensor) -> tuple[Tensor, Tensor]:
        films = to_device(self.job.films, batch.raw, self.accelerator.device)
        config = self.job.config
        maps = draw_warps(config.augment, films.shape[-1], config.seed, self.step, batch.rows)
        return warp_films(films, maps), warp_masks(target, maps) if self.job.objective.spatial else target

    def _finite(self, losses: Mapping[str, float], norm: float) -> bool:
        return math.isfinite(sum(losses.values())) and (math.isfinite(norm) or self.accelerator.scaler is not None)

    def _give_up(self, losses: Mapping[str, float], parts: list[Batch]) -> None:
        rows = [int(row) for batch in parts for row in batch.rows]
        names = self.job.films.manifest.table["image"].iloc[rows[:3]].tolist()
        bad = [name for name, value in losses.items() if not math.isfinite(value)] or ["the gradient"]
        raise UserError(
            f"{', '.join(bad)} is not finite at step {self.step} of {self.job.out} (films {', '.join(names)}, ...); "
            "nothing was updated; try a lower training.learning_rate or training.precision fp32."
        )

    def _update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        self.wrapped_optimizer.step()
        self.wrapped_optimizer.zero_grad()
        self.step += 1

    def _validate(self, journal: TaskJournal) -> None:
        """The validation result of an epoch; every process comes to the same one, because all see all answers."""
        objective, epoch = self.job.objective, self.step // self.plan.steps_per_epoch
        kept = predict(self.model, self.job.films, self.job.val, self.accelerator, objective.keep)
        value = objective.score(kept, self.job.val)
        better = self.best is None or value > self.best["value"]
        self.stale = 0 if better else self.stale + 1
        if better:
            self.best = {"value": value, "epoch": epoch, "step": self.step}
            on_first_process(self.accelerator, self._write_best, "the best weights")
        journal.epoch(self.step, epoch, objective.metric, value, better, self.stale)

    def _write_best(self) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.state_dict().items()}
        write_atomic(_best_file(self.job.out, self.step), lambda path: save_file(tensors, path))

    def _save_is_due(self, ends_epoch: bool, by_clock: bool) -> bool:
        every = self.job.config.run.checkpoint_epochs * self.plan.steps_per_epoch
        return by_clock or self._is_over() or bool(ends_epoch and every and self.step % every == 0)

    def _clock_is_due(self) -> bool:
        return time.monotonic() - self.last_save > 60 * self.job.config.run.checkpoint_minutes

    def _save(self) -> None:
        def write() -> None:
            keep = self.job.config.run.keep_checkpoints
            checkpoints.save_checkpoint(self.job.out, self.model, self.optimizer, self._state(), keep)
            _forget_unused_best(self.job.out)

        on_first_process(self.accelerator, write, "its checkpoint")
        self.last_save = time.monotonic()

    def _state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "step": self.step,
            "best": self.best,
            "stale": self.stale,
            "processes": self.plan.world,
            "scaler": scaler.state_dict() if scaler is not None else None,
        }

    def _end(self, signal: int, journal: TaskJournal) -> Learnt:
        best = self.best or {"value": float("nan"), "epoch": 0}
        if not signal:
            file = _best_file(self.job.out, best["step"])
            if not file.exists():
                raise UserError(f"the best weights {file} are gone; start this run again with --force.")
            self.model.load_state_dict(load_file(file))
        epochs = self.step // self.plan.steps_per_epoch
        status = "stopped" if signal else "finished"
        return Learnt(status, signal, best["value"], best["epoch"], epochs, self.step, journal.images_per_second)


def _best_file(out: Path, step: int) -> Path:
    return out / f"best-{step:08d}.safetensors"


def _forget_unused_best(out: Path) -> None:
    """Remove best weights that no checkpoint names: a resume from any of those must find its own."""
    named = set()
    for path in (out / checkpoints.FOLDER).glob("step-*/state.json"):
        try:
            best = json.loads(path.read_text(encoding="utf-8"))["best"]
        except (OSError, ValueError, KeyError):
            continue  # a torn checkpoint, which no resume will use
        if best is not None:
            named.add(_best_file(out, best["step"]))
    for file in out.glob("best-*.safetensors"):
        if file not in named:
            file.unlink()

"""Learning from labels, for fine-tuning and segmentation: objective, warps, layer-wise rates, early stopping.

The loop is that of pre-training (:mod:`afire.training.loop`). Warps (crops, turns, mirrors) are drawn by (seed, step,
draw) and applied to a whole batch at once. The weights that did best on validation films are kept beside the
checkpoints; when no epoch was better for ``patience`` epochs, or the epochs are over, they are the result.

Shapes: B films, S pixels a side.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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
from afire.methods.base import depth_draws
from afire.nn import distributed, vit
from afire.nn.residual import Trunk
from afire.tasks.features import predict
from afire.tasks.results import Rows
from afire.tasks.settings import AugmentConfig, FinetuneConfig, SegmentConfig, SupervisedConfig
from afire.training.batches import Batch, Plan
from afire.training.engine import decays, gradient_exchange, on_first_process, warmed_cosine
from afire.training.journal import TaskJournal
from afire.training.loop import Ending, Trainer
from afire.training.run_folder import CHECKPOINTS, RunFolder, Tensors


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
        """The losses by name, each *summed* over its terms; their sum is what is trained on."""
        ...

    def keep(self, outputs: Tensor, rows: Rows) -> Tensor:
        """What validation keeps of each film, (B, ...)."""
        ...

    def score(self, summaries: NDArray[Any], rows: Rows) -> float:
        """The validation result of the films of ``rows``, from what :meth:`keep` kept of them."""
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
    with RunFolder(job.out) as folder:
        run = Supervised(job, folder, accelerator, resume, force)
        return run.result(run.train())


def plan_batches(rows: Rows, seed: int, recipe: SupervisedConfig, world: int, rank: int) -> Plan:
    """Which films are in which step: as many as the setting says, fewer where there are fewer."""
    pieces = world * recipe.accumulate
    batch = recipe.batch_size if len(rows) >= recipe.batch_size else len(rows) // pieces * pieces
    if batch == 0:
        raise UserError(f"{len(rows)} training films are too few for {world} processes in {recipe.accumulate} pieces.")
    passes = max(1, math.ceil(recipe.min_epoch_steps * batch / len(rows)))
    return Plan(np.sort(rows), seed, batch, world, rank, recipe.accumulate, passes)


class Supervised(Trainer):
    """One run that learns from labels."""

    def __init__(self, job: Job, folder: RunFolder, accelerator: Accelerator, resume: bool, force: bool) -> None:
        self.job, self.recipe = job, job.config.training
        plan = plan_batches(
            job.train, job.config.seed, self.recipe, accelerator.num_processes, accelerator.process_index
        )
        steps = self.recipe.epochs * plan.steps_per_epoch
        super().__init__(accelerator, job.films, plan, steps, folder, job.config.run, self.recipe.clip)
        self.model = job.model.to(accelerator.device).train()
        checkpoint = self.resume_from(job.config, job.data, resume, force)
        encoder: Trunk = job.model.encoder  # type: ignore[assignment]
        encoder.drop_path = self.recipe.drop_path
        self.blocks = len(encoder.blocks)
        self.optimizers = {"all": make_layered_optimizer(self.model, self.blocks, self.recipe)}
        self.wrap(checkpoint)
        self.best: dict[str, Any] | None = checkpoint.state["best"] if checkpoint else None
        self.stale = int(checkpoint.state["stale"]) if checkpoint else 0

    def is_over(self) -> bool:
        return self.step >= self.steps or self.stale >= self.recipe.patience

    def make_journal(self) -> TaskJournal:
        self.journal: TaskJournal = TaskJournal(
            self.job.out,
            first_step=self.first_step,
            epochs=self.recipe.epochs,
            steps_per_epoch=self.plan.steps_per_epoch,
            films_per_step=self.plan.batch_size,
            main=self.accelerator.is_main_process,
        )
        if self.best is not None:
            self.journal.note_best(self.job.objective.metric, self.best["value"], self.best["epoch"])
        return self.journal

    def begin_step(self) -> Mapping[str, float]:
        rate = learning_rate(self.recipe, self.step, self.plan.steps_per_epoch)
        for group in self.optimizers["all"].param_groups:
            group["lr"] = rate * group["scale"]
        return {"learning_rate": rate}

    def forward_backward(self, batches: Sequence[Batch], turn: str) -> dict[str, float]:
        """Add up the gradients of one update; the terms of the loss as means over all processes."""
        objective = self.job.objective
        targets = [objective.targets(batch.rows).to(self.accelerator.device) for batch in batches]
        terms = distributed.total(torch.stack([objective.terms(target) for target in targets]).sum())
        # DDP averages gradients over the processes; times their number, over the global count, gives the global mean.
        weight = self.plan.world / terms.clamp_min(1)
        sums: dict[str, Tensor] = {}
        for number, (batch, target) in enumerate(zip(batches, targets, strict=True)):
            images, target = self._augment(batch, target)
            with gradient_exchange(self.accelerator, self.wrapped, now=number == len(batches) - 1):
                with self.accelerator.autocast():
                    outputs = self.wrapped(images, self._depth(batch))
                losses = {name: weight * value for name, value in objective.loss(outputs.float(), target).items()}
                self.accelerator.backward(torch.stack(list(losses.values())).sum())
            for name, value in losses.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value.detach()
        values = distributed.total(torch.stack(list(sums.values()))) / self.plan.world
        return dict(zip(sums, values.tolist(), strict=True))

    def _augment(self, batch: Batch, target: Tensor) -> tuple[Tensor, Tensor]:
        images, config = self.images(batch), self.job.config
        maps = draw_warps(config.augment, images.shape[-1], config.seed, self.step, batch.draws)
        return warp_images(images, maps), warp_masks(target, maps) if self.job.objective.spatial else target

    def _depth(self, batch: Batch) -> Tensor | None:
        if not self.recipe.drop_path:
            return None
        return depth_draws(self.blocks, self.job.config.seed, self.step, torch.from_numpy(batch.draws))

    def end_epoch(self, epoch: int) -> None:
        """The validation result of an epoch; every process comes to the same one, because all see all answers."""
        objective = self.job.objective
        summaries = predict(self.model, self.job.films, self.job.val, self.accelerator, objective.keep)
        value = objective.score(summaries, self.job.val)
        better = self.best is None or value > self.best["value"]
        self.stale = 0 if better else self.stale + 1
        if better:
            self.best = {"value": value, "epoch": epoch, "step": self.step}
            on_first_process(self.accelerator, self._write_best, "the best weights")
        self.journal.epoch(self.step, epoch, objective.metric, value, better, self.stale)

    def _write_best(self) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.state_dict().items()}
        write_atomic(_best_file(self.job.out, self.step), lambda path: save_file(tensors, path))

    def write_checkpoint(self, tensors: Tensors) -> None:
        super().write_checkpoint(tensors)
        _forget_unused_best(self.job.out)

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "stale": self.stale}

    def result(self, ending: Ending) -> Learnt:
        """The outcome of the run; the model of a finished one holds its best weights again."""
        best = self.best or {"value": float("nan"), "epoch": 0}
        if not ending.signal:
            file = _best_file(self.job.out, best["step"])
            if not file.exists():
                raise UserError(f"the best weights {file} are gone; start this run again with --force.")
            self.model.load_state_dict(load_file(file))
        epochs = self.step // self.plan.steps_per_epoch
        speed = ending.images_per_second
        return Learnt(ending.status, ending.signal, best["value"], best["epoch"], epochs, self.step, speed)


def _best_file(out: Path, step: int) -> Path:
    return out / f"best-{step:08d}.safetensors"


def _forget_unused_best(out: Path) -> None:
    """Remove best weights that no checkpoint names: a resume from any of those must find its own."""
    in_use = set()
    for path in (out / CHECKPOINTS).glob("step-*/state.json"):
        try:
            best = json.loads(path.read_text(encoding="utf-8"))["best"]
        except (OSError, ValueError, KeyError):
            continue  # a truncated checkpoint, which no resume will use
        if best is not None:
            in_use.add(_best_file(out, best["step"]))
    for file in out.glob("best-*.safetensors"):
        if file not in in_use:
            file.unlink()


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
    inside = name.startswith("encoder.")
    return vit.layer_of(name.removeprefix("encoder."), depth) if inside else depth + 1


def learning_rate(config: SupervisedConfig, step: int, steps_per_epoch: int) -> float:
    """The rate of ``step``, counted from 0, before the scale of a group."""
    steps = config.epochs * steps_per_epoch
    warmup = min(round(config.warmup_epochs * steps_per_epoch), steps)
    return warmed_cosine(config.learning_rate, config.learning_rate_end, step, steps, warmup)


class _Draw(IntEnum):
    """What each random number decides. Append only: the order is part of what a seed means."""

    AREA = 0
    ASPECT = 1
    PLACE_X = 2
    PLACE_Y = 3
    ANGLE = 4
    FLIP = 5


def draw_warps(config: AugmentConfig, size: int, seed: int, step: int, draws: np.ndarray) -> Tensor:
    """Affine maps (B, 2, 3) from the pixels of a film to those of its augmented version; float32 on the CPU."""
    chance = unit(keyed(seed, step, torch.from_numpy(np.ascontiguousarray(draws)), 1, 1)[:, 0, 0])
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


def warp_images(images: Tensor, maps: Tensor) -> Tensor:
    """Images (B, C, S, S) through ``maps`` (B, 2, 3), bilinear; what lies outside of a film is black."""
    warped: Tensor = warp_affine(images, maps.to(images), images.shape[-2:], mode="bilinear", padding_mode="zeros")
    return warped.clamp_(0, 1)  # bilinear weights add up to one only within rounding


def warp_masks(masks: Tensor, maps: Tensor) -> Tensor:
    """Masks (B, 1, S, S) of zeros and ones through ``maps``, each pixel from its nearest; outside is empty."""
    warped: Tensor = warp_affine(masks, maps.to(masks), masks.shape[-2:], mode="nearest", padding_mode="zeros")
    return warped

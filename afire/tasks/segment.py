"""Segmentation: an encoder with a light decoder learns one mask; Dice over all films and over those with a mask.

The threshold and the smallest area are chosen on validation films: connected pieces of a prediction that are smaller
are dropped. Early stopping, which asks after every epoch, applies the area to the whole prediction, which is cheap.
Masks are compared at the size of the films. Shapes: B films, S pixels a side, T thresholds, A areas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from afire.data.dataset import Films
from afire.data.manifest import Manifest
from afire.data.rle import encode_rle
from afire.errors import UserError
from afire.task_config import SegmentConfig
from afire.tasks import metrics as m
from afire.tasks.backbone import Backbone
from afire.tasks.evaluate import Evaluation, bootstrap_means, classification_result
from afire.tasks.experiment import Experiment, Finished, claim_folders, complete_run, fresh_encoder, open_bench
from afire.tasks.inference import predict
from afire.tasks.mask_choice import Choice, choose, piece_sizes, without_small_pieces
from afire.tasks.masks import Masks, load_masks, mask_cells, pack, unpack
from afire.tasks.results import VALUE, Result, RunResult, estimate
from afire.tasks.runs import Run, plan_runs
from afire.tasks.seg_decoder import Segmenter
from afire.tasks.supervised import Objective, Rows

METRICS = ("dice", "dice_positive", "iou", "iou_positive")
RLE = "rle"
_BOOTSTRAP_SEED = 0
_SMOOTH = 1.0  # pixels; so that an empty film has a Dice loss and a gradient
_AT_ONCE = 512  # masks unpacked at a time
Floats = NDArray[np.float64]


class MaskObjective:
    """Soft Dice of each film plus cross-entropy of each pixel.

    Validation by the mean of Dice over all films and over those with a mask, at the best threshold and area.
    """

    metric = "mean_dice"
    spatial = True

    def __init__(self, masks: Masks, config: SegmentConfig) -> None:
        self.masks, self.config = masks, config
        self.thresholds = torch.tensor(sorted(config.choice.thresholds))
        self.areas = sorted(config.choice.min_areas)

    def targets(self, rows: Rows) -> Tensor:
        return self.masks.batch(rows)

    def terms(self, targets: Tensor) -> Tensor:
        return torch.tensor(len(targets), device=targets.device)

    def loss(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        losses = {}
        weights = self.config.losses
        if weights.dice:
            inside, truth = outputs.sigmoid().flatten(1), targets.flatten(1)
            overlap, whole = (inside * truth).sum(1), inside.sum(1) + truth.sum(1)
            losses["dice"] = weights.dice * (1 - (2 * overlap + _SMOOTH) / (whole + _SMOOTH)).sum()
        if weights.cross_entropy:
            each = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
            losses["cross_entropy"] = weights.cross_entropy * each.flatten(1).mean(1).sum()
        return losses

    def keep(self, outputs: Tensor, rows: Rows) -> Tensor:
        """(B, 2T + 1): pixels predicted inside and, of those, truly inside at each threshold; pixels truly inside."""
        probabilities = outputs.sigmoid().flatten(1)
        truth = self.masks.batch(rows).flatten(1).to(probabilities.device)
        # Each pixel into the bin of the highest threshold it reaches; sums from the top are the areas.
        reached = torch.bucketize(probabilities, self.thresholds.to(probabilities.device), right=True)
        counts = torch.zeros(2, len(outputs), len(self.thresholds) + 1, device=probabilities.device)
        counts[0].scatter_add_(1, reached, torch.ones_like(truth))
        counts[1].scatter_add_(1, reached, truth)
        areas = counts.flip(-1).cumsum(-1).flip(-1)[..., 1:]
        return torch.cat([areas[0], areas[1], truth.sum(1, keepdim=True)], dim=1)

    def score(self, kept: NDArray[Any], rows: Rows) -> float:
        steps = len(self.thresholds)
        areas_BT1, overlaps_BT1 = kept[:, :steps, None], kept[:, steps : 2 * steps, None]
        large = areas_BT1 >= np.array(self.areas) * self.masks.size**2
        counts = (areas_BT1 * large, overlaps_BT1 * large, kept[:, -1])
        return choose(*counts, self.thresholds.tolist(), self.areas, "both").value

    def keep_pieces(self, outputs: Tensor, rows: Rows) -> Tensor:
        """(B, 2TA + 1): what :meth:`keep` counts, for every smallest area of a connected piece."""
        probabilities, truth = outputs.sigmoid()[:, 0].cpu().numpy(), self.masks.read(rows)
        least = np.array(self.areas) * self.masks.size**2
        counts = np.zeros((2, len(outputs), len(self.thresholds), len(least)), np.float32)
        for film, threshold in np.ndindex(len(outputs), len(self.thresholds)):
            inside = probabilities[film] >= self.thresholds[threshold].item()
            areas, overlaps = piece_sizes(inside, truth[film])
            large = areas[:, None] >= least
            counts[:, film, threshold] = areas @ large, overlaps @ large
        flat = counts.reshape(2, len(outputs), -1)
        sums = truth.reshape(len(truth), -1).sum(axis=1, dtype=np.float32)
        return torch.from_numpy(np.concatenate([flat[0], flat[1], sums[:, None]], axis=1))

    def choose_pieces(self, kept: NDArray[Any]) -> Choice:
        """The best pair for what :meth:`keep_pieces` kept."""
        pairs = (len(kept), len(self.thresholds), len(self.areas))
        areas, overlaps = (half.reshape(pairs) for half in np.split(kept[:, :-1], 2, axis=1))
        return choose(areas, overlaps, kept[:, -1], self.thresholds.tolist(), self.areas, self.config.choice.by)


class Segmentation:
    """The task: a :class:`~afire.tasks.seg_decoder.Segmenter` that learns ``masks``."""

    def __init__(self, films: Films, masks: Masks, config: SegmentConfig) -> None:
        self.films, self.masks, self.config = films, masks, config

    def build(self, run: Run, backbone: Backbone) -> tuple[Segmenter, MaskObjective]:
        encoder, normalise = fresh_encoder(backbone)
        generator = torch.Generator().manual_seed(run.seed)
        share = self.masks.share(run.rows["train"])
        model = Segmenter(encoder, normalise, self.config.decoder, share, generator)
        return model, MaskObjective(self.masks, self.config)

    def answer(
        self, model: nn.Module, objective: Objective, run: Run, accelerator: Accelerator
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Predicted masks as packed bits, (films of the part, ceil(S*S/8))."""
        assert isinstance(objective, MaskObjective)
        found = predict(model, self.films, run.rows["val"], accelerator, objective.keep_pieces)
        choice = objective.choose_pieces(found)

        def inside(outputs: Tensor, rows: Rows) -> Tensor:
            masks = (outputs.sigmoid()[:, 0] >= choice.threshold).cpu().numpy()
            return torch.from_numpy(pack(without_small_pieces(masks, choice.min_area * self.masks.size**2)))

        parts = ("val", "test")
        answers = {part: predict(model, self.films, run.rows[part], accelerator, inside) for part in parts}
        return answers, {"threshold": choice.threshold, "min_area": choice.min_area}


def run_segment(experiment: Experiment, config: SegmentConfig) -> Iterator[tuple[float, Result, pd.DataFrame]]:
    """For each label fraction its result and predictions. A collective call when several processes run it."""
    bench = open_bench(experiment, config.training.precision)
    films, manifest = bench.films, bench.films.manifest
    target, cells = mask_cells(manifest, config.masks)
    known = np.array([cell is not None for cell in cells])
    plans = {fraction: _plan(experiment, manifest, fraction, known) for fraction in experiment.folders}
    claim_folders(bench, plans)
    used = np.unique(np.concatenate([rows for runs in plans.values() for run in runs for rows in run.rows.values()]))
    masks = load_masks(films, used, cells, config.masks)
    task = Segmentation(films, masks, config)
    without = int((~known).sum())
    notes = [f"{without:,} of {len(known):,} films have no mask and were left out"] if without else []
    for fraction, runs in plans.items():
        finished = [complete_run(bench, task, run, fraction) for run in runs]
        evaluation = evaluate_masks(manifest, masks, finished, target, config.bootstrap)
        result = classification_result(
            evaluation,
            task="segment",
            method="segmentation",
            name=experiment.name or f"{bench.backbones.name}, {target}",
            data=bench.data,
            manifest=manifest,
            planned=runs,
            weights_name=bench.backbones.name,
            weights_report=bench.backbones.report,
            labels=[target],
            fraction=fraction,
            config=bench.settings(config),
            notes=notes,
        )
        yield fraction, result, evaluation.predictions


def _plan(experiment: Experiment, manifest: Manifest, fraction: float, known: NDArray[np.bool_]) -> list[Run]:
    """The runs of a fraction, on films that have a mask."""
    runs = []
    for run in plan_runs(manifest, experiment.split, experiment.seeds, fraction, experiment.folds):
        rows = {part: found[known[found]] for part, found in run.rows.items()}
        for part, found in rows.items():
            if len(found) == 0:
                raise UserError(f"none of the {len(run.rows[part]):,} {part} films of {run.name} has a mask.")
        runs.append(replace(run, rows=rows))
    return runs


def evaluate_masks(
    manifest: Manifest, masks: Masks, finished: Sequence[Finished], target: str, draws: int
) -> Evaluation:
    """Dice and IoU of all runs with mean, sd and interval, and a table of the predicted masks."""
    frames = [_frame(manifest, masks, one, part) for one in finished for part in ("val", "test")]
    tests = [frame for frame in frames if frame["part"].iloc[0] == "test"]
    values = [{name: frame[VALUE + name].to_numpy(np.float64) for name in METRICS} for frame in tests]
    patients = [frame["patient"].to_numpy(dtype=object) for frame in tests]
    drawn = bootstrap_means(values, patients, np.random.default_rng(_BOOTSTRAP_SEED), draws)
    means = [{name: _mean(column) for name, column in run.items()} for run in values]
    metrics = {name: estimate([run[name] for run in means], drawn[name]) for name in METRICS}
    runs = [_run_result(one, mean) for one, mean in zip(finished, means, strict=True)]
    return Evaluation(runs, metrics, {target: metrics}, pd.concat(frames, ignore_index=True))


def _frame(manifest: Manifest, masks: Masks, one: Finished, part: str) -> pd.DataFrame:
    """A row for each film of a part: its values, and the predicted mask as a cell like those of the manifest."""
    rows, bits = one.run.rows[part], one.answers[part]
    values: list[dict[str, Any]] = []
    for start in range(0, len(rows), _AT_ONCE):
        truth = masks.read(rows[start : start + _AT_ONCE])
        predicted = unpack(bits[start : start + _AT_ONCE], masks.size)
        dice, iou = m.dice(predicted, truth), m.iou(predicted, truth)
        positive = truth.reshape(len(truth), -1).sum(axis=1) > 0
        for number, mask in enumerate(predicted):
            seen = positive[number]
            values.append(
                {
                    f"{VALUE}dice": dice[number],
                    f"{VALUE}dice_positive": dice[number] if seen else np.nan,
                    f"{VALUE}iou": iou[number],
                    f"{VALUE}iou_positive": iou[number] if seen else np.nan,
                    RLE: encode_rle(mask),
                }
            )
    frame = manifest.table.iloc[rows][["image", "patient"]].reset_index(drop=True)
    frame.insert(0, "run", one.run.name)
    frame.insert(1, "part", part)
    return pd.concat([frame, pd.DataFrame(values)], axis=1)


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _run_result(one: Finished, means: Mapping[str, float]) -> RunResult:
    run = one.run
    return RunResult(
        name=run.name,
        seed=run.seed,
        fold=run.fold,
        split_hash=run.split.hash,
        weights_hash=one.weights_hash,
        films={part: len(rows) for part, rows in run.rows.items()},
        chosen=dict(one.chosen),
        metrics=dict(means),
    )

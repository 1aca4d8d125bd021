"""Segmentation: an encoder with a light decoder learns one mask; Dice over all films and over those with a mask.

The decoder reads tokens of several depths. The deepest are a coarse map; every stage doubles its sides with an
up-convolution and adds the map of a shallower depth. Nothing but tokens is read, so that the masks
measure the representation and not a second network on pixels.

The threshold and the smallest area are chosen on validation films: connected components of a prediction that are
smaller are dropped. Early stopping, which checks every epoch, applies the area to the whole prediction, which is
cheap. Masks are compared at the size of the films.

Shapes: B films, G x G tokens, D width of the encoder, w width of a stage, S pixels a side, T thresholds, A areas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from afire.data.manifest import Manifest
from afire.data.pack import Films
from afire.data.rle import encode_rle
from afire.errors import UserError
from afire.nn.residual import Trunk
from afire.nn.vit import Normalise, grid_of, initialise
from afire.tasks import metrics as m
from afire.tasks.evaluate import Evaluation, bootstrap_means
from afire.tasks.experiment import Experiment, Finished, claimed_folders, complete_run, fresh_encoder, open_bench
from afire.tasks.features import predict
from afire.tasks.masks import (
    Choice,
    Masks,
    choose,
    component_sizes,
    load_masks,
    mask_cells,
    pack,
    unpack,
    without_small_components,
)
from afire.tasks.results import VALUE, Result, Rows, Run, estimate, plan_runs
from afire.tasks.settings import SegDecoderConfig, SegmentConfig
from afire.tasks.supervised import Objective
from afire.weights import Weights

METRICS = ("dice", "dice_positive", "iou", "iou_positive")
RLE = "rle"  # column of the predictions with the predicted mask
Floats = NDArray[np.float64]
_SMALLEST_WIDTH = 16
_EPSILON = 1e-6
_BOOTSTRAP_SEED = 0
_SMOOTH = 1.0  # pixels; so that an empty film has a Dice loss and a gradient
_AT_ONCE = 512  # masks unpacked at a time


class Reading(nn.Module):
    """Tokens (B, 1 + L, D) of one depth to a map (B, w, G, G)."""

    def __init__(self, tokens: int, width: int, normalised: bool) -> None:
        super().__init__()
        self.norm = nn.Identity() if normalised else nn.LayerNorm(tokens, eps=_EPSILON)
        self.project = nn.Linear(tokens, width)

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        projected: Tensor = self.project(self.norm(tokens[:, 1:]))
        return projected.transpose(1, 2).reshape(len(tokens), -1, *grid)


class Stage(nn.Module):
    """A map (B, w, G, G) to twice its sides, (B, w', 2G, 2G), with a shallower map added where there is one."""

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        # A 2 x 2 up-convolution of stride 2, written as a linear map of each place to four.
        self.up = nn.Conv2d(width, 4 * out_width, kernel_size=1)
        self.norm = nn.GroupNorm(math.gcd(out_width, 8), out_width)
        self.mix = nn.Conv2d(out_width, out_width, kernel_size=3, padding=1)

    def forward(self, coarse: Tensor, shallower: Tensor | None) -> Tensor:
        fine = F.pixel_shuffle(self.up(coarse), 2)
        if shallower is not None:
            fine = fine + F.interpolate(shallower, fine.shape[-2:], mode="bilinear", align_corners=False)
        mixed: Tensor = self.mix(F.gelu(self.norm(fine)))
        return fine + mixed


class SegDecoder(nn.Module):
    """Tokens of several depths, the shallowest first, to logits (B, 1, S, S)."""

    def __init__(self, tokens: int, patch_size: int, config: SegDecoderConfig, levels: int) -> None:
        super().__init__()
        doublings = _doublings(patch_size, config.finest)
        widths = [max(config.width >> number, min(_SMALLEST_WIDTH, config.width)) for number in range(doublings + 1)]
        self.deepest = Reading(tokens, widths[0], normalised=True)
        # Depths beyond the number of stages are read at the coarse end, so that none is unused.
        self.readings = nn.ModuleList(
            Reading(tokens, widths[min(number + 1, doublings)], normalised=False) for number in range(levels - 1)
        )
        self.stages = nn.ModuleList(Stage(width, out_width) for width, out_width in pairwise(widths))
        self.logits = nn.Conv2d(widths[-1], 1, kernel_size=1)

    def forward(self, levels: Sequence[Tensor], grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
        """Tokens (B, 1 + L, D) of each depth -> logits of the mask at ``size``."""
        shallower = [reading(level, grid) for reading, level in zip(self.readings, levels[-2::-1], strict=True)]
        features = self.deepest(levels[-1], grid)
        for number, stage in enumerate(self.stages):
            is_last = number == len(self.stages) - 1
            maps = shallower[number:] if is_last else shallower[number : number + 1]
            features = stage(features, torch.stack(maps).sum(0) if maps else None)
        logits: Tensor = self.logits(features)
        return F.interpolate(logits, size, mode="bilinear", align_corners=False)


class Segmenter(nn.Module):
    """Images (B, 1, S, S) in [0, 1] -> logits (B, 1, S, S)."""

    def __init__(
        self,
        encoder: Trunk,
        normalise: Normalise,
        config: SegDecoderConfig,
        prior: float,
        generator: torch.Generator,
    ) -> None:
        """``prior`` is the share of pixels that lie inside: the last layer starts there."""
        super().__init__()
        self.encoder, self.normalise = encoder, normalise
        self.after = depths(len(encoder.blocks), config.levels)
        self.decoder = SegDecoder(encoder.width, encoder.patch_size, config, len(self.after))
        initialise(self.decoder, generator)
        nn.init.constant_(self.decoder.logits.bias, float(torch.logit(torch.tensor(prior), eps=1e-4)))  # type: ignore[arg-type]

    def forward(self, images: Tensor, depth: Tensor | None = None) -> Tensor:
        """Images (B, 1, H, W) in [0, 1] -> logits of the mask at their size."""
        levels = self.encoder.levels(self.normalise(images), self.after, depth)
        height, width = images.shape[-2:]
        logits: Tensor = self.decoder(levels, grid_of(height, width, self.encoder.patch_size), (height, width))
        return logits


def depths(blocks: int, levels: int) -> list[int]:
    """After how many blocks tokens are read: evenly spaced, the last included; no depth twice."""
    return sorted({max(1, round(blocks * number / levels)) for number in range(1, levels + 1)})


def _doublings(patch_size: int, finest: int) -> int:
    """How often the sides are doubled; at least once, so that there is a stage."""
    if patch_size <= finest:
        raise UserError(
            f"decoder.finest {finest} is not finer than the encoder's patches of {patch_size} px; choose a smaller one."
        )
    return max(1, round(math.log2(patch_size / finest)))


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
            overlap, total = (inside * truth).sum(1), inside.sum(1) + truth.sum(1)
            losses["dice"] = weights.dice * (1 - (2 * overlap + _SMOOTH) / (total + _SMOOTH)).sum()
        if weights.cross_entropy:
            pixel_losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
            losses["cross_entropy"] = weights.cross_entropy * pixel_losses.flatten(1).mean(1).sum()
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

    def score(self, summaries: NDArray[Any], rows: Rows) -> float:
        steps = len(self.thresholds)
        areas_BT1, overlaps_BT1 = summaries[:, :steps, None], summaries[:, steps : 2 * steps, None]
        large = areas_BT1 >= np.array(self.areas) * self.masks.size**2
        counts = (areas_BT1 * large, overlaps_BT1 * large, summaries[:, -1])
        return choose(*counts, self.thresholds.tolist(), self.areas, "both").value

    def keep_components(self, outputs: Tensor, rows: Rows) -> Tensor:
        """(B, 2TA + 1): what :meth:`keep` counts, for every smallest area of a connected component."""
        probabilities, truth = outputs.sigmoid()[:, 0].cpu().numpy(), self.masks.read(rows)
        min_pixels = np.array(self.areas) * self.masks.size**2
        counts = np.zeros((2, len(outputs), len(self.thresholds), len(min_pixels)), np.float32)
        for film, threshold in np.ndindex(len(outputs), len(self.thresholds)):
            inside = probabilities[film] >= self.thresholds[threshold].item()
            areas, overlaps = component_sizes(inside, truth[film])
            large = areas[:, None] >= min_pixels
            counts[:, film, threshold] = areas @ large, overlaps @ large
        flat = counts.reshape(2, len(outputs), -1)
        sums = truth.reshape(len(truth), -1).sum(axis=1, dtype=np.float32)
        return torch.from_numpy(np.concatenate([flat[0], flat[1], sums[:, None]], axis=1))

    def choose_components(self, summaries: NDArray[Any]) -> Choice:
        """The best pair for what :meth:`keep_components` kept."""
        pairs = (len(summaries), len(self.thresholds), len(self.areas))
        areas, overlaps = (half.reshape(pairs) for half in np.split(summaries[:, :-1], 2, axis=1))
        return choose(areas, overlaps, summaries[:, -1], self.thresholds.tolist(), self.areas, self.config.choice.by)


class Segmentation:
    """The task: a :class:`~afire.tasks.segment.Segmenter` that learns ``masks``."""

    def __init__(self, films: Films, masks: Masks, config: SegmentConfig) -> None:
        self.films, self.masks, self.config = films, masks, config

    def build(self, run: Run, backbone: Weights) -> tuple[Segmenter, MaskObjective]:
        encoder, normalise = fresh_encoder(backbone)
        generator = torch.Generator().manual_seed(run.seed)
        share = self.masks.share(run.rows["train"])
        model = Segmenter(encoder, normalise, self.config.decoder, share, generator)
        return model, MaskObjective(self.masks, self.config)

    def answer(
        self, model: nn.Module, objective: Objective, run: Run, accelerator: Accelerator
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Predicted masks of val and test as packed bits, (films of the subset, ceil(S*S/8))."""
        assert isinstance(objective, MaskObjective)
        counts = predict(model, self.films, run.rows["val"], accelerator, objective.keep_components)
        choice = objective.choose_components(counts)

        def inside(outputs: Tensor, rows: Rows) -> Tensor:
            masks = (outputs.sigmoid()[:, 0] >= choice.threshold).cpu().numpy()
            return torch.from_numpy(pack(without_small_components(masks, choice.min_area * self.masks.size**2)))

        subsets = ("val", "test")
        answers = {subset: predict(model, self.films, run.rows[subset], accelerator, inside) for subset in subsets}
        return answers, {"threshold": choice.threshold, "min_area": choice.min_area}


def run_segment(experiment: Experiment, config: SegmentConfig) -> Iterator[tuple[float, Result, pd.DataFrame]]:
    """For each label fraction its result and predictions. A collective call when several processes run it."""
    bench = open_bench(experiment, config.training.precision)
    films, manifest = bench.films, bench.films.manifest
    target, cells = mask_cells(manifest, config.masks)
    known = np.array([cell is not None for cell in cells])
    plans = {fraction: _plan(experiment, manifest, fraction, known) for fraction in experiment.folders}
    seen, seen_notes = bench.seen(next(iter(plans.values())))  # the test films are those of every fraction
    with claimed_folders(bench, plans):
        films_used = [rows for runs in plans.values() for run in runs for rows in run.rows.values()]
        rows_used = np.unique(np.concatenate(films_used))
        masks = load_masks(films, rows_used, cells, config.masks)
        task = Segmentation(films, masks, config)
        without = int((~known).sum())
        notes = [f"{without:,} of {len(known):,} films have no mask and were left out"] if without else []
        for fraction, runs in plans.items():
            finished = [complete_run(bench, task, run, fraction) for run in runs]
            evaluation = evaluate_masks(manifest, masks, finished, target, config.bootstrap)
            result = bench.result(
                evaluation,
                runs,
                config,
                task="segment",
                method="segmentation",
                title=target,
                labels=[target],
                fraction=fraction,
                notes=[*seen_notes, *notes],
                seen=seen,
            )
            yield fraction, result, evaluation.predictions


def _plan(experiment: Experiment, manifest: Manifest, fraction: float, known: NDArray[np.bool_]) -> list[Run]:
    """The runs of a fraction, on films that have a mask."""
    runs = []
    for run in plan_runs(manifest, experiment.split, experiment.seeds, fraction, experiment.folds):
        with_mask = {subset: rows[known[rows]] for subset, rows in run.rows.items()}
        for subset, rows in with_mask.items():
            if len(rows) == 0:
                raise UserError(f"none of the {len(run.rows[subset]):,} {subset} films of {run.name} has a mask.")
        runs.append(replace(run, rows=with_mask))
    return runs


def evaluate_masks(
    manifest: Manifest, masks: Masks, finished: Sequence[Finished], target: str, draws: int
) -> Evaluation:
    """Dice and IoU of all runs with mean, sd and interval, and a table of the predicted masks."""
    frames = [_frame(manifest, masks, run, subset) for run in finished for subset in ("val", "test")]
    tests = [frame for frame in frames if frame["part"].iloc[0] == "test"]
    values = [{name: frame[VALUE + name].to_numpy(np.float64) for name in METRICS} for frame in tests]
    patients = [frame["patient"].to_numpy(dtype=object) for frame in tests]
    bootstraps = bootstrap_means(values, patients, np.random.default_rng(_BOOTSTRAP_SEED), draws)
    means = [{name: _mean(column) for name, column in run.items()} for run in values]
    metrics = {name: estimate([run[name] for run in means], bootstraps[name]) for name in METRICS}
    runs = [
        outcome.run.result(outcome.weights_hash, outcome.chosen, mean)
        for outcome, mean in zip(finished, means, strict=True)
    ]
    return Evaluation(runs, metrics, {target: metrics}, pd.concat(frames, ignore_index=True))


def _frame(manifest: Manifest, masks: Masks, finished: Finished, subset: str) -> pd.DataFrame:
    """A row for each film of a subset: its values, and the predicted mask written like those of the manifest."""
    rows, bits = finished.run.rows[subset], finished.answers[subset]
    values: list[dict[str, Any]] = []
    for start in range(0, len(rows), _AT_ONCE):
        truth = masks.read(rows[start : start + _AT_ONCE])
        predicted = unpack(bits[start : start + _AT_ONCE], masks.size)
        dice, iou = m.dice(predicted, truth), m.iou(predicted, truth)
        positive = truth.reshape(len(truth), -1).sum(axis=1) > 0
        for number, mask in enumerate(predicted):
            has_mask = positive[number]
            values.append(
                {
                    f"{VALUE}dice": dice[number],
                    f"{VALUE}dice_positive": dice[number] if has_mask else np.nan,
                    f"{VALUE}iou": iou[number],
                    f"{VALUE}iou_positive": iou[number] if has_mask else np.nan,
                    RLE: encode_rle(mask),
                }
            )
    frame = manifest.table.iloc[rows][["image", "patient"]].reset_index(drop=True)
    frame.insert(0, "run", finished.run.name)
    frame.insert(1, "part", subset)
    return pd.concat([frame, pd.DataFrame(values)], axis=1)


def _mean(values: Floats) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else float("nan")

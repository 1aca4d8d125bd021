"""A whole probe: weights and films to results, for one or several label fractions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.config import Config
from afire.data.dataset import Films, open_films
from afire.data.splits import Split
from afire.model.afire import Network
from afire.tasks.backbone import Backbones, pick_device
from afire.tasks.evaluate import classification_result, evaluate
from afire.tasks.features import data_content_hash, film_features
from afire.tasks.labels import check_classes, task_labels
from afire.tasks.probe import GRID_C, GRID_K, Method, Source, probe_runs
from afire.tasks.results import Result
from afire.tasks.runs import Run, plan_runs
from afire.tasks.trivial import TRIVIAL, trivial_features, trivial_hash

_BOOTSTRAP_SEED = 0
_METHOD_WORDS = {"linear": "linear", "knn": "k-NN"}

logger = logging.getLogger("afire")


@dataclass(frozen=True)
class ProbeTask:
    """Everything a probe needs to know. ``weights`` may also be ``metadata`` or ``sharpness``."""

    weights: str
    data: Path
    seeds: Sequence[int]
    root: Path | None = None
    split: Split | None = None
    labels: Sequence[str] | None = None
    method: Method = "linear"
    pooling: Literal["mean", "class"] = "mean"
    network: Network = "teacher"
    folds: int = 0
    name: str | None = None
    config: Config | None = None
    cache: Path | None = None
    device: str = "cpu"


def run_probe(
    task: ProbeTask, fractions: Sequence[float] = (1.0,)
) -> Iterator[tuple[float, tuple[Result, pd.DataFrame]]]:
    """For each label fraction its result and predictions, in the order given."""
    features = _TrivialFeatures(task) if task.weights in TRIVIAL else _EncoderFeatures(task)
    films = features.films
    names, truth = task_labels(films.manifest, task.labels)
    content = data_content_hash(films)
    # All plans first: a split or a label that cannot work ends the command before the first feature is computed.
    plans = {
        fraction: plan_runs(films.manifest, task.split, task.seeds, fraction, task.folds) for fraction in fractions
    }
    warnings = {fraction: _class_warnings(names, truth, runs) for fraction, runs in plans.items()}
    for fraction, runs in plans.items():
        outcomes, notes = probe_runs(features.source(runs), truth, runs, task.method)
        evaluation = evaluate(films.manifest, names, truth, outcomes, np.random.default_rng(_BOOTSTRAP_SEED))
        result = classification_result(
            evaluation,
            task="probe",
            method=task.method,
            name=task.name or f"{features.name} ({_METHOD_WORDS[task.method]})",
            data={"name": task.data.name, "hash": content, "films": len(films), "size": films.size},
            manifest=films.manifest,
            planned=runs,
            weights_name=features.name,
            weights_report=features.report,
            labels=names,
            fraction=fraction,
            config={**_settings(task), **features.settings},
            notes=[*warnings[fraction], *_seed_note(features.differ, runs), *notes],
        )
        yield fraction, (result, evaluation.predictions)


class _EncoderFeatures:
    """Features of an encoder. Random weights are drawn anew for each seed; other weights are the same for all."""

    def __init__(self, task: ProbeTask) -> None:
        self.task = task
        self.device = pick_device(task.device)
        self.backbones = Backbones(task.weights, task.seeds, task.config, task.network)
        first = self.backbones.first
        logger.info("%s: %s", first.name, first.report)
        image = first.config.image
        self.films: Films = open_films(task.data, task.root, image.size, image.fit, image.voi)
        self.differ = self.backbones.differ
        self.name, self.report = self.backbones.name, self.backbones.report
        self.settings = {"encoder": first.config.encoder.model_dump(), "image": first.config.image.model_dump()}
        self._features: tuple[str, NDArray[np.float32]] | None = None

    def source(self, runs: Sequence[Run]) -> Source:
        self._features = None
        rows = _used(runs)

        def features(run: Run) -> NDArray[np.float32]:
            backbone = self.backbones.of(run.seed)
            if self._features is None or self._features[0] != backbone.hash:
                found = film_features(backbone, self.films, rows, self.task.pooling, self.device, self.task.cache)
                self._features = backbone.hash, _spread(found, rows, len(self.films))
            return self._features[1]

        return Source(features, lambda run: self.backbones.of(run.seed).hash)


class _TrivialFeatures:
    """Features that need no weights: the same for every seed."""

    def __init__(self, task: ProbeTask) -> None:
        self.kind = task.weights
        image = (task.config or Config()).image
        self.films: Films = open_films(task.data, task.root, image.size, image.fit, image.voi)
        self.name = TRIVIAL[self.kind]
        self.report = "no weights"
        self.differ = False
        self.settings: dict[str, Any] = {}

    def source(self, runs: Sequence[Run]) -> Source:
        rows = _used(runs)
        found = _spread(trivial_features(self.kind, self.films, rows), rows, len(self.films))
        return Source(lambda _: found, lambda _: trivial_hash(self.kind))


def _used(runs: Sequence[Run]) -> NDArray[np.int64]:
    return np.unique(np.concatenate([rows for run in runs for rows in run.rows.values()]))


def _spread(features: NDArray[np.float32], rows: NDArray[np.int64], films: int) -> NDArray[np.float32]:
    """Features by row of the manifest; rows that are not used stay NaN, so that using one would be seen."""
    spread = np.full((films, features.shape[1]), np.nan, np.float32)
    spread[rows] = features
    return spread


def _class_warnings(names: Sequence[str], truth: NDArray[np.float64], runs: Sequence[Run]) -> list[str]:
    warnings = []
    for run in runs:
        warnings += [f"{run.name}: {sentence}" for sentence in check_classes(names, truth, run.rows)]
    return warnings


def _seed_note(differ: bool, runs: Sequence[Run]) -> list[str]:
    """A deterministic probe of fixed weights on one split gives one number; its sd must not pass for certainty."""
    same_parts = len({(run.fold, run.split.hash) for run in runs}) < len(runs)
    if len({run.seed for run in runs}) > 1 and same_parts and not differ:
        return ["the seeds change nothing here (same weights, same split), so their sd says nothing"]
    return []


def _settings(task: ProbeTask) -> dict[str, Any]:
    grid = {"C": list(GRID_C)} if task.method == "linear" else {"k": list(GRID_K)}
    return {"pooling": task.pooling, "network": task.network, "seeds": list(task.seeds), "folds": task.folds, **grid}

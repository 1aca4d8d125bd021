"""Probes on fixed features: logistic regression and nearest neighbours, for one label or many.

:func:`run_probe` goes from weights and films to results, for one or several label fractions. Everything is chosen on
validation (C, k, thresholds), nothing is refitted afterwards, and the test films are scored once.

Shapes: N films, M queries, D features, C labels; a truth is 1, 0 or NaN (unknown: left out for that label).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from afire.config import Config
from afire.data.keys import Seen
from afire.data.manifest import task_labels
from afire.data.pack import Films, config_for, open_films
from afire.data.splits import Split
from afire.tasks import metrics as m
from afire.tasks.evaluate import Scores, check_classes, classification_result, evaluate
from afire.tasks.features import (
    TRIVIAL,
    data_content_hash,
    film_features,
    network_features,
    trivial_features,
    trivial_hash,
)
from afire.tasks.guard import seen_in_pretraining
from afire.tasks.results import Result, Run, plan_runs
from afire.weights import WeightsBySeed, pick_device
from afire.weights.lite0 import LITE0, open_lite0

Floats = NDArray[np.float64]
Method = Literal["linear", "knn"]
Subsets = Mapping[str, tuple[NDArray[np.float32], Floats]]  # train, val, test: features (N, D) and truth (N, C)
GRID_C = tuple(10.0**power for power in range(-5, 3))
GRID_K = (5, 10, 20, 50)
_TEMPERATURE = 0.07  # of the neighbours' votes, exp(cosine / temperature)
_MOST_ITERATIONS = 2000
_ROWS_AT_ONCE = 1024
_BOOTSTRAP_SEED = 0
_METHOD_NAMES = {"linear": "linear", "knn": "k-NN"}

logger = logging.getLogger("afire")


@dataclass(frozen=True)
class ProbeTask:
    """Everything a probe needs to know. ``weights`` may also be one of :data:`~afire.tasks.features.TRIVIAL`."""

    weights: str
    data: Path
    seeds: Sequence[int]
    root: Path | None = None
    split: Split | None = None
    labels: Sequence[str] | None = None
    method: Method = "linear"
    pooling: Literal["mean", "class"] = "mean"
    network: str | None = None
    folds: int = 0
    name: str | None = None
    config: Config | None = None
    cache: Path | None = None
    device: str = "cpu"


def run_probe(
    task: ProbeTask, fractions: Sequence[float] = (1.0,)
) -> Iterator[tuple[float, tuple[Result, pd.DataFrame]]]:
    """For each label fraction its result and predictions, in the order given."""
    kinds = {LITE0: _Lite0Features, **dict.fromkeys(TRIVIAL, _TrivialFeatures)}
    features: _Features = kinds.get(task.weights, _EncoderFeatures)(task)
    films = features.films
    names, truth = task_labels(films.manifest, task.labels)
    content = data_content_hash(films)
    # All plans first: a split or a label that cannot work ends the command before the first feature is computed.
    plans = {
        fraction: plan_runs(films.manifest, task.split, task.seeds, fraction, task.folds) for fraction in fractions
    }
    class_notes = {fraction: _class_notes(names, truth, runs) for fraction, runs in plans.items()}
    seen, seen_notes = features.seen(plans[fractions[0]])  # the test films are those of every fraction
    for fraction, runs in plans.items():
        outcomes, notes = probe_runs(features.source(runs), truth, runs, task.method)
        evaluation = evaluate(films.manifest, names, truth, outcomes, np.random.default_rng(_BOOTSTRAP_SEED))
        result = classification_result(
            evaluation,
            task="probe",
            method=task.method,
            name=task.name or f"{features.name} ({_METHOD_NAMES[task.method]})",
            data={"name": task.data.name, "hash": content, "films": len(films), "size": films.size},
            manifest=films.manifest,
            planned=runs,
            weights_name=features.name,
            weights_report=features.report,
            labels=names,
            fraction=fraction,
            config={**_settings(task), **features.settings},
            notes=[*seen_notes, *class_notes[fraction], *_seed_note(features.differ, runs), *notes],
            seen=seen,
        )
        yield fraction, (result, evaluation.predictions)


@dataclass(frozen=True)
class Source:
    """Where the features of a run come from: all films of the manifest that any run uses, by row."""

    features: Callable[[Run], NDArray[np.float32]]  # (rows of the manifest, D); rows that no run uses may hold anything
    weights_hash: Callable[[Run], str]


def probe_runs(source: Source, truth: Floats, runs: Sequence[Run], method: Method) -> tuple[list[Scores], list[str]]:
    """Probe every run; the scores of each, and notes about all."""
    outcomes: list[Scores] = []
    notes: list[str] = []
    for run in runs:
        features = source.features(run)
        probed = PROBES[method]({subset: (features[rows], truth[rows]) for subset, rows in run.rows.items()})
        logger.info("%s: %s", run.name, ", ".join(f"{name} {value:.4g}" for name, value in probed.chosen.items()))
        outcomes.append(Scores(run, probed.val, probed.test, source.weights_hash(run), probed.chosen))
        notes += [f"{run.name}: {note}" for note in probed.notes]
    return outcomes, notes


class _EncoderFeatures:
    """Features of an encoder. Random weights are drawn anew for each seed; other weights are the same for all."""

    def __init__(self, task: ProbeTask) -> None:
        self.task = task
        self.device = pick_device(task.device)
        config = config_for(task.config, task.data) if task.config is not None else None
        self.backbones = WeightsBySeed(task.weights, task.seeds, config, task.network)
        first = self.backbones.first
        logger.info("%s: %s", first.name, first.report)
        image = first.config.image
        self.films: Films = open_films(task.data, task.root, image.size, image.fit, image.voi)
        self.differ = self.backbones.differ
        self.name, self.report = self.backbones.name, self.backbones.report
        self.settings = {
            "network": first.network,
            "encoder": first.config.encoder.model_dump(),
            "image": first.config.image.model_dump(),
        }
        self._features: tuple[str, NDArray[np.float32]] | None = None

    def seen(self, runs: Sequence[Run]) -> tuple[dict[str, Seen], list[str]]:
        """What the pre-training saw of the test films, and notes about it."""
        weights = {run.name: self.backbones.of(run.seed) for run in runs}
        seen, notes = seen_in_pretraining(weights, self.films, {run.name: run.rows["test"] for run in runs})
        return {"pretraining": seen}, notes

    def source(self, runs: Sequence[Run]) -> Source:
        self._features = None
        rows = _used(runs)

        def features(run: Run) -> NDArray[np.float32]:
            backbone = self.backbones.of(run.seed)
            if self._features is None or self._features[0] != backbone.hash:
                computed = film_features(backbone, self.films, rows, self.task.pooling, self.device, self.task.cache)
                self._features = backbone.hash, _spread(computed, rows, len(self.films))
            return self._features[1]

        return Source(features, lambda run: self.backbones.of(run.seed).hash)


class _TrivialFeatures:
    """Features that need no weights: the same for every seed."""

    def __init__(self, task: ProbeTask) -> None:
        self.kind = task.weights
        image = config_for(task.config or Config(), task.data).image
        self.films: Films = open_films(task.data, task.root, image.size, image.fit, image.voi)
        self.name = {LITE0: "EfficientNet-Lite0", **TRIVIAL}[self.kind]
        self.report = "no weights"
        self.differ = False
        self.settings: dict[str, Any] = {}

    def seen(self, runs: Sequence[Run]) -> tuple[dict[str, Seen], list[str]]:
        """Nothing was pre-trained."""
        return {}, []

    def source(self, runs: Sequence[Run]) -> Source:
        rows = _used(runs)
        features = _spread(trivial_features(self.kind, self.films, rows), rows, len(self.films))
        return Source(lambda _: features, lambda _: trivial_hash(self.kind))


class _Lite0Features(_TrivialFeatures):
    """Features of a convolutional network that learnt ImageNet: the same for every seed."""

    def __init__(self, task: ProbeTask) -> None:
        network, self.hash = open_lite0()
        super().__init__(task)
        self.device = pick_device(task.device)
        self.network = network.to(self.device)
        self.report = "ImageNet weights of EfficientNet-Lite0, films enlarged to 224 px"

    def source(self, runs: Sequence[Run]) -> Source:
        rows = _used(runs)
        features = _spread(network_features(self.network, self.films, rows, self.device), rows, len(self.films))
        return Source(lambda _: features, lambda _: self.hash)


_Features = _EncoderFeatures | _TrivialFeatures


def _used(runs: Sequence[Run]) -> NDArray[np.int64]:
    return np.unique(np.concatenate([rows for run in runs for rows in run.rows.values()]))


def _spread(features: NDArray[np.float32], rows: NDArray[np.int64], films: int) -> NDArray[np.float32]:
    """Features by row of the manifest; rows that are not used stay NaN, so that using one would be seen."""
    spread = np.full((films, features.shape[1]), np.nan, np.float32)
    spread[rows] = features
    return spread


def _class_notes(names: Sequence[str], truth: NDArray[np.float64], runs: Sequence[Run]) -> list[str]:
    return [f"{run.name}: {note}" for run in runs for note in check_classes(names, truth, run.rows)]


def _seed_note(differ: bool, runs: Sequence[Run]) -> list[str]:
    """A deterministic probe of fixed weights on one split gives one number; its sd must not pass for certainty."""
    same_split = len({(run.fold, run.split.hash) for run in runs}) < len(runs)
    if len({run.seed for run in runs}) > 1 and same_split and not differ:
        return ["the seeds change nothing here (same weights, same split), so their sd says nothing"]
    return []


def _settings(task: ProbeTask) -> dict[str, Any]:
    grid = {"C": list(GRID_C)} if task.method == "linear" else {"k": list(GRID_K)}
    return {"pooling": task.pooling, "seeds": list(task.seeds), "folds": task.folds, **grid}


@dataclass(frozen=True)
class Probed:
    """Scores (films, C) on val and test, what was chosen on validation, and notes."""

    val: Floats
    test: Floats
    chosen: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def linear_probe(subsets: Subsets) -> Probed:
    """Standardised logistic regression, one label against the rest; one C for all labels, by mean validation AUC.

    Of equal C's the smallest is taken: the more regular answer.
    """
    train, val, test = _standardised(subsets)
    truth_train, truth_val = subsets["train"][1], subsets["val"][1]
    models = [_Logistic(train[known], truth[known]) for truth, known in _known_columns(truth_train)]
    best: tuple[float, float, Floats, Floats] | None = None
    stopped: list[float] = []
    for c in GRID_C:
        converged = [model.fit(c) for model in models]
        stopped += [] if all(converged) else [c]
        scores = np.stack([model.scores(val) for model in models], axis=1)
        value = _mean_auc(scores, truth_val)
        if best is None or value > best[0]:
            best = value, c, scores, np.stack([model.scores(test) for model in models], axis=1)
    assert best is not None
    value, c, scores_val, scores_test = best
    notes = [f"logistic regression with C {c:g} stopped before it converged"] if c in stopped else []
    return Probed(scores_val, scores_test, {"C": c, "val_auc": value}, notes)


def knn_probe(subsets: Subsets) -> Probed:
    """Votes of the k most similar training films (cosine of standardised features); k by mean validation AUC."""
    train, val, test = (_unit_rows(features) for features in _standardised(subsets))
    truth_train, truth_val = subsets["train"][1], subsets["val"][1]
    possible = [k for k in GRID_K if k <= len(train)] or [len(train)]
    votes_val = knn_scores(train, truth_train, val, possible)
    values = {k: _mean_auc(votes_val[k], truth_val) for k in possible}
    # Of equal k's the largest: more voters, less noise.
    k = max(possible, key=lambda count: (values[count], count))
    votes_test = knn_scores(train, truth_train, test, [k])
    return Probed(votes_val[k], votes_test[k], {"k": k, "val_auc": values[k]})


PROBES: dict[Method, Callable[[Subsets], Probed]] = {"linear": linear_probe, "knn": knn_probe}


def knn_scores(train_ND: Floats, truth_NC: Floats, queries_MD: Floats, ks: Sequence[int]) -> dict[int, Floats]:
    """For each k the votes (M, C) of the k nearest training films; rows are unit vectors.

    A neighbour votes with weight exp(cosine / 0.07) where its label is known; where none is, the vote is
    the label's share in training.
    """
    largest_k = max(ks)
    blocks: dict[int, list[Floats]] = {k: [] for k in ks}
    known = ~np.isnan(truth_NC)
    values = np.where(known, truth_NC, 0.0)
    fallback = _shares(truth_NC)
    for start in range(0, len(queries_MD), _ROWS_AT_ONCE):
        cosine = queries_MD[start : start + _ROWS_AT_ONCE] @ train_ND.T
        nearest = (
            np.argpartition(-cosine, largest_k - 1, axis=1)[:, :largest_k]
            if largest_k < len(train_ND)
            else _all(cosine)
        )
        order = np.argsort(-np.take_along_axis(cosine, nearest, axis=1), axis=1, kind="stable")
        nearest = np.take_along_axis(nearest, order, axis=1)
        closeness = np.take_along_axis(cosine, nearest, axis=1)
        weight = np.exp((closeness - closeness[:, :1]) / _TEMPERATURE)  # of the nearest 1: only ratios count
        for k in ks:
            neighbours, share = nearest[:, :k], weight[:, :k, None]
            voters = (share * known[neighbours]).sum(axis=1)
            votes = (share * values[neighbours]).sum(axis=1)
            blocks[k].append(np.where(voters > 0, votes / np.where(voters > 0, voters, 1.0), fallback))
    return {k: np.concatenate(scores) for k, scores in blocks.items()}


class _Logistic:
    """One label's logistic regression; it starts each fit from the last. A label with one class scores its share."""

    def __init__(self, features: Floats, truth: Floats) -> None:
        self.features, self.truth = features, truth
        self.constant = float(truth.mean()) if len(truth) else 0.0
        self.teachable = 0 < self.constant < 1
        self.model = LogisticRegression(max_iter=_MOST_ITERATIONS, warm_start=True)

    def fit(self, c: float) -> bool:
        """Fit with inverse regularisation ``c``; whether it converged."""
        if not self.teachable:
            return True
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ConvergenceWarning)
            self.model.set_params(C=c).fit(self.features, self.truth)
        return not any(issubclass(warning.category, ConvergenceWarning) for warning in caught)

    def scores(self, features: Floats) -> Floats:
        """Probabilities (N,)."""
        if not self.teachable:
            return np.full(len(features), self.constant)
        probabilities: Floats = self.model.predict_proba(features)[:, 1]
        return probabilities


def _known_columns(truth_NC: Floats) -> list[tuple[Floats, NDArray[np.bool_]]]:
    return [(truth_NC[:, c], ~np.isnan(truth_NC[:, c])) for c in range(truth_NC.shape[1])]


def _standardised(subsets: Subsets) -> tuple[Floats, Floats, Floats]:
    """Train, val and test features by the mean and deviation of train; a feature that never varies becomes 0."""
    train = subsets["train"][0].astype(np.float64)
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    scale = np.where(deviation > 1e-12 * np.maximum(np.abs(mean), 1e-12), deviation, np.inf)
    val, test = (subsets[name][0].astype(np.float64) for name in ("val", "test"))
    return (train - mean) / scale, (val - mean) / scale, (test - mean) / scale


def _unit_rows(features: Floats) -> Floats:
    length = np.linalg.norm(features, axis=1, keepdims=True)
    unit: Floats = features / np.where(length > 0, length, 1.0)
    return unit


def _mean_auc(scores: Floats, truth: Floats) -> float:
    """Mean AUC of the labels that have both classes, chance where none has."""
    values = [m.auc(scores[:, c], truth[:, c]) for c in range(scores.shape[1])]
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else 0.5


def _shares(truth_NC: Floats) -> Floats:
    """Share of positives among the known films of each label, (C,); 0 where none is known."""
    counts = (~np.isnan(truth_NC)).sum(axis=0)
    shares: Floats = np.nansum(truth_NC, axis=0) / np.maximum(counts, 1)
    return shares


def _all(cosine: Floats) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(cosine.shape[1]), cosine.shape)

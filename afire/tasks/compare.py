"""Results side by side: the same films, then means, a paired bootstrap and a t-test against the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.errors import UserError
from afire.tasks import metrics as m
from afire.tasks.evaluate import TestScores, bootstrap_means, bootstrap_values
from afire.tasks.results import PREDICTIONS, SCORE, TRUTH, VALUE, Result, find_results, read_predictions, read_result

Floats = NDArray[np.float64]
_SEED, _DRAWS = 0, 2000


@dataclass(frozen=True)
class Entry:
    """A result, its folder, and what the table calls it."""

    path: Path
    result: Result
    name: str


@dataclass(frozen=True)
class Pair:
    """A result against the reference, in one metric. ``paired`` is None if films differ or predictions are missing."""

    name: str
    reference: str
    metric: str
    difference: float
    paired: m.Difference | None
    t: m.TTest


@dataclass(frozen=True)
class Comparison:
    """Results of one label fraction; the first is the reference of all pairs."""

    fraction: float
    entries: list[Entry]
    metrics: list[str]
    labels: list[str]
    pairs: list[Pair]
    notes: list[str] = field(default_factory=list)

    @property
    def over_folds(self) -> bool:
        """Whether runs of a result are folds of one split."""
        return any(_has_folds(entry) for entry in self.entries)


def compare(
    paths: Sequence[Path],
    *,
    metrics: Sequence[str] | None = None,
    allow_different_splits: bool = False,
    need_predictions: bool = True,
) -> list[Comparison]:
    """Compare results, a comparison for each label fraction. A path may hold several results (fractions, methods).

    Results whose split hashes differ are refused unless ``allow_different_splits``: then all of them form one
    comparison, and those tested on other films have no paired bootstrap. Without ``need_predictions``, results whose
    predictions are missing are compared without it as well.
    """
    folders = list(dict.fromkeys(folder.resolve() for path in paths for folder in find_results(path)))
    if len(folders) < 2:
        raise UserError("there is only one result to compare; give at least two.")
    results = [read_result(folder) for folder in folders]
    entries = [Entry(*entry) for entry in zip(folders, results, _names(folders, results), strict=True)]
    _refuse_other_labels(entries)
    if allow_different_splits:
        return [_compare(entries, metrics, need_predictions)]
    groups = {fraction: [e for e in entries if e.result.fraction == fraction] for fraction in _fractions(entries)}
    for group in groups.values():
        _refuse_other_splits(group)
    alone = [group[0] for group in groups.values() if len(group) == 1]
    if alone:
        raise UserError(
            f"{alone[0].path} was trained on {100 * alone[0].result.fraction:g} % of the labels, which no other result "
            "was; leave it out, or add --allow-different-splits."
        )
    return [_compare(group, metrics, need_predictions) for group in groups.values()]


@dataclass(frozen=True)
class AllPairs:
    """Every result against every other in one metric: row minus column, and two p-values; NaN on the diagonal.

    ``p_patients`` is of the paired bootstrap, NaN where the test films differ; ``p_runs`` of Welch's t-test.
    """

    metric: str
    names: list[str]
    difference: Floats  # (N, N)
    p_patients: Floats
    p_runs: Floats


def all_pairs(comparison: Comparison, metric: str | None = None, need_predictions: bool = True) -> AllPairs:
    """The same tests as against the first result, for all pairs of a comparison."""
    metric = metric or comparison.metrics[0]
    entries = comparison.entries
    draws = [_draws(entry, need_predictions).get(metric) for entry in entries]
    number = len(entries)
    difference, patients, runs = (np.full((number, number), np.nan) for _ in range(3))
    for row in range(number):
        for column in range(row):
            pair = _pair(entries[row], entries[column], metric, draws[row], draws[column])
            difference[row, column], difference[column, row] = pair.difference, -pair.difference
            runs[row, column] = runs[column, row] = pair.t.p
            if pair.paired is not None:
                patients[row, column] = patients[column, row] = pair.paired.p
    return AllPairs(metric, [entry.name for entry in entries], difference, patients, runs)


def _fractions(entries: Sequence[Entry]) -> list[float]:
    return sorted({entry.result.fraction for entry in entries})


def _names(folders: Sequence[Path], results: Sequence[Result]) -> list[str]:
    """Each result's name, with its folder where two results of a fraction share the name."""
    keys = [(result.name, result.fraction) for result in results]
    return [
        f"{key[0]} ({folder.name})" if keys.count(key) > 1 else key[0]
        for key, folder in zip(keys, folders, strict=True)
    ]


def _refuse_other_labels(entries: Sequence[Entry]) -> None:
    first = entries[0]
    for entry in entries[1:]:
        if set(entry.result.labels) != set(first.result.labels):
            raise UserError(
                f"{first.path.name} is about {', '.join(first.result.labels)}, {entry.path.name} about "
                f"{', '.join(entry.result.labels)}; only results about the same labels can be compared."
            )


def _refuse_other_splits(entries: Sequence[Entry]) -> None:
    first = entries[0]
    for entry in entries[1:]:
        if entry.result.split_hash != first.result.split_hash:
            same_test = entry.result.test_hash == first.result.test_hash
            difference = "train or validate on other films" if same_test else "are tested on other films"
            raise UserError(
                f"{first.path.name} and {entry.path.name} {difference} (split {first.result.split_hash[:12]} and "
                f"{entry.result.split_hash[:12]}); give both the same --data, --split, --seeds, --folds and --fraction,"
                " or add --allow-different-splits."
            )


def _compare(entries: list[Entry], metric_names: Sequence[str] | None, need_predictions: bool) -> Comparison:
    reference = entries[0]
    metrics = _shared_metrics(entries, metric_names)
    draws = [_draws(entry, need_predictions) for entry in entries]
    pairs = [
        _pair(entry, reference, metric, draws[number].get(metric), draws[0].get(metric))
        for number, entry in enumerate(entries)
        if number
        for metric in metrics
    ]
    return Comparison(
        reference.result.fraction, entries, metrics, list(reference.result.labels), pairs, _notes(entries, pairs)
    )


def _shared_metrics(entries: Sequence[Entry], metric_names: Sequence[str] | None) -> list[str]:
    shared = [name for name in entries[0].result.metrics if all(name in e.result.metrics for e in entries)]
    if not shared:
        raise UserError("these results have no metric in common; compare results of one kind of task.")
    for name in metric_names or ():
        if name not in shared:
            raise UserError(f"not all of these results have the metric {name!r}; they share {', '.join(shared)}.")
    return list(metric_names or shared)


def _pair(entry: Entry, reference: Entry, metric: str, draws: Floats | None, reference_draws: Floats | None) -> Pair:
    ours, theirs = entry.result.metrics[metric], reference.result.metrics[metric]
    difference = ours.mean - theirs.mean
    paired = None
    same_films = entry.result.test_hash == reference.result.test_hash
    if same_films and draws is not None and reference_draws is not None:
        paired = m.paired_difference(difference, draws - reference_draws)
    values = [[value for value in side.values if not np.isnan(value)] for side in (ours, theirs)]
    return Pair(entry.name, reference.name, metric, difference, paired, m.t_test(values[0], values[1]))


def _draws(entry: Entry, need_predictions: bool) -> dict[str, Floats]:
    """Each metric of a result in every draw of patients. Equal test films give equal draws, so results pair up.

    Empty where there are no predictions and ``need_predictions`` is false.
    """
    if not need_predictions and not (entry.path / PREDICTIONS).exists():
        return {}
    predictions = read_predictions(entry.path)
    test = predictions[predictions["part"] == "test"]
    generator = np.random.default_rng(_SEED)
    frames = {str(name): frame for name, frame in test.groupby("run", sort=False)}
    missing_runs = [run.name for run in entry.result.runs if run.name not in frames]
    if missing_runs:
        raise UserError(f"the predictions of {entry.path} lack the run {missing_runs[0]}; run the task again.")
    ordered = [frames[run.name] for run in entry.result.runs]
    if any(name.startswith(SCORE) for name in test.columns):
        tests = [
            _test_scores(frame, entry.result.labels, run.chosen.get("thresholds", {}))
            for frame, run in zip(ordered, entry.result.runs, strict=True)
        ]
        return {name: values[:, -1] for name, values in bootstrap_values(tests, generator, _DRAWS).items()}
    names = [name for name in test.columns if name.startswith(VALUE)]
    values = [{name.removeprefix(VALUE): frame[name].to_numpy(np.float64) for name in names} for frame in ordered]
    patients = [frame["patient"].to_numpy(dtype=object) for frame in ordered]
    return bootstrap_means(values, patients, generator, _DRAWS)


def _test_scores(frame: pd.DataFrame, labels: Sequence[str], thresholds: dict[str, float]) -> TestScores:
    return TestScores(
        scores=frame[[SCORE + label for label in labels]].to_numpy(np.float64),
        truth=frame[[TRUTH + label for label in labels]].to_numpy(np.float64),
        patients=frame["patient"].to_numpy(dtype=object),
        thresholds=np.array([thresholds.get(label, 0.5) for label in labels]),
    )


def _has_folds(entry: Entry) -> bool:
    return len({run.fold for run in entry.result.runs if run.fold is not None}) > 1


def _notes(entries: Sequence[Entry], pairs: Sequence[Pair]) -> list[str]:
    notes = []
    splits = {entry.result.split_hash for entry in entries}
    if len(splits) > 1:
        notes.append("not all of these results use the same split: differences may come from the films")
    tested = {entry.result.test_hash for entry in entries}
    if len(tested) > 1:
        notes.append("results tested on other films than the first have no paired bootstrap")
    elif any(pair.paired is None for pair in pairs):
        notes.append("results without their predictions have no paired bootstrap")
    if any(_has_folds(entry) for entry in entries):
        notes.append(
            "folds of one split are not independent, because they share training films: p-values of the t-test over "
            "them are too small, and so are their sds"
        )
    if any(np.isnan(pair.t.p) for pair in pairs):
        notes.append("no t-test where a result has one run only or its runs do not vary")
    for entry in entries:
        record = entry.result.seen.get("pretraining", {})
        if record.get("answer") == "seen":
            notes.append(
                f"the pre-training of {entry.name} saw {record['seen']:,} of its {record['films']:,} test films"
            )
    names = {pair.name for pair in pairs}
    if len(names) > 1:
        notes.append(f"p-values are not corrected for the {len(names)} comparisons")
    return notes

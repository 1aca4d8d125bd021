"""From labels and scores to metrics with mean, sd and interval: one way for every classification task.

:func:`check_classes` says whether the subsets of a task can teach and test its labels. Thresholds come from the
validation films of the same run; the test films are looked at once, here.

Shapes: N films (test films of a run, where it is about scores), C labels, B bootstrap draws, P patients of all runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.data.keys import Seen
from afire.data.manifest import Manifest
from afire.errors import UserError
from afire.tasks import metrics as m
from afire.tasks.results import (
    SCORE,
    TRUTH,
    Estimate,
    Result,
    Run,
    RunResult,
    estimate,
    joint_hash,
    split_hash,
    test_hash,
    test_patients,
)
from afire.training.run_folder import environment

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """The scores of a run, (films, C), in the order of ``run.rows["val"]`` and ``run.rows["test"]``."""

    run: Run
    val: Floats
    test: Floats
    weights_hash: str
    chosen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Everything about the scores that a :class:`~afire.tasks.results.Result` needs."""

    runs: list[RunResult]
    metrics: dict[str, Estimate]
    per_label: dict[str, dict[str, Estimate]]
    predictions: pd.DataFrame


@dataclass(frozen=True)
class TestScores:
    """The test films of one run: scores and truth (N, C), patients (N,), thresholds (C,) chosen on validation."""

    scores: Floats
    truth: Floats
    patients: NDArray[np.object_]
    thresholds: Floats

    __test__ = False  # not a test, whatever pytest makes of its name


def check_classes(names: Sequence[str], truth_NC: Floats, subsets: Mapping[str, NDArray[np.int64]]) -> list[str]:
    """Notes on labels with one class only in a subset; refused when no label has both classes in every subset.

    ``subsets`` maps train, val and test to rows. A label that fails in train cannot be learnt, one that fails in val
    has no threshold of its own, and one that fails in test has no metrics: it is left out of the mean.
    """
    failures = {name: _one_class(truth_NC[:, c], subsets) for c, name in enumerate(names)}
    notes = [f"label {name} has {failure}" for name, failure in failures.items() if failure]
    if len(notes) == len(names):
        suffix = f" (and {len(names) - 1} more labels)" if len(names) > 1 else ""
        raise UserError(
            f"{notes[0]}{suffix}; films with and without the finding are needed in train, val and test: "
            "choose other labels, a larger fraction or another split."
        )
    return notes


def _one_class(truth_N: Floats, subsets: Mapping[str, NDArray[np.int64]]) -> str:
    """Where a label has films of one class only; empty where every subset has both."""
    counts = {subset: [int((truth_N[rows] == value).sum()) for value in (1, 0)] for subset, rows in subsets.items()}
    return ", ".join(
        f"{positives:,} positive and {negatives:,} negative films in {subset}"
        for subset, (positives, negatives) in counts.items()
        if positives == 0 or negatives == 0
    )


def evaluate(
    manifest: Manifest,
    names: Sequence[str],
    truth: Floats,
    outcomes: Sequence[Scores],
    generator: np.random.Generator,
    draws: int = m.DRAWS,
) -> Evaluation:
    """Evaluate all runs. ``truth`` (films of the manifest, C) is NaN where unknown."""
    patients = manifest.table["patient"].to_numpy(dtype=object)
    tests = []
    for outcome in outcomes:
        thresholds = m.best_thresholds(outcome.val, truth[outcome.run.rows["val"]])
        rows = outcome.run.rows["test"]
        tests.append(TestScores(outcome.test, truth[rows], patients[rows], thresholds))
    values = [run_values(test) for test in tests]
    bootstraps = bootstrap_values(tests, generator, draws)
    macros = {name: estimate([float(v[name][-1]) for v in values], bootstraps[name][:, -1]) for name in m.METRICS}
    per_label = {
        label: {name: estimate([float(v[name][c]) for v in values], bootstraps[name][:, c]) for name in m.METRICS}
        for c, label in enumerate(names)
    }
    runs = [_run_result(*triple, names) for triple in zip(outcomes, tests, values, strict=True)]
    return Evaluation(runs, macros, per_label, _predictions(manifest, names, truth, outcomes))


def run_values(test: TestScores) -> dict[str, Floats]:
    """Each metric of one run, (C + 1,): the labels and, last, their mean."""
    return {name: values[0] for name, values in _with_macro(test, None).items()}


def bootstrap_values(
    tests: Sequence[TestScores], generator: np.random.Generator, draws: int = m.DRAWS
) -> dict[str, Floats]:
    """Each metric averaged over runs, in every draw of patients: (B, C + 1), the labels and, last, their mean.

    A draw weighs a patient's films alike in all runs, so that what the runs share does not average out.
    """
    everyone, of_run = _index_patients([test.patients for test in tests])

    def statistic(weights_BP: Floats) -> dict[str, Floats]:
        values = [_with_macro(test, weights_BP[:, rows]) for test, rows in zip(tests, of_run, strict=True)]
        return {name: _mean_over_runs(np.stack([run[name] for run in values])) for name in m.METRICS}

    return m.bootstrap(statistic, everyone, generator, draws, films=max(map(len, of_run)))


def bootstrap_means(
    values: Sequence[Mapping[str, Floats]],
    patients: Sequence[NDArray[np.object_]],
    generator: np.random.Generator,
    draws: int = m.DRAWS,
) -> dict[str, Floats]:
    """Means over films of named values, averaged over runs, in every draw of patients: (B,) each.

    ``values`` has for each run its named values (N,), NaN where a film has none; ``patients`` the films' patients.
    """
    everyone, of_run = _index_patients(patients)

    def statistic(weights_BP: Floats) -> dict[str, Floats]:
        means_of: dict[str, list[Floats]] = {name: [] for name in values[0]}
        for run, rows in zip(values, of_run, strict=True):
            for name, column in run.items():
                known = ~np.isnan(column)
                weights = weights_BP[:, rows[known]]
                total = weights.sum(axis=1)
                means = np.divide(weights @ column[known], total, out=np.full(len(total), np.nan), where=total > 0)
                means_of[name].append(means)
        return {name: _mean_over_runs(np.stack(means)) for name, means in means_of.items()}

    return m.bootstrap(statistic, everyone, generator, draws, films=max(map(len, of_run)))


def _index_patients(
    patients: Sequence[NDArray[np.object_]],
) -> tuple[NDArray[np.object_], list[NDArray[np.int64]]]:
    """All patients of all runs, sorted, and for each run the patient number of each film."""
    everyone, index = np.unique(np.concatenate(patients).astype(str), return_inverse=True)
    ends = np.cumsum([len(run) for run in patients])
    return everyone.astype(object), list(np.split(index, ends[:-1]))


def _mean_over_runs(values_RBC: Floats) -> Floats:
    counts = (~np.isnan(values_RBC)).sum(axis=0)
    sums = np.nansum(values_RBC, axis=0)
    means: Floats = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    return means


def _with_macro(test: TestScores, weights: Floats | None) -> dict[str, Floats]:
    values = m.metric_values(test.scores, test.truth, test.thresholds, weights)
    return {
        name: np.concatenate([values_BC, m.macro(values_BC)[:, None]], axis=1) for name, values_BC in values.items()
    }


def _run_result(outcome: Scores, test: TestScores, values: Mapping[str, Floats], names: Sequence[str]) -> RunResult:
    thresholds = {name: float(value) for name, value in zip(names, test.thresholds, strict=True)}
    metrics = {name: float(values[name][-1]) for name in m.METRICS}
    return outcome.run.result(outcome.weights_hash, {**outcome.chosen, "thresholds": thresholds}, metrics)


def _predictions(manifest: Manifest, names: Sequence[str], truth: Floats, outcomes: Sequence[Scores]) -> pd.DataFrame:
    frames = []
    for outcome in outcomes:
        for subset, scores in (("val", outcome.val), ("test", outcome.test)):
            rows = outcome.run.rows[subset]
            frame = manifest.table.iloc[rows][["image", "patient"]].reset_index(drop=True)
            frame.insert(0, "run", outcome.run.name)
            frame.insert(1, "part", subset)
            columns = {f"{TRUTH}{name}": truth[rows, c] for c, name in enumerate(names)}
            columns |= {f"{SCORE}{name}": scores[:, c] for c, name in enumerate(names)}
            frames.append(pd.concat([frame, pd.DataFrame(columns)], axis=1))
    return pd.concat(frames, ignore_index=True)


def classification_result(
    evaluation: Evaluation,
    *,
    task: str,
    method: str,
    name: str,
    data: Mapping[str, Any],
    manifest: Manifest,
    planned: Sequence[Run],
    weights_name: str,
    weights_report: str,
    labels: Sequence[str],
    fraction: float,
    config: Mapping[str, Any],
    notes: Sequence[str] = (),
    seen: Mapping[str, Seen] | None = None,
) -> Result:
    """A :class:`~afire.tasks.results.Result` with its hashes, environment and command filled in."""
    state = environment()
    weights_hash = joint_hash([run.weights_hash for run in evaluation.runs])
    tested = np.unique(np.concatenate([run.rows["test"] for run in planned]))
    return Result(
        task=task,
        method=method,
        name=name,
        data={**data, "test_patients": test_patients(manifest, tested)},
        split_hash=split_hash(planned),
        test_hash=test_hash(manifest, planned),
        weights={"name": weights_name, "hash": weights_hash, "report": weights_report},
        labels=list(labels),
        fraction=fraction,
        config=dict(config),
        runs=evaluation.runs,
        metrics=evaluation.metrics,
        per_label=evaluation.per_label,
        command=state.pop("command"),
        environment=state,
        notes=list(notes),
        seen={name: answer.as_dict() for name, answer in (seen or {}).items()},
    )

"""Evaluation: thresholds from validation only, intervals over patients, one draw for all runs."""

from __future__ import annotations

import numpy as np
import pytest

from afire.data.manifest import task_labels
from afire.data.pack import PackedFilms
from afire.tasks import metrics as m
from afire.tasks.evaluate import Scores, bootstrap_means, evaluate
from afire.tasks.results import plan_runs


@pytest.fixture(scope="module")
def evaluated(films: PackedFilms):  # type: ignore[no-untyped-def]
    names, truth = task_labels(films.manifest)
    runs = plan_runs(films.manifest, None, [0, 1, 2])
    rng = np.random.default_rng(0)
    noisy = np.nan_to_num(truth, nan=0.5) + rng.normal(0, 0.6, (3, *truth.shape))
    outcomes = [
        Scores(run, noisy[i][run.rows["val"]], noisy[i][run.rows["test"]], f"w{i}") for i, run in enumerate(runs)
    ]
    return names, truth, outcomes, evaluate(films.manifest, names, truth, outcomes, np.random.default_rng(1), 300)


def test_values_equal_the_metrics_of_each_run(evaluated) -> None:  # type: ignore[no-untyped-def]
    names, truth, outcomes, evaluation = evaluated
    for c, label in enumerate(names):
        expected = [m.auc(outcome.test[:, c], truth[outcome.run.rows["test"], c]) for outcome in outcomes]
        assert evaluation.per_label[label]["auc"].values == pytest.approx(expected)
        assert evaluation.per_label[label]["auc"].mean == pytest.approx(np.mean(expected))
        assert evaluation.per_label[label]["auc"].sd == pytest.approx(np.std(expected, ddof=1))
    both = [evaluation.per_label[label]["auc"].mean for label in names]
    assert evaluation.metrics["auc"].mean == pytest.approx(np.mean(both))
    assert evaluation.metrics["auc"].low < evaluation.metrics["auc"].mean < evaluation.metrics["auc"].high


def test_thresholds_come_from_validation(evaluated) -> None:  # type: ignore[no-untyped-def]
    names, truth, outcomes, evaluation = evaluated
    for outcome, result in zip(outcomes, evaluation.runs, strict=True):
        rows = outcome.run.rows["test"]
        threshold = m.best_threshold(outcome.val[:, 0], truth[outcome.run.rows["val"], 0])
        assert result.chosen["thresholds"][names[0]] == pytest.approx(threshold)
        value = evaluation.per_label[names[0]]["f1"].values[outcomes.index(outcome)]
        assert value == pytest.approx(m.f1(outcome.test[:, 0], truth[rows, 0], threshold))


def test_predictions_hold_every_val_and_test_film_of_every_run(evaluated, films: PackedFilms) -> None:  # type: ignore[no-untyped-def]
    _, truth, outcomes, evaluation = evaluated
    frame = evaluation.predictions
    assert len(frame) == sum(len(outcome.run.rows[subset]) for outcome in outcomes for subset in ("val", "test"))
    chosen = frame[(frame["run"] == "seed-1") & (frame["part"] == "test")]
    rows = outcomes[1].run.rows["test"]
    assert chosen["image"].tolist() == films.manifest.table["image"].iloc[rows].tolist()
    np.testing.assert_array_equal(chosen["truth:Rare"], truth[rows, 1])
    np.testing.assert_array_equal(chosen["score:Blob"], outcomes[1].test[:, 0])


def test_runs_that_agree_do_not_narrow_the_interval(films: PackedFilms) -> None:
    """Three copies of one run are one run: what they share must not average out."""
    names, truth = task_labels(films.manifest, ["Blob"])
    (run,) = plan_runs(films.manifest, None, [0])
    noisy = truth + np.random.default_rng(0).normal(0, 0.7, truth.shape)
    outcome = Scores(run, noisy[run.rows["val"]], noisy[run.rows["test"]], "w")
    widths = []
    for count in (1, 3):
        evaluation = evaluate(films.manifest, names, truth, [outcome] * count, np.random.default_rng(0), 400).metrics[
            "auc"
        ]
        widths.append(evaluation.high - evaluation.low)
    assert widths[0] == pytest.approx(widths[1])


def test_means_over_films_leave_out_films_without_a_value() -> None:
    values = [{"dice": np.array([0.5, 1.0, np.nan, 0.9])}, {"dice": np.array([0.7, np.nan, 0.9, 0.8])}]
    patients = [np.array(list("abcd"), dtype=object)] * 2
    drawn = bootstrap_means(values, patients, np.random.default_rng(0), 500)["dice"]
    assert np.nanmean(drawn) == pytest.approx(np.mean([0.8, 0.8]), abs=0.03)
    assert np.nanmin(drawn) >= 0.5 and np.nanmax(drawn) <= 1.0

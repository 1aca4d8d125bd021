"""Comparisons: refused on other films, certain about a clear difference, silent about none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from afire.data.manifest import task_labels
from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.tasks.compare import compare
from afire.tasks.evaluate import Scores, classification_result, evaluate
from afire.tasks.results import Estimate, Result, plan_runs, read_result, write_result


def write_scored(
    out: Path,
    films: PackedFilms,
    noise: float,
    seeds: list[int],
    fraction: float = 1.0,
    stream: int = 0,
    folds: int = 0,
) -> Result:
    """A result whose scores are the truth with noise."""
    names, truth = task_labels(films.manifest, ["Blob"])
    runs = plan_runs(films.manifest, None, seeds, fraction, folds)
    rng = np.random.default_rng(stream)
    outcomes = []
    for run in runs:
        scores = truth + rng.normal(0, noise, truth.shape)
        outcomes.append(Scores(run, scores[run.rows["val"]], scores[run.rows["test"]], "w"))
    evaluation = evaluate(films.manifest, names, truth, outcomes, np.random.default_rng(0), 50)
    result = classification_result(
        evaluation,
        task="probe",
        method="linear",
        name=f"noise {noise:g}",
        data={"name": "drawn", "hash": "d"},
        manifest=films.manifest,
        planned=runs,
        weights_name="none",
        weights_report="none",
        labels=names,
        fraction=fraction,
        config={},
    )
    write_result(out, result, evaluation.predictions)
    return result


def test_folds_are_said_not_to_be_independent(films: PackedFilms, tmp_path: Path) -> None:
    from rich.console import Console

    from afire.report.task_tables import comparison_latex, comparison_markdown, result_page, show_comparison

    for number, name in enumerate(("a", "b", "c", "d")):
        write_scored(tmp_path / name, films, 1.0, [0], stream=number, folds=0 if number < 2 else 3)
    (alone,) = compare([tmp_path / "a", tmp_path / "b"])
    (folded,) = compare([tmp_path / "c", tmp_path / "d"])
    note_on_folds = "folds of one split are not independent"
    for comparison in (alone, folded):
        screen = Console(width=300, record=True)
        show_comparison(screen, comparison, ["auc"])
        outputs = [screen.export_text(), comparison_markdown([comparison])]
        assert [note_on_folds in text for text in outputs] == [comparison is folded] * 2
        assert ("Folds are not independent" in comparison_latex([comparison])) is (comparison is folded)
        page = result_page(comparison.entries[0].result)
        assert ("3 folds, which share training films" in page) is (comparison is folded)


def test_a_clear_difference_is_found_and_none_is_not(films: PackedFilms, tmp_path: Path) -> None:
    good = write_scored(tmp_path / "good", films, 0.4, [0, 1, 2])
    bad = write_scored(tmp_path / "bad", films, 3.0, [0, 1, 2], stream=1)
    write_scored(tmp_path / "same", films, 0.4, [0, 1, 2], stream=2)
    (comparison,) = compare([tmp_path / "bad", tmp_path / "good", tmp_path / "same"])
    assert [entry.name for entry in comparison.entries] == ["noise 3", "noise 0.4 (good)", "noise 0.4 (same)"]
    pair = next(pair for pair in comparison.pairs if pair.metric == "auc")
    assert pair.difference == pytest.approx(good.metrics["auc"].mean - bad.metrics["auc"].mean)
    assert pair.paired is not None and pair.paired.low > 0 and pair.paired.p < 0.05 and pair.t.p < 0.05
    (among,) = compare([tmp_path / "good", tmp_path / "same"], metrics=["auc"])
    (pair,) = among.pairs
    assert pair.paired is not None and pair.paired.low < 0 < pair.paired.high and pair.paired.p > 0.05
    assert any("2 comparisons" in note for note in comparison.notes) and among.notes == []


def test_a_result_is_equal_to_itself(films: PackedFilms, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_scored(tmp_path / name, films, 1.0, [0, 1])
    (comparison,) = compare([tmp_path / "a", tmp_path / "b"])
    for pair in comparison.pairs:
        assert pair.paired is not None and (pair.paired.low, pair.paired.high, pair.paired.p) == (0, 0, 1)


def test_pairing_is_tighter_than_two_single_intervals(films: PackedFilms, tmp_path: Path) -> None:
    """Two results that err on the same films differ by little, and the paired interval says so."""
    result = write_scored(tmp_path / "a", films, 1.0, [0])
    frame = pd.read_parquet(tmp_path / "a" / "predictions.parquet")
    jitter = np.random.default_rng(5).normal(0, 0.05, len(frame))
    write_result(tmp_path / "b", result, frame.assign(**{"score:Blob": frame["score:Blob"] + jitter}))
    (comparison,) = compare([tmp_path / "a", tmp_path / "b"], metrics=["auc"])
    paired = comparison.pairs[0].paired
    assert paired is not None
    single = result.metrics["auc"].high - result.metrics["auc"].low
    assert paired.high - paired.low < 0.6 * single


def test_other_splits_are_refused_unless_told_to(films: PackedFilms, tmp_path: Path) -> None:
    write_scored(tmp_path / "a", films, 1.0, [0, 1])
    write_scored(tmp_path / "b", films, 1.0, [0, 2])
    with pytest.raises(UserError, match=r"a and b train or validate on other films.*--allow-different-splits"):
        compare([tmp_path / "a", tmp_path / "b"])
    (comparison,) = compare([tmp_path / "a", tmp_path / "b"], allow_different_splits=True)
    assert comparison.pairs[0].paired is not None  # the test films are the same
    assert any("same split" in note for note in comparison.notes)
    other = dataclasses.replace(read_result(tmp_path / "b"), test_hash="other")
    write_result(tmp_path / "b", other, pd.read_parquet(tmp_path / "b" / "predictions.parquet"))
    with pytest.raises(UserError, match="are tested on other films"):
        compare([tmp_path / "a", tmp_path / "b"])
    (comparison,) = compare([tmp_path / "a", tmp_path / "b"], allow_different_splits=True)
    assert all(pair.paired is None for pair in comparison.pairs)


def test_fractions_are_compared_with_their_own_kind(films: PackedFilms, tmp_path: Path) -> None:
    for name, noise in (("a", 1.0), ("b", 2.0)):
        for fraction in (0.3, 1.0):
            write_scored(tmp_path / name / f"{100 * fraction:g}pct", films, noise, [0, 1], fraction)
    comparisons = compare([tmp_path / "a", tmp_path / "b"])
    assert [comparison.fraction for comparison in comparisons] == [0.3, 1.0]
    assert [entry.name for entry in comparisons[0].entries] == ["noise 1", "noise 2"]
    with pytest.raises(UserError, match="30 % of the labels, which no other result was"):
        compare([tmp_path / "a", tmp_path / "b" / "100pct"])


def test_results_that_have_nothing_in_common_are_refused(films: PackedFilms, tmp_path: Path) -> None:
    first = write_scored(tmp_path / "a", films, 1.0, [0, 1])
    frame = pd.read_parquet(tmp_path / "a" / "predictions.parquet")
    write_result(tmp_path / "b", dataclasses.replace(first, labels=["Mass"], split_hash="other"), frame)
    with pytest.raises(UserError, match="a is about Blob, b about Mass"):
        compare([tmp_path / "a", tmp_path / "b"])
    write_result(tmp_path / "b", dataclasses.replace(first, metrics={"dice": Estimate(1, 1, 1, 1, [1])}), frame)
    with pytest.raises(UserError, match="no metric in common"):
        compare([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UserError, match="only one result"):
        compare([tmp_path / "a", tmp_path / "a"])
    write_scored(tmp_path / "c", films, 1.0, [0, 1])
    with pytest.raises(UserError, match="not all of these results have the metric 'dice'"):
        compare([tmp_path / "a", tmp_path / "c"], metrics=["dice"])
    write_result(tmp_path / "c", first, frame[frame["run"] != "seed-1"])
    with pytest.raises(UserError, match="lack the run seed-1"):
        compare([tmp_path / "a", tmp_path / "c"])


def test_values_of_films_are_compared_by_their_mean(films: PackedFilms, tmp_path: Path) -> None:
    """Segmentation results bring a value for each film instead of scores."""
    base = write_scored(tmp_path / "scores", films, 1.0, [0])
    rows = pd.read_parquet(tmp_path / "scores" / "predictions.parquet")[["run", "part", "image", "patient"]]
    rng = np.random.default_rng(0)
    for name, lift in (("a", 0.0), ("b", 0.1)):
        frame = rows.assign(**{"value:dice": np.clip(0.7 + lift + rng.normal(0, 0.05, len(rows)), 0, 1)})
        mean = float(frame[frame["part"] == "test"]["value:dice"].mean())
        metrics = {"dice": Estimate(mean, float("nan"), mean, mean, [mean])}
        write_result(tmp_path / name, dataclasses.replace(base, metrics=metrics, per_label={}, name=name), frame)
    (comparison,) = compare([tmp_path / "a", tmp_path / "b"])
    (pair,) = comparison.pairs
    assert pair.paired is not None and 0.05 < pair.paired.low < pair.difference < pair.paired.high < 0.2
    assert any("one run only" in note for note in comparison.notes)

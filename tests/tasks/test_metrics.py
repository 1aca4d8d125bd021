"""Metrics against slow, obvious references; a weighted film is the same as a repeated one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from afire.tasks import metrics as m

Floats = NDArray[np.float64]


@st.composite
def scored_films(draw: st.DrawFn) -> tuple[Floats, Floats]:
    """Few distinct scores, so that ties are common, and both classes."""
    count = draw(st.integers(2, 25))
    scores = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    truth = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    truth[0], truth[1] = 0, 1
    return np.array(scores, float) / 6, np.array(truth, float)


def slow_auc(scores: Floats, truth: Floats) -> float:
    wins = [1.0 if p > n else 0.5 if p == n else 0.0 for p in scores[truth == 1] for n in scores[truth == 0]]
    return float(np.mean(wins))


def slow_average_precision(scores: Floats, truth: Floats) -> float:
    total, before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        called = scores >= threshold
        recall = truth[called].sum() / truth.sum()
        total += (recall - before) * truth[called].mean()
        before = recall
    return float(total)


def slow_f1(scores: Floats, truth: Floats, threshold: float) -> float:
    called = scores >= threshold
    hits = float(((truth == 1) & called).sum())
    if hits == 0:
        return 0.0
    precision, recall = hits / called.sum(), hits / truth.sum()
    return float(2 * precision * recall / (precision + recall))


@given(scored_films())
def test_auc_and_average_precision_equal_their_definitions(films: tuple[Floats, Floats]) -> None:
    scores, truth = films
    assert m.auc(scores, truth) == pytest.approx(slow_auc(scores, truth))
    assert m.average_precision(scores, truth) == pytest.approx(slow_average_precision(scores, truth))


@given(scored_films(), st.floats(0, 1))
def test_f1_and_accuracy_equal_their_definitions(films: tuple[Floats, Floats], threshold: float) -> None:
    scores, truth = films
    assert m.f1(scores, truth, threshold) == pytest.approx(slow_f1(scores, truth, threshold))
    right = sum((score >= threshold) == (label == 1) for score, label in zip(scores, truth, strict=True))
    assert m.accuracy(scores, truth, threshold) == pytest.approx(right / len(scores))


@given(scored_films())
def test_best_threshold_has_the_highest_f1_of_all(films: tuple[Floats, Floats]) -> None:
    scores, truth = films
    best = slow_f1(scores, truth, m.best_threshold(scores, truth))
    assert best == pytest.approx(max(slow_f1(scores, truth, threshold) for threshold in scores))


def test_best_threshold_lies_between_scores_and_needs_both_classes() -> None:
    assert m.best_threshold(np.array([0.1, 0.4, 0.8]), np.array([0.0, 0.0, 1.0])) == pytest.approx(0.6)
    assert m.best_threshold(np.array([0.1, 0.4]), np.array([1.0, 1.0])) == 0.5
    assert m.best_threshold(np.array([0.1, 0.4, 0.9]), np.array([np.nan, np.nan, 1.0])) == 0.5


@settings(max_examples=40)
@given(scored_films(), st.integers(0, 2**32 - 1))
def test_weights_equal_repeated_films(films: tuple[Floats, Floats], seed: int) -> None:
    scores, truth = films
    counts = np.random.default_rng(seed).integers(0, 4, len(scores))
    counts[:2] = np.maximum(counts[:2], 1)  # both classes stay
    weighted = m.metric_values(scores[:, None], truth[:, None], np.array([0.5]), counts[None].astype(float))
    repeated = m.metric_values(np.repeat(scores, counts)[:, None], np.repeat(truth, counts)[:, None], np.array([0.5]))
    for name in m.METRICS:
        assert weighted[name] == pytest.approx(repeated[name]), name


def test_one_class_gives_no_value_and_is_left_out_of_the_mean() -> None:
    scores = np.array([[0.1, 0.2, 0.3], [0.9, 0.4, 0.1], [0.8, 0.1, 0.9]])
    truth = np.array([[0.0, 1.0, np.nan], [1.0, 1.0, np.nan], [0.0, 1.0, np.nan]])
    values = m.metric_values(scores, truth, np.full(3, 0.5))
    for name in m.METRICS:
        assert not np.isnan(values[name][0, 0]) and np.isnan(values[name][0, 1:]).all(), name
        assert m.macro(values[name])[0] == values[name][0, 0]
    assert np.isnan(m.macro(np.full((2, 3), np.nan))).all()
    assert math.isnan(m.auc(np.array([0.1, 0.2]), np.array([1.0, 1.0])))
    assert math.isnan(m.average_precision(np.array([0.1, 0.2]), np.array([np.nan, np.nan])))


def test_unknown_films_do_not_count() -> None:
    rng = np.random.default_rng(0)
    scores, truth = rng.random((50, 1)), rng.integers(0, 2, (50, 1)).astype(float)
    hidden = truth.copy()
    hidden[::3] = np.nan
    kept = ~np.isnan(hidden[:, 0])
    with_unknown = m.metric_values(scores, hidden, np.array([0.5]))
    without = m.metric_values(scores[kept], truth[kept], np.array([0.5]))
    assert all(with_unknown[name] == pytest.approx(without[name]) for name in m.METRICS)


def test_draws_keep_a_patients_films_together_and_their_number() -> None:
    patients = np.array(["a", "a", "b", "c", "c", "c"], dtype=object)
    weights = np.concatenate(list(m.patient_draws(patients, np.random.default_rng(0), 200)))
    assert weights.shape == (200, 6)
    assert (weights[:, 0] == weights[:, 1]).all() and (weights[:, 3] == weights[:, 5]).all()
    assert (weights[:, [0, 2, 3]].sum(axis=1) == 3).all()  # three patients drawn each time
    assert weights.mean() == pytest.approx(1.0, abs=0.1)


def test_draws_in_blocks_are_as_many_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "_ENTRIES_AT_ONCE", 20)
    blocks = list(m.patient_draws(np.array(list("abcdef"), dtype=object), np.random.default_rng(0), 10))
    assert [len(block) for block in blocks] == [3, 3, 3, 1]


def test_interval_widens_when_films_come_in_patients() -> None:
    """Eight copies of each film under one patient are not eight times the evidence."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=60)

    def spread(patients: NDArray[np.object_], repeated: Floats) -> float:
        drawn = m.bootstrap(
            lambda w: {"mean": (w @ repeated) / w.sum(axis=1)}, patients, np.random.default_rng(0), 500
        )["mean"]
        low, high = m.interval(drawn)
        return high - low

    names = np.repeat(np.arange(60), 8).astype(str).astype(object)
    single = np.arange(480).astype(str).astype(object)
    repeated = np.repeat(values, 8)
    assert spread(names, repeated) > 2 * spread(single, repeated)
    assert spread(names, repeated) == pytest.approx(2 * 1.96 * values.std() / math.sqrt(60), rel=0.15)


def test_paired_difference_reads_the_draws() -> None:
    draws = np.random.default_rng(0).normal(0.1, 0.02, 999)
    clear = m.paired_difference(0.1, draws)
    assert clear.low < 0.1 < clear.high and clear.p == pytest.approx(2 / 1000)
    none = m.paired_difference(0.0, draws - 0.1)
    assert none.p > 0.5
    same = m.paired_difference(0.0, np.zeros(999))
    assert same.p == 1.0 and (same.low, same.high) == (0.0, 0.0)
    assert math.isnan(m.paired_difference(0.0, np.full(5, np.nan)).p)


@pytest.mark.parametrize("equal_variance", [False, True])
def test_t_test_equals_scipys(equal_variance: bool) -> None:
    first, second = [0.81, 0.84, 0.79, 0.86], [0.75, 0.80, 0.76]
    ours = m.t_test(first, second, equal_variance)
    theirs = stats.ttest_ind(first, second, equal_var=equal_variance)
    assert (ours.t, ours.p) == (pytest.approx(theirs.statistic), pytest.approx(theirs.pvalue))
    assert ours.degrees == pytest.approx(theirs.df)


def test_t_test_says_nothing_without_spread_or_runs() -> None:
    assert math.isnan(m.t_test([0.8], [0.7, 0.9]).p)
    assert math.isnan(m.t_test([0.8, 0.8, 0.8], [0.7, 0.7, 0.7]).p)


def test_dice_and_iou_equal_counting() -> None:
    rng = np.random.default_rng(0)
    predicted, truth = rng.random((6, 5, 4)) > 0.5, rng.random((6, 5, 4)) > 0.4
    predicted[0] = truth[0] = False
    predicted[1] = False
    for film in range(6):
        a = {tuple(i) for i in np.argwhere(predicted[film])}
        b = {tuple(i) for i in np.argwhere(truth[film])}
        assert m.dice(predicted, truth)[film] == pytest.approx(2 * len(a & b) / (len(a) + len(b)) if a or b else 1)
        assert m.iou(predicted, truth)[film] == pytest.approx(len(a & b) / len(a | b) if a or b else 1)
    with pytest.raises(ValueError, match="do not belong together"):
        m.dice(predicted, truth[:, :4])

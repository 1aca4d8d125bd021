"""AUC against scikit-learn's, and the interval over patients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from afire.data.audit import measure as roc
from afire.data.audit.measure import auc, auc_interval, weighted_auc


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 3)), min_size=2, max_size=40
    )  # few distinct scores: ties
)
def test_auc_is_scikit_learns(films: list[tuple[int, bool, int]]) -> None:
    scores = np.array([film[0] for film in films], float)
    positive = np.array([film[1] for film in films])
    weights = np.array([[film[2] for film in films], [1] * len(films)], float)
    found = weighted_auc(scores, positive, weights)
    for value, weight in zip(found, weights, strict=True):
        if weight[positive].sum() > 0 and weight[~positive].sum() > 0:
            assert value == pytest.approx(roc_auc_score(positive, scores, sample_weight=weight))
        else:
            assert np.isnan(value)


def test_auc_without_both_classes_is_nan() -> None:
    assert np.isnan(auc(np.array([1.0, 2.0]), np.array([True, True])))


def test_interval_holds_the_auc_and_widens_when_films_come_from_few_patients() -> None:
    rng = np.random.default_rng(0)
    positive = np.repeat(rng.random(40) < 0.5, 10)
    of_patient = np.repeat(rng.normal(0, 1, 40), 10)  # all films of a patient score alike
    scores = positive + of_patient + rng.normal(0, 0.1, 400)
    people, films = np.repeat(np.arange(40), 10).astype(object), np.arange(400).astype(object)
    by_patient = auc_interval(scores, positive, people, np.random.default_rng(1))
    by_film = auc_interval(scores, positive, films, np.random.default_rng(1))
    assert by_patient[0] < auc(scores, positive) < by_patient[1]
    assert by_patient[1] - by_patient[0] > 2 * (by_film[1] - by_film[0])


def test_interval_does_not_depend_on_how_much_fits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    scores, positive = rng.normal(size=50), rng.random(50) < 0.5
    people = np.arange(50).astype(object)
    whole = auc_interval(scores, positive, people, np.random.default_rng(3))
    monkeypatch.setattr(roc, "_ROWS_AT_ONCE", 50 * 7)
    assert auc_interval(scores, positive, people, np.random.default_rng(3)) == whole

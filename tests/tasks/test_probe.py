"""Probes against scikit-learn and slow references, and that the test films decide nothing."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from afire.tasks import metrics as m
from afire.tasks.probe import GRID_C, knn_probe, knn_scores, linear_probe

Floats = NDArray[np.float64]


def synthetic(count: int = 300, width: int = 6, seed: int = 0) -> tuple[NDArray[np.float32], Floats]:
    """Features whose first two carry two labels; the second label is unknown for some films."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, width)).astype(np.float32)
    truth = (features[:, :2] + rng.normal(0, 0.7, (count, 2)) > 0).astype(float)
    truth[::5, 1] = np.nan
    return features * np.float32(3) + np.float32(10), truth


def subsets(features: NDArray[np.float32], truth: Floats):  # type: ignore[no-untyped-def]
    bounds = {"train": slice(0, 180), "val": slice(180, 240), "test": slice(240, 300)}
    return {subset: (features[rows], truth[rows]) for subset, rows in bounds.items()}


def test_linear_probe_is_standardised_logistic_regression_with_c_from_validation() -> None:
    features, truth = synthetic()
    given = subsets(features, truth)
    best: list[tuple[float, float, Floats]] = []
    for c in GRID_C:
        val, test = [], []
        for label in range(2):
            known = ~np.isnan(given["train"][1][:, label])
            model = make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=2000, tol=1e-8))
            # The scale is that of all training films, also those whose label is unknown.
            model[0].fit(given["train"][0])
            scaled = model[0].transform(given["train"][0][known])
            model[1].fit(scaled, given["train"][1][known, label])
            val.append(model.predict_proba(given["val"][0])[:, 1])
            test.append(model.predict_proba(given["test"][0])[:, 1])
        value = np.mean([m.auc(val[label], given["val"][1][:, label]) for label in range(2)])
        best.append((float(value), -c, np.stack(test, axis=1)))
    value, negative_c, expected = max(best, key=lambda one: one[:2])
    probed = linear_probe(given)
    assert probed.chosen == {"C": -negative_c, "val_auc": pytest.approx(value)}
    np.testing.assert_allclose(probed.test, expected, atol=2e-3)


def test_unknown_labels_are_masked_label_by_label() -> None:
    features, truth = synthetic()
    one = linear_probe(subsets(features, truth[:, :1]))
    both = linear_probe(subsets(features, np.c_[truth[:, 0], np.where(truth[:, 1] == 1, 1.0, truth[:, 1])]))
    if one.chosen["C"] == both.chosen["C"]:
        np.testing.assert_allclose(one.test[:, 0], both.test[:, 0], atol=1e-3)
    assert not np.isnan(both.test).any()


def test_a_label_with_one_class_answers_its_share_and_costs_nothing() -> None:
    features, truth = synthetic()
    truth[:180, 1] = 0.0
    for probe in (linear_probe, knn_probe):
        probed = probe(subsets(features, truth))
        np.testing.assert_array_equal(probed.test[:, 1], 0.0)
        assert m.auc(probed.test[:, 0], truth[240:, 0]) > 0.75


@pytest.mark.parametrize("probe", [linear_probe, knn_probe])
def test_the_test_films_decide_nothing(probe) -> None:  # type: ignore[no-untyped-def]
    features, truth = synthetic()
    given = subsets(features, truth)
    other = {**given, "test": (given["test"][0][::-1].copy(), 1 - given["test"][1])}
    first, second = probe(given), probe(other)
    assert first.chosen == second.chosen
    np.testing.assert_array_equal(first.val, second.val)
    np.testing.assert_allclose(first.test, second.test[::-1], atol=1e-12)


def test_features_that_never_vary_are_harmless() -> None:
    features, truth = synthetic()
    constant = np.c_[features, np.full(len(features), 7.7, np.float32)]
    for probe in (linear_probe, knn_probe):
        probed = probe(subsets(constant, truth))
        assert np.isfinite(probed.test).all()
        np.testing.assert_allclose(probed.test, probe(subsets(features, truth)).test, atol=1e-6)


def slow_knn(train: Floats, truth: Floats, query: Floats, k: int) -> Floats:
    cosine = train @ query
    nearest = sorted(range(len(train)), key=lambda i: -cosine[i])[:k]
    scores = []
    for label in range(truth.shape[1]):
        voters = [i for i in nearest if not np.isnan(truth[i, label])]
        if not voters:
            scores.append(np.nanmean(truth[:, label]))
            continue
        weights = np.exp(cosine[voters] / 0.07)
        scores.append((weights * truth[voters, label]).sum() / weights.sum())
    return np.array(scores)


@pytest.mark.parametrize("k", [1, 5, 40])
def test_knn_equals_the_slow_vote(k: int) -> None:
    rng = np.random.default_rng(0)
    train, queries = rng.normal(size=(40, 5)), rng.normal(size=(7, 5))
    train /= np.linalg.norm(train, axis=1, keepdims=True)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    truth = rng.integers(0, 2, (40, 3)).astype(float)
    truth[rng.random((40, 3)) < 0.4] = np.nan
    probed = knn_scores(train, truth, queries, [k])[k]
    np.testing.assert_allclose(probed, [slow_knn(train, truth, query, k) for query in queries])


def test_knn_takes_k_from_validation_and_fewer_films_than_k() -> None:
    features, truth = synthetic()
    probed = knn_probe(subsets(features, truth))
    assert probed.chosen["k"] in (5, 10, 20, 50)
    few = {**subsets(features, truth), "train": (features[:3], truth[:3])}
    assert knn_probe(few).chosen["k"] == 3

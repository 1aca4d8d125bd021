"""Guesses of a label: a :data:`Guess` learns on some films and scores others, larger meaning more likely positive.

Rows are positions in the manifest; ``positive`` has one entry for each film of the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.data.audit.features import Feature
from afire.data.audit.roc import auc

Rows = NDArray[np.int64]
Scores = NDArray[np.float64]
Guess = Callable[[Rows, Rows], Scores]
"""(rows to learn on, rows to score) -> scores of the latter."""

_MOST_FILMS = 20_000  # to learn on: more does not sharpen an AUC that is read to two digits


def guess_from_one(feature: Feature, positive: NDArray[np.bool_]) -> Guess:
    """The fact itself, with the direction learned; of a category, how often each of its values is positive."""
    return _from_category(feature, positive) if feature.is_category else _from_number(feature, positive)


def larger_is_positive(feature: Feature, positive: NDArray[np.bool_], rows: Rows) -> bool:
    """Direction of a number on the films in ``rows``."""
    return auc(feature.values.to_numpy(dtype=np.float64)[rows], positive[rows]) >= 0.5


def _from_number(feature: Feature, positive: NDArray[np.bool_]) -> Guess:
    numbers = feature.values.to_numpy(dtype=np.float64)

    def guess(learn: Rows, score: Rows) -> Scores:
        return numbers[score] if larger_is_positive(feature, positive, learn) else -numbers[score]

    return guess


def _from_category(feature: Feature, positive: NDArray[np.bool_]) -> Guess:
    values = feature.values.to_numpy(dtype=object)

    def guess(learn: Rows, score: Rows) -> Scores:
        rates = pd.Series(positive[learn].astype(float)).groupby(values[learn]).mean()
        known = pd.Series(values[score]).map(rates).fillna(float(positive[learn].mean()))
        return np.asarray(known, dtype=np.float64)

    return guess


def guess_from_many(features: Sequence[Feature], positive: NDArray[np.bool_]) -> Guess:
    """A small gradient boosting on all of them: trees see thresholds and combinations, and do not mind gaps."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    columns = [
        pd.get_dummies(feature.values, dtype=float) if feature.is_category else feature.values.to_frame()
        for feature in features
    ]
    matrix = np.hstack([column.to_numpy(dtype=np.float64) for column in columns])

    def guess(learn: Rows, score: Rows) -> Scores:
        if positive[learn].all() or not positive[learn].any():
            return np.zeros(len(score))
        learn = learn[:: -(-len(learn) // _MOST_FILMS)]
        model = HistGradientBoostingClassifier(
            max_iter=60, max_leaf_nodes=8, min_samples_leaf=20, early_stopping=False, random_state=0
        )
        with threadpool_limits(limits=1):  # on a busy machine OpenMP threads wait for each other ten times longer
            model.fit(matrix[learn], positive[learn])
            return np.asarray(model.decision_function(matrix[score]), dtype=np.float64)

    return guess


def out_of_fold(guess: Guess, rows: Rows, folds: NDArray[np.int64]) -> Scores:
    """Scores of ``rows``, each learned on the films of the other folds."""
    scores = np.zeros(len(rows))
    for fold in np.unique(folds):
        held_out = folds == fold
        scores[held_out] = guess(rows[~held_out], rows[held_out]) if (~held_out).any() else 0.0
    return scores

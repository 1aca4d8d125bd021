"""Area under the ROC curve, and its interval when the films of one patient are drawn together.

N films, B bootstrap draws.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_DRAWS = 500
_ROWS_AT_ONCE = 4_000_000  # entries of a draws x films matrix, to bound memory on large sets


def auc(scores_N: NDArray[np.float64], positive_N: NDArray[np.bool_]) -> float:
    """Chance that a positive film scores higher than a negative one, ties counting half. NaN without both classes."""
    return float(weighted_auc(scores_N, positive_N, np.ones((1, len(scores_N))))[0])


def weighted_auc(
    scores_N: NDArray[np.float64], positive_N: NDArray[np.bool_], weights_BN: NDArray[np.float64]
) -> NDArray[np.float64]:
    """AUC (B,) for each row of film weights; NaN where a class has no weight."""
    order = np.argsort(scores_N, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(scores_N[order]) != 0])
    positive = positive_N[order]
    weights = weights_BN[:, order]
    positives = np.add.reduceat(weights * positive, starts, axis=1)  # weight at each distinct score
    negatives = np.add.reduceat(weights * ~positive, starts, axis=1)
    below = np.cumsum(negatives, axis=1) - negatives / 2
    total = positives.sum(axis=1) * negatives.sum(axis=1)
    wins = (positives * below).sum(axis=1)
    areas: NDArray[np.float64] = np.divide(wins, total, out=np.full(len(weights), np.nan), where=total > 0)
    return areas


def auc_interval(
    scores_N: NDArray[np.float64],
    positive_N: NDArray[np.bool_],
    patients_N: NDArray[np.object_],
    generator: np.random.Generator,
) -> tuple[float, float]:
    """95 % bootstrap interval: patients are drawn with replacement, each with all of their films."""
    names, patient = np.unique(patients_N.astype(str), return_inverse=True)
    at_once = max(1, _ROWS_AT_ONCE // max(len(scores_N), 1))
    values = []
    for start in range(0, _DRAWS, at_once):
        draws = min(at_once, _DRAWS - start)
        drawn = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
        values.append(weighted_auc(scores_N, positive_N, drawn[:, patient].astype(np.float64)))
    low, high = np.nanpercentile(np.concatenate(values), [2.5, 97.5])
    return float(low), float(high)

"""Metrics and their uncertainty, in plain numpy.

Shapes: N films, C labels, B bootstrap draws. A truth is 1, 0 or NaN (unknown: the film does not count for that label).
Every metric is written for weighted films, so that a bootstrap draw is a row of weights and not a copy of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
METRICS = ("auc", "average_precision", "accuracy", "f1")
DRAWS = 1000
_ENTRIES_AT_ONCE = 4_000_000  # of a draws x films matrix, to bound memory on large sets


def auc(scores_N: Floats, truth_N: Floats) -> float:
    """Chance that a positive film scores higher than a negative one, ties counting half; NaN without both classes."""
    return _ranking(scores_N, truth_N)[0]


def average_precision(scores_N: Floats, truth_N: Floats) -> float:
    """Precision averaged over the positives found, from the highest score down; NaN without both classes."""
    return _ranking(scores_N, truth_N)[1]


def accuracy(scores_N: Floats, truth_N: Floats, threshold: float) -> float:
    """Share of films on the right side of ``threshold`` (a score at the threshold is positive)."""
    return float(((scores_N >= threshold) == (truth_N == 1)).mean())


def f1(scores_N: Floats, truth_N: Floats, threshold: float) -> float:
    """Harmonic mean of precision and recall at ``threshold``; 0 when nothing is found and nothing is there."""
    predicted, positive = scores_N >= threshold, truth_N == 1
    total = predicted.sum() + positive.sum()
    return float(2 * (predicted & positive).sum() / total) if total else 0.0


def ranking_values(scores_N: Floats, positive_N: NDArray[np.bool_], weights_BN: Floats) -> tuple[Floats, Floats]:
    """AUC and average precision, (B,) each, for each row of film weights; NaN where a class has no weight.

    From the highest score down, films of one score together: a negative counts the positives above it and half of
    those beside it; a positive counts the precision down to its score.
    """
    order = np.argsort(-scores_N, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(scores_N[order]) != 0])
    called = weights_BN[:, order]
    hits = called * positive_N[order]
    if len(starts) < len(order):
        called, hits = (np.add.reduceat(values, starts, axis=1) for values in (called, hits))
    hits_so_far, called_so_far = np.cumsum(hits, axis=1), np.cumsum(called, axis=1)
    positives = hits_so_far[:, -1]
    negatives = called_so_far[:, -1] - positives
    defined = (positives > 0) & (negatives > 0)
    wins = np.einsum("bn,bn->b", called - hits, hits_so_far - hits / 2)
    area = np.divide(wins, positives * negatives, out=np.full(len(defined), np.nan), where=defined)
    precision = np.divide(hits_so_far, called_so_far, out=called, where=called_so_far > 0)
    gained = np.einsum("bn,bn->b", hits, precision)
    return area, np.divide(gained, positives, out=np.full(len(defined), np.nan), where=defined)


def best_threshold(scores_N: Floats, truth_N: Floats) -> float:
    """The threshold with the highest F1; half-way to the next lower score, 0.5 where a class is missing.

    F1 and not accuracy, because for a rare finding accuracy is highest when nothing is ever found.
    """
    known = ~np.isnan(truth_N)
    scores, positive = scores_N[known], truth_N[known] == 1
    if len(scores) == 0 or positive.all() or not positive.any():
        return 0.5
    order = np.argsort(-scores, kind="stable")
    ends = np.flatnonzero(np.r_[np.diff(scores[order]) != 0, True])  # the last film of each distinct score
    hits, called = np.cumsum(positive[order])[ends], ends + 1
    best = int(np.argmax(2 * hits / (called + positive.sum())))
    score = scores[order][ends[best]]
    return float((score + scores[order][ends[best + 1]]) / 2) if best + 1 < len(ends) else float(score)


def best_thresholds(scores_NC: Floats, truth_NC: Floats) -> Floats:
    """:func:`best_threshold` of each label, (C,)."""
    return np.array([best_threshold(scores_NC[:, c], truth_NC[:, c]) for c in range(scores_NC.shape[1])])


def metric_values(
    scores_NC: Floats, truth_NC: Floats, thresholds_C: Floats, weights_BN: Floats | None = None
) -> dict[str, Floats]:
    """Each of :data:`METRICS` as (B, C); NaN for a label with one class only. Without weights B is 1."""
    weights = np.ones((1, len(scores_NC))) if weights_BN is None else weights_BN
    columns: dict[str, list[Floats]] = {name: [] for name in METRICS}
    for label, threshold in enumerate(thresholds_C):
        known = ~np.isnan(truth_NC[:, label])
        of_known = weights if known.all() else weights[:, known]
        values = _label_values(scores_NC[known, label], truth_NC[known, label] == 1, float(threshold), of_known)
        for name in METRICS:
            columns[name].append(values[name])
    return {name: np.stack(column, axis=1) for name, column in columns.items()}


def _label_values(scores: Floats, positive: NDArray[np.bool_], threshold: float, weights: Floats) -> dict[str, Floats]:
    undefined = np.full(len(weights), np.nan)
    if len(scores) == 0:
        return dict.fromkeys(METRICS, undefined)
    predicted = scores >= threshold
    positives, negatives = weights @ positive, weights @ ~positive
    defined = (positives > 0) & (negatives > 0)
    correct, hits = weights @ (predicted == positive), weights @ (predicted & positive)
    called = weights @ predicted
    area, precision = ranking_values(scores, positive, weights)
    return {
        "auc": area,
        "average_precision": precision,
        "accuracy": np.divide(correct, positives + negatives, out=undefined.copy(), where=defined),
        "f1": np.divide(2 * hits, called + positives, out=undefined.copy(), where=defined),
    }


def macro(values_BC: Floats) -> Floats:
    """Mean over labels (B,), leaving out labels without a value; NaN where none has one."""
    counts = (~np.isnan(values_BC)).sum(axis=1)
    sums = np.nansum(values_BC, axis=1)
    means: Floats = np.divide(sums, counts, out=np.full(len(values_BC), np.nan), where=counts > 0)
    return means


def patient_draws(
    patients_N: NDArray[np.object_], generator: np.random.Generator, draws: int = DRAWS, films: int = 0
) -> Iterator[Floats]:
    """Blocks of weights (b, N): patients drawn with replacement, each with all of their films.

    ``films`` is how many films a caller will spread a row of weights over, where that is more than N.
    """
    names, patient = np.unique(np.asarray(patients_N).astype(str), return_inverse=True)
    at_once = max(1, _ENTRIES_AT_ONCE // max(len(patient), films, 1))
    for start in range(0, draws, at_once):
        block = min(at_once, draws - start)
        counts = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=block)
        yield counts[:, patient].astype(np.float64)


def bootstrap(
    statistic: Callable[[Floats], Mapping[str, Floats]],
    patients_N: NDArray[np.object_],
    generator: np.random.Generator,
    draws: int = DRAWS,
    films: int = 0,
) -> dict[str, Floats]:
    """Values of ``statistic`` in every draw. It maps weights (b, N) to named arrays whose first axis is b."""
    blocks = [statistic(weights) for weights in patient_draws(patients_N, generator, draws, films)]
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def interval(values_B: Floats) -> tuple[float, float]:
    """The middle 95 % of bootstrap values; NaN when no draw gave a value."""
    values = values_B[~np.isnan(values_B)]
    if len(values) == 0:
        return float("nan"), float("nan")
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """A minus B on the same films: its value, 95 % interval and two-sided p from the paired bootstrap."""

    value: float
    low: float
    high: float
    p: float


def paired_difference(value: float, differences_B: Floats) -> Difference:
    """Read a paired bootstrap: p is twice the smaller share of draws on the other side of zero, never below 2/(B+1)."""
    differences = differences_B[~np.isnan(differences_B)]
    if len(differences) == 0:
        return Difference(value, float("nan"), float("nan"), float("nan"))
    low, high = interval(differences)
    below, above = (differences <= 0).sum(), (differences >= 0).sum()
    p = min(1.0, 2 * (1 + min(below, above)) / (1 + len(differences)))
    return Difference(value, low, high, float(p))


@dataclass(frozen=True)
class TTest:
    """Independent two-sample t-test: NaN where a side has fewer than two values or neither side varies."""

    t: float
    degrees: float
    p: float


def t_test(first: Sequence[float], second: Sequence[float], equal_variance: bool = False) -> TTest:
    """Two-sided; Welch's form, or Student's with ``equal_variance``."""
    from scipy.special import stdtr

    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    undefined = TTest(float("nan"), float("nan"), float("nan"))
    if min(len(a), len(b)) < 2:
        return undefined
    share_a, share_b = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    degrees = float(len(a) + len(b) - 2)
    if equal_variance:
        pooled = (a.var(ddof=1) * (len(a) - 1) + b.var(ddof=1) * (len(b) - 1)) / degrees
        squared = pooled * (1 / len(a) + 1 / len(b))
    else:
        squared = share_a + share_b
    # Runs that repeat one deterministic number differ only by rounding; that is no spread to test against.
    if squared <= 1e-24:
        return undefined
    if not equal_variance:
        degrees = float(squared**2 / (share_a**2 / (len(a) - 1) + share_b**2 / (len(b) - 1)))
    t = float((a.mean() - b.mean()) / np.sqrt(squared))
    return TTest(t, degrees, float(2 * stdtr(degrees, -abs(t))))


def dice(predicted: NDArray[np.bool_], truth: NDArray[np.bool_]) -> Floats:
    """Dice (N,) of masks (N, H, W); empty on empty is 1."""
    overlap, total = _overlap(predicted, truth)
    return np.divide(2 * overlap, total, out=np.ones(len(total)), where=total > 0)


def iou(predicted: NDArray[np.bool_], truth: NDArray[np.bool_]) -> Floats:
    """Intersection over union (N,) of masks (N, H, W); empty on empty is 1."""
    overlap, total = _overlap(predicted, truth)
    return np.divide(overlap, total - overlap, out=np.ones(len(total)), where=total > 0)


def _overlap(predicted: NDArray[np.bool_], truth: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    if predicted.shape != truth.shape:
        raise ValueError(f"masks of shapes {predicted.shape} and {truth.shape} do not belong together")
    axes = tuple(range(1, predicted.ndim))
    overlap = (predicted & truth).sum(axis=axes).astype(np.float64)
    return overlap, predicted.sum(axis=axes) + truth.sum(axis=axes).astype(np.float64)


def _ranking(scores_N: Floats, truth_N: Floats) -> tuple[float, float]:
    known = ~np.isnan(truth_N)
    if not known.any():
        return float("nan"), float("nan")
    area, precision = ranking_values(scores_N[known], truth_N[known] == 1, np.ones((1, int(known.sum()))))
    return float(area[0]), float(precision[0])

"""How well a label can be guessed without looking at the picture.

For each label and each fact (size, bytes, view, brightness, ...) the AUC of that fact alone, of all of them together in
a small gradient boosting, and of the film's edge, where hardly any lung lies, in a linear model. What may be chosen
(the direction of a fact, trees, weights) is chosen on the training films and judged on the test films; without test
films, by cross-validation over patients.

A :data:`Guess` learns on some films and scores others, larger meaning more likely positive. Rows are positions in the
manifest; ``positive`` has one entry for each film of the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.data.audit.measure import Feature, Group, Level, auc, auc_interval
from afire.data.manifest import LABEL_PREFIX
from afire.progress import track

Rows = NDArray[np.int64]
Scores = NDArray[np.float64]
Guess = Callable[[Rows, Rows], Scores]
"""(rows to learn on, rows to score) -> scores of the latter."""
_MOST_FILMS = 20_000  # to learn on: more does not sharpen an AUC that is read to two digits
SEVERE, NOTABLE = 0.80, 0.65
"""AUC from which on a shortcut is severe (a result on the set may be that shortcut) or worth a notice."""
# Small sets show high AUC by chance: the lower end of the interval must clear these, and so must the training films,
# because what does not show there cannot be learned.
_SEVERE_LOW, _NOTABLE_LOW = 0.65, 0.5
_SEVERE_TRAIN, _NOTABLE_TRAIN = 0.65, 0.6
_FEWEST = 8  # patients of each class, to learn on and to judge on, below which no AUC is given
_FOLDS = 5
ALL_FILE, ALL_FACTS = "all file facts together", "all file facts and pixel summaries"
EDGE = "edge of the film"
Judged = Literal["test", "val", "cross-validated"]
# Facts about the file must not know the label. Disease may move pixel summaries, and goes with age and sex; who is ill
# may be filmed lying in bed, which the edge shows.
_SEVERE_LEVEL: dict[Group, Level] = {
    "file": "error",
    "edge": "warning",
    "pixels": "warning",
    "other": "warning",
    "demographics": "notice",
}
_STIFFNESS = 0.01  # inverse weight of the penalty on a linear model of a few hundred cells


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
    """A small gradient boosting on all of them: trees find thresholds and combinations, and allow gaps."""
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


def guess_from_edge(edges_NE: NDArray[np.float32], positive: NDArray[np.bool_]) -> Guess:
    """A linear model of the cells along the film's edge, with a penalty that suits fewer films than cells."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    def guess(learn: Rows, score: Rows) -> Scores:
        if positive[learn].all() or not positive[learn].any():
            return np.zeros(len(score))
        learn = learn[:: -(-len(learn) // _MOST_FILMS)]
        mean, spread = edges_NE[learn].mean(axis=0), edges_NE[learn].std(axis=0)
        spread = np.where(spread > 0, spread, 1)
        model = LogisticRegression(C=_STIFFNESS, max_iter=500)
        with threadpool_limits(limits=1):
            model.fit((edges_NE[learn] - mean) / spread, positive[learn])
            return np.asarray(model.decision_function((edges_NE[score] - mean) / spread), dtype=np.float64)

    return guess


def out_of_fold(guess: Guess, rows: Rows, folds: NDArray[np.int64]) -> Scores:
    """Scores of ``rows``, each learned on the films of the other folds."""
    scores = np.zeros(len(rows))
    for fold in np.unique(folds):
        held_out = folds == fold
        scores[held_out] = guess(rows[~held_out], rows[held_out]) if (~held_out).any() else 0.0
    return scores


@dataclass(frozen=True)
class Shortcut:
    """One label guessed from one fact, or from several together."""

    label: str
    feature: str
    group: Group
    direction: str
    """``larger`` or ``smaller`` (what means positive); empty for categories and several facts."""
    train_auc: float
    """On the films it was chosen on; out of fold for several facts together."""
    auc: float
    """On the films it is judged on."""
    low: float
    high: float
    films: int
    positives: int
    judged: Judged

    @property
    def level(self) -> Level | None:
        """How bad it is, or ``None``."""
        if self.auc >= SEVERE and self.low >= _SEVERE_LOW and self.train_auc >= _SEVERE_TRAIN:
            return _SEVERE_LEVEL[self.group]
        notable = self.auc >= NOTABLE and self.low > _NOTABLE_LOW and self.train_auc >= _NOTABLE_TRAIN
        return "notice" if notable else None

    @property
    def single(self) -> bool:
        """Whether it is one fact, not several together."""
        return self.feature not in (ALL_FILE, ALL_FACTS)


def find_shortcuts(
    table: pd.DataFrame,
    features: Sequence[Feature],
    generator: np.random.Generator,
    edges_NE: NDArray[np.float32] | None = None,
) -> list[Shortcut]:
    """Every fact of every label that has both classes, whatever its AUC, in the order of labels and facts.

    ``edges_NE`` has the cells along each film's edge, NaN where the film could not be read.
    """
    shortcuts: list[Shortcut] = []
    edges: list[Shortcut] = []
    for name, values in track(label_columns(table), "shortcuts", unit="labels"):
        subsets = _divide(table, values)
        if subsets is None:
            continue
        positive = values.to_numpy() == 1.0
        shortcuts.extend(_of_label(name, positive, subsets, features, generator))
        if edges_NE is not None:
            # A generator of its own: with or without edges, the other intervals are drawn alike.
            edges.extend(_of_edges(name, positive, subsets, edges_NE, np.random.default_rng(len(edges))))
    return [*shortcuts, *edges]


def label_columns(table: pd.DataFrame) -> list[tuple[str, pd.Series]]:
    """Labels by name, and ``normal`` unless it only says the opposite of a label."""
    columns = [(str(c).removeprefix(LABEL_PREFIX), table[c]) for c in table.columns if str(c).startswith(LABEL_PREFIX)]
    if not any((1.0 - table["normal"]).equals(values) for _, values in columns):
        columns.append(("normal", table["normal"]))
    return columns


@dataclass(frozen=True)
class _Subsets:
    """Rows to learn on and rows to judge on (the same when cross-validated); ``folds`` number the former."""

    learn: NDArray[np.int64]
    judge: NDArray[np.int64]
    folds: NDArray[np.int64]
    patients: NDArray[np.object_]
    judged: Judged

    def only(self, usable: NDArray[np.bool_]) -> _Subsets:
        """Without films whose entry in ``usable``, one for each film of the manifest, is false."""
        learn, judge = usable[self.learn], usable[self.judge]
        return replace(self, learn=self.learn[learn], judge=self.judge[judge], folds=self.folds[learn])

    def enough(self, positive: NDArray[np.bool_]) -> bool:
        """Whether both subsets have enough patients of both classes for an AUC; films of one patient are alike."""
        for rows in (self.learn, self.judge):
            present = positive[rows]
            people = self.patients[rows]
            if min(len(set(people[present])), len(set(people[~present]))) < _FEWEST:
                return False
        return True


def _divide(table: pd.DataFrame, values: pd.Series) -> _Subsets | None:
    known, split = values.notna().to_numpy(), table["split"].to_numpy()
    positive, patients = values.to_numpy() == 1.0, table["patient"].to_numpy(dtype=object)
    learn = np.flatnonzero(known & (split == "train"))
    choices: tuple[tuple[Judged, NDArray[np.int64]], ...] = (
        ("test", np.flatnonzero(known & (split == "test"))),
        ("val", np.flatnonzero(known & (split == "val"))),
    )
    for judged, judge in choices:
        subsets = _Subsets(learn, judge, _folds(patients[learn]), patients, judged)
        if subsets.enough(positive):
            return subsets
    rows = np.flatnonzero(known)
    subsets = _Subsets(rows, rows, _folds(patients[rows]), patients, "cross-validated")
    return subsets if subsets.enough(positive) else None


def _folds(patients: NDArray[np.object_]) -> NDArray[np.int64]:
    """A fold for each film, one for all films of a patient; by hash, because names may be sorted by label."""
    codes = pd.util.hash_array(patients.astype(str).astype(object), categorize=False)
    _, order = np.unique(codes, return_inverse=True)
    return order.astype(np.int64) % _FOLDS


def _of_label(
    label: str,
    positive: NDArray[np.bool_],
    subsets: _Subsets,
    features: Sequence[Feature],
    generator: np.random.Generator,
) -> Iterator[Shortcut]:
    for feature in features:
        usable = subsets.only(feature.values.notna().to_numpy())
        if usable.enough(positive):
            guess = guess_from_one(feature, positive)
            learned = auc(guess(usable.learn, usable.learn), positive[usable.learn])
            shortcut = Shortcut(
                label, feature.name, feature.group, "", learned, *_judge(guess, positive, usable, generator)
            )
            if not feature.is_category:
                larger = larger_is_positive(feature, positive, usable.learn)
                shortcut = replace(shortcut, direction="larger" if larger else "smaller")
            yield shortcut
    joint: tuple[tuple[str, Group, tuple[Group, ...]], ...] = (
        (ALL_FILE, "file", ("file",)),
        (ALL_FACTS, "pixels", ("file", "pixels")),
    )
    for name, group, members in joint:
        chosen = [feature for feature in features if feature.group in members]
        if len(chosen) > 1:
            yield _fitted(label, name, group, guess_from_many(chosen, positive), positive, subsets, generator)


def _of_edges(
    label: str,
    positive: NDArray[np.bool_],
    subsets: _Subsets,
    edges_NE: NDArray[np.float32],
    generator: np.random.Generator,
) -> Iterator[Shortcut]:
    usable = subsets.only(~np.isnan(edges_NE[:, 0]))
    if usable.enough(positive):
        yield _fitted(label, EDGE, "edge", guess_from_edge(edges_NE, positive), positive, usable, generator)


def _fitted(
    label: str,
    name: str,
    group: Group,
    guess: Guess,
    positive: NDArray[np.bool_],
    subsets: _Subsets,
    generator: np.random.Generator,
) -> Shortcut:
    """What a model with many parameters guesses; training films are scored out of fold, as the model has seen them."""
    judged = _judge(guess, positive, subsets, generator)
    learned = judged[0]  # already out of fold, unless other films judge
    if subsets.judged != "cross-validated":
        learned = auc(out_of_fold(guess, subsets.learn, subsets.folds), positive[subsets.learn])
    return Shortcut(label, name, group, "", learned, *judged)


def _judge(
    guess: Guess, positive: NDArray[np.bool_], subsets: _Subsets, generator: np.random.Generator
) -> tuple[float, float, float, int, int, Judged]:
    """AUC, low, high, films, positives, judged: the last fields of a :class:`Shortcut`."""
    if subsets.judged == "cross-validated":
        scores = out_of_fold(guess, subsets.learn, subsets.folds)
    else:
        scores = guess(subsets.learn, subsets.judge)
    truth = positive[subsets.judge]
    low, high = auc_interval(scores, truth, subsets.patients[subsets.judge], generator)
    return auc(scores, truth), low, high, len(truth), int(truth.sum()), subsets.judged

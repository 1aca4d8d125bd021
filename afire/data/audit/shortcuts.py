"""How well a label can be guessed without looking at the picture.

For each label and each fact (size, bytes, view, brightness, ...) the AUC of that fact alone, and of all of them
together in a small gradient boosting. What may be chosen (the direction of a fact, the boosting's trees) is chosen on
the training films and judged on the test films; without a test part, by cross-validation over patients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.data.audit.features import Feature, Group
from afire.data.audit.findings import Level
from afire.data.audit.guess import Guess, guess_from_many, guess_from_one, larger_is_positive, out_of_fold
from afire.data.audit.roc import auc, auc_interval
from afire.data.manifest import LABEL_PREFIX
from afire.progress import track

SEVERE, NOTABLE = 0.80, 0.65
"""AUC from which on a shortcut is severe (a result on the set may be that shortcut) or worth a notice."""
# Small sets show high AUC by chance: the lower end of the interval must clear these, and so must the training films,
# because what does not show there cannot be learned.
_SEVERE_LOW, _NOTABLE_LOW = 0.65, 0.5
_SEVERE_TRAIN, _NOTABLE_TRAIN = 0.65, 0.6
_FEWEST = 8  # patients of each class, to learn on and to judge on, below which no AUC is given
_FOLDS = 5
ALL_FILE, ALL_FACTS = "all file facts together", "all file facts and pixel summaries"

Judged = Literal["test", "val", "cross-validated"]
# Facts about the file must not know the label. Disease may move pixel summaries, and goes with age and sex.
_SEVERE_LEVEL: dict[Group, Level] = {"file": "error", "pixels": "warning", "other": "warning", "demographics": "notice"}


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


def find_shortcuts(table: pd.DataFrame, features: Sequence[Feature], generator: np.random.Generator) -> list[Shortcut]:
    """Every fact of every label that has both classes, whatever its AUC, in the order of labels and facts."""
    found: list[Shortcut] = []
    for name, values in track(label_columns(table), "shortcuts", unit="labels"):
        parts = _divide(table, values)
        if parts is not None:
            found.extend(_of_label(name, values.to_numpy() == 1.0, parts, features, generator))
    return found


def label_columns(table: pd.DataFrame) -> list[tuple[str, pd.Series]]:
    """Labels by name, and ``normal`` unless it only says the opposite of a label."""
    columns = [(str(c).removeprefix(LABEL_PREFIX), table[c]) for c in table.columns if str(c).startswith(LABEL_PREFIX)]
    if not any((1.0 - table["normal"]).equals(values) for _, values in columns):
        columns.append(("normal", table["normal"]))
    return columns


@dataclass(frozen=True)
class _Parts:
    """Rows to learn on and rows to judge on (the same when cross-validated); ``folds`` number the former."""

    learn: NDArray[np.int64]
    judge: NDArray[np.int64]
    folds: NDArray[np.int64]
    patients: NDArray[np.object_]
    judged: Judged

    def only(self, usable: NDArray[np.bool_]) -> _Parts:
        """Without films whose entry in ``usable``, one for each film of the manifest, is false."""
        learn, judge = usable[self.learn], usable[self.judge]
        return replace(self, learn=self.learn[learn], judge=self.judge[judge], folds=self.folds[learn])

    def enough(self, positive: NDArray[np.bool_]) -> bool:
        """Whether both parts have both classes in numbers that allow an AUC: of people, films of one are alike."""
        for rows in (self.learn, self.judge):
            present = positive[rows]
            people = self.patients[rows]
            if min(len(set(people[present])), len(set(people[~present]))) < _FEWEST:
                return False
        return True


def _divide(table: pd.DataFrame, values: pd.Series) -> _Parts | None:
    known, split = values.notna().to_numpy(), table["split"].to_numpy()
    positive, patients = values.to_numpy() == 1.0, table["patient"].to_numpy(dtype=object)
    learn = np.flatnonzero(known & (split == "train"))
    choices: tuple[tuple[Judged, NDArray[np.int64]], ...] = (
        ("test", np.flatnonzero(known & (split == "test"))),
        ("val", np.flatnonzero(known & (split == "val"))),
    )
    for judged, judge in choices:
        parts = _Parts(learn, judge, _folds(patients[learn]), patients, judged)
        if parts.enough(positive):
            return parts
    rows = np.flatnonzero(known)
    parts = _Parts(rows, rows, _folds(patients[rows]), patients, "cross-validated")
    return parts if parts.enough(positive) else None


def _folds(patients: NDArray[np.object_]) -> NDArray[np.int64]:
    """A fold for each film, one for all films of a patient; by hash, because names may be sorted by label."""
    codes = pd.util.hash_array(patients.astype(str).astype(object), categorize=False)
    _, order = np.unique(codes, return_inverse=True)
    return order.astype(np.int64) % _FOLDS


def _of_label(
    label: str,
    positive: NDArray[np.bool_],
    parts: _Parts,
    features: Sequence[Feature],
    generator: np.random.Generator,
) -> Iterator[Shortcut]:
    for feature in features:
        kept = parts.only(feature.values.notna().to_numpy())
        if kept.enough(positive):
            guess = guess_from_one(feature, positive)
            learned = auc(guess(kept.learn, kept.learn), positive[kept.learn])
            found = Shortcut(label, feature.name, feature.group, "", learned, *_judge(guess, positive, kept, generator))
            if not feature.is_category:
                larger = larger_is_positive(feature, positive, kept.learn)
                found = replace(found, direction="larger" if larger else "smaller")
            yield found
    joint: tuple[tuple[str, Group, tuple[Group, ...]], ...] = (
        (ALL_FILE, "file", ("file",)),
        (ALL_FACTS, "pixels", ("file", "pixels")),
    )
    for name, group, members in joint:
        chosen = [feature for feature in features if feature.group in members]
        if len(chosen) > 1:
            guess = guess_from_many(chosen, positive)
            judged = _judge(guess, positive, parts, generator)
            learned = judged[0]  # already out of fold, unless there is a part to judge on
            if parts.judged != "cross-validated":
                learned = auc(out_of_fold(guess, parts.learn, parts.folds), positive[parts.learn])
            yield Shortcut(label, name, group, "", learned, *judged)


def _judge(
    guess: Guess, positive: NDArray[np.bool_], parts: _Parts, generator: np.random.Generator
) -> tuple[float, float, float, int, int, Judged]:
    """AUC, low, high, films, positives, judged: the last fields of a :class:`Shortcut`."""
    if parts.judged == "cross-validated":
        scores = out_of_fold(guess, parts.learn, parts.folds)
    else:
        scores = guess(parts.learn, parts.judge)
    truth = positive[parts.judge]
    low, high = auc_interval(scores, truth, parts.patients[parts.judge], generator)
    return auc(scores, truth), low, high, len(truth), int(truth.sum()), parts.judged

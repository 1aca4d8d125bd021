"""Which labels a task is about, and whether its parts can teach and test them. N films, C labels."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from afire.data.manifest import LABEL_PREFIX, Manifest
from afire.errors import UserError

ABNORMAL = "abnormal"


def task_labels(manifest: Manifest, labels: Sequence[str] | None = None) -> tuple[list[str], NDArray[np.float64]]:
    """Names (C) and truth (N, C) with NaN for unknown. ``abnormal`` is 1 - normal.

    Without ``labels``: all findings of the manifest, or ``abnormal`` where it has none.
    """
    names = list(labels) if labels else (manifest.labels or [ABNORMAL])
    if len(set(names)) < len(names):
        raise UserError(f"--labels names {next(n for n in names if names.count(n) > 1)!r} more than once.")
    return names, np.stack([_column(manifest, name) for name in names], axis=1)


def _column(manifest: Manifest, name: str) -> NDArray[np.float64]:
    if LABEL_PREFIX + name in manifest.table:
        values = manifest.table[LABEL_PREFIX + name].to_numpy(np.float64)
    elif name == ABNORMAL:
        values = 1 - manifest.table["normal"].to_numpy(np.float64)
    else:
        known = [*manifest.labels, ABNORMAL]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"the manifest has no label {name!r}{hint} (it has {', '.join(known)}).")
    if np.isnan(values).all():
        columns = ["normal", *(LABEL_PREFIX + label for label in manifest.labels)]
        if manifest.table[columns].notna().any(axis=None):
            raise UserError(f"no film has a value for label {name}; choose other labels with --labels.")
        raise UserError(
            "these films have no labels, and this task needs some; build the manifest from class folders or a table "
            "(`afire data build classes`, `afire data build csv`)."
        )
    return values


def check_classes(
    names: Sequence[str], truth_NC: NDArray[np.float64], parts: Mapping[str, NDArray[np.int64]]
) -> list[str]:
    """Sentences about labels with one class only in a part; refused when no label has both classes in every part.

    ``parts`` maps train, val and test to rows. A label that fails in train cannot be learnt, one that fails in val has
    no threshold of its own, and one that fails in test has no metrics: it is left out of the mean.
    """
    failing = {name: _one_class(truth_NC[:, c], parts) for c, name in enumerate(names)}
    sentences = [f"label {name} has {words}" for name, words in failing.items() if words]
    if len(sentences) == len(names):
        more = f" (and {len(names) - 1} more labels)" if len(names) > 1 else ""
        raise UserError(
            f"{sentences[0]}{more}; films with and without the finding are needed in every part: "
            "choose other labels, a larger fraction or another split."
        )
    return sentences


def _one_class(truth_N: NDArray[np.float64], parts: Mapping[str, NDArray[np.int64]]) -> str:
    words = []
    for part, rows in parts.items():
        positives, negatives = int((truth_N[rows] == 1).sum()), int((truth_N[rows] == 0).sum())
        if positives == 0 or negatives == 0:
            words.append(f"{positives:,} positive and {negatives:,} negative films in {part}")
    return ", ".join(words)

"""Labels of a manifest by name, for whatever learns from them or is judged by them.

Shapes: N films, C labels.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from afire.data.manifest import LABEL_PREFIX, Manifest
from afire.errors import UserError

Floats = NDArray[np.float64]
ABNORMAL = "abnormal"


def task_labels(
    manifest: Manifest, labels: Sequence[str] | None = None, option: str = "--labels"
) -> tuple[list[str], Floats]:
    """Names (C) and truth (N, C) with NaN for unknown. ``abnormal`` is 1 - normal.

    Without ``labels``: all findings of the manifest, or ``abnormal`` where it has none. ``option`` is what messages
    call the choice of labels.
    """
    names = list(labels) if labels else (manifest.labels or [ABNORMAL])
    if len(set(names)) < len(names):
        raise UserError(f"{option} names {next(n for n in names if names.count(n) > 1)!r} more than once.")
    return names, np.stack([_column(manifest, name, option) for name in names], axis=1)


def _column(manifest: Manifest, name: str, option: str) -> Floats:
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
            raise UserError(f"no film has a value for label {name}; choose other labels with {option}.")
        raise UserError(
            "these films have no labels, and this task needs some; build the manifest from class folders or a table "
            "(`afire data build classes`, `afire data build csv`)."
        )
    return values

"""Which films a pre-training run may use: normal ones, of the training part only."""

from __future__ import annotations

import numpy as np

from afire.data.manifest import Manifest
from afire.data.splits import Split
from afire.errors import UserError


def normal_training_rows(manifest: Manifest, split: Split | None = None) -> tuple[np.ndarray, str]:
    """Rows of normal training films, and a sentence that says how many of how many.

    The training part comes from ``split``, else from the manifest's own column; a manifest without either is all
    training. Where no film is known to be normal or not, all are taken, and the sentence says so.
    """
    rows, part = _training_rows(manifest, split)
    normal = manifest.table["normal"].to_numpy()[rows]
    if np.isnan(normal).all():
        return rows, f"using all {len(rows):,} {part}: no labels say which are normal, so all are taken as normal"
    chosen = rows[normal == 1]
    if len(chosen) == 0:
        raise UserError(f"none of the {len(rows):,} {part} is labelled normal; pre-training needs normal films.")
    unknown = int(np.isnan(normal).sum())
    without = f", {unknown:,} without a label left out" if unknown else ""
    return chosen, f"using {len(chosen):,} normal films of {len(rows):,} {part}{without}"


def _training_rows(manifest: Manifest, split: Split | None) -> tuple[np.ndarray, str]:
    if split is not None:
        return split.rows(manifest)["train"], f"training films (split {split.hash[:12]})"
    listed = manifest.table["split"]
    if (listed == "").all():
        return np.arange(len(manifest)), "films"
    others = int((listed != "train").sum())
    return np.flatnonzero(listed == "train"), f"training films ({others:,} of other parts left alone)"

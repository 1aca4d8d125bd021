"""Which normal films fit a detector, which choose its score, and which calibrate it; patients never cross."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afire.data.manifest import Manifest
from afire.data.splits import Split
from afire.errors import UserError
from afire.tasks.guard import film_digests, group_copies
from afire.training.selection import normal_training_rows

Rows = NDArray[np.int64]
FEWEST = {"fit": 8, "choose": 4, "calibrate": 4}


@dataclass(frozen=True)
class Parts:
    """Rows of normal films. ``fit`` trains the networks and their Gaussians; the others are held out."""

    fit: Rows
    choose: Rows
    calibrate: Rows
    held_out_by: str  # a sentence: where the held-out normals come from

    @property
    def held_out(self) -> Rows:
        return np.concatenate([self.choose, self.calibrate])

    def counts(self) -> dict[str, int]:
        return {"fit": len(self.fit), "choose": len(self.choose), "calibrate": len(self.calibrate)}


def detection_parts(
    manifest: Manifest, split: Split | None, seed: int, held_out: float = 0.25, choose_share: float = 0.4
) -> Parts:
    """Draw the parts by patient; exact copies count as one patient.

    With a split the held-out normals are those of its validation part. Without one a share ``held_out`` of the
    patients with normal training films is held out. Never a film of the test part.
    """
    rows, _ = normal_training_rows(manifest, split)
    patients = group_copies(manifest, film_digests(manifest)).table["patient"].to_numpy()
    generator = np.random.default_rng([seed, 6])
    if split is not None:
        held = _normal(manifest, split.rows(manifest)["val"])
        held = held[~np.isin(patients[held], patients[rows])]  # a copy of a training film holds nothing out
        source = f"normal films of the split's validation part ({split.hash[:12]})"
    else:
        names = generator.permutation(np.unique(patients[rows]))
        chosen = set(names[: max(1, round(held_out * len(names)))])
        inside = np.array([patient in chosen for patient in patients[rows]])
        rows, held = rows[~inside], rows[inside]
        source = f"{held_out:.0%} of the patients with normal training films, drawn with seed {seed}"
    names = generator.permutation(np.unique(patients[held]))
    for_choice = set(names[: max(1, round(choose_share * len(names)))])
    inside = np.array([patient in for_choice for patient in patients[held]], bool)
    parts = Parts(rows, held[inside], held[~inside], source)
    for name, count in parts.counts().items():
        if count < FEWEST[name]:
            raise UserError(
                f"{count} normal films are left to {name} the detector, and it needs at least {FEWEST[name]}; give "
                "more normal films, or a split with a larger validation part."
            )
    return parts


def _normal(manifest: Manifest, rows: Rows) -> Rows:
    """Normal films among ``rows``; all of them where no label says which are normal."""
    normal = manifest.table["normal"].to_numpy()[rows]
    return rows if np.isnan(normal.astype(float)).all() else rows[normal == 1]

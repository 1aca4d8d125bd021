"""Which films are negatives, and which look like nothing else in the set.

The main direction of the films (the leading singular vector of their rank pictures, not centred) does not care how many
of them are negatives, because a film and its negative span the same line. It says which films disagree; which side is
the right one is told by anatomy: lungs are darker than spine, belly and shoulders, and the corners are darkest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afire.data.audit.duplicates import unit_vectors
from afire.data.audit.measure import THUMB_SIDE

SUSPECT = -0.2
"""Films that agree with the typical film less than this are taken for negatives."""
UNLIKE = 0.1
"""Films below this are not negatives but unlike the rest: lying on their side, collimated, not a chest."""
_SURE = 0.3  # agreement with the anatomical template from which on the template decides what is positive
_FEWEST = 20  # films from which a typical film can be made
_SAMPLE = 4096


@dataclass(frozen=True)
class Polarity:
    """``agreement`` (N,) with the typical film, NaN where unknown; ``anatomy``: how much that one is like a chest."""

    agreement: NDArray[np.float64]
    anatomy: float

    @property
    def judged_by_anatomy(self) -> bool:
        """Whether the typical film is enough like a chest to tell positive from negative; else the majority decides."""
        return abs(self.anatomy) >= _SURE

    @property
    def suspects(self) -> NDArray[np.int64]:
        """Rows of suspected negatives, surest first."""
        rows = np.flatnonzero(np.nan_to_num(self.agreement, nan=1.0) < SUSPECT)
        return rows[np.argsort(self.agreement[rows], kind="stable")]

    @property
    def unlike(self) -> NDArray[np.int64]:
        """Rows of films that are unlike the rest, least like first."""
        agreement = np.nan_to_num(self.agreement, nan=1.0)
        rows = np.flatnonzero((agreement >= SUSPECT) & (agreement < UNLIKE))
        return rows[np.argsort(agreement[rows], kind="stable")]


def judge_polarity(ranks_NP: NDArray[np.uint8], views: Sequence[str]) -> Polarity:
    """Agreement of every film with the typical film of its view (frontal views count as one)."""
    agreement = np.full(len(ranks_NP), np.nan)
    usable = ranks_NP.max(axis=1) > ranks_NP.min(axis=1) if len(ranks_NP) else np.zeros(0, bool)
    lateral = np.array([view.upper() == "LATERAL" for view in views], bool)
    anatomy = 0.0
    for side in (False, True):
        rows = np.flatnonzero(usable & (lateral == side))
        if len(rows) < _FEWEST:
            continue
        typical = _typical_film(unit_vectors(ranks_NP[_spread(rows)]))
        likeness = float(typical @ chest_template())
        for start in range(0, len(rows), _SAMPLE):
            block = rows[start : start + _SAMPLE]
            agreement[block] = unit_vectors(ranks_NP[block]) @ typical
        # A lateral film is not like the template, so there the majority is taken to be right.
        right_way = likeness >= 0 if not side and abs(likeness) >= _SURE else np.median(agreement[rows]) >= 0
        if not right_way:
            agreement[rows] *= -1
        if not side:
            anatomy = abs(likeness)
    return Polarity(agreement, anatomy)


def _spread(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """At most so many of the rows as are needed for a typical film, evenly spaced."""
    return rows[np.linspace(0, len(rows) - 1, min(_SAMPLE, len(rows))).astype(np.int64)]


def _typical_film(films_NP: NDArray[np.float32]) -> NDArray[np.float32]:
    """The median film (P,), unit norm, after turning every film to the side of the leading direction."""
    typical = chest_template() + films_NP[0]  # any start that is not at right angles to the result
    for _ in range(50):  # power iteration: far cheaper than all singular vectors
        typical = films_NP.T @ (films_NP @ typical)
        typical = typical / max(float(np.linalg.norm(typical)), 1e-12)
    for _ in range(3):  # the median is less moved by odd films than the singular vector it starts from
        typical = np.median(films_NP * np.where(films_NP @ typical < 0, -1, 1)[:, None], axis=0)
        typical = typical / max(float(np.linalg.norm(typical)), 1e-12)
    return np.asarray(typical, dtype=np.float32)


def chest_template() -> NDArray[np.float32]:
    """A frontal chest film in a few strokes (P,), mean zero and unit norm."""
    y, x = np.mgrid[0:THUMB_SIDE, 0:THUMB_SIDE] / (THUMB_SIDE - 1)
    chest = np.full((THUMB_SIDE, THUMB_SIDE), 0.6)
    for centre in (0.3, 0.7):
        chest -= 0.45 * np.exp(-(((x - centre) / 0.13) ** 2 + ((y - 0.42) / 0.25) ** 2))
    chest += 0.25 * np.exp(-(((x - 0.5) / 0.09) ** 2))
    chest += 0.25 / (1 + np.exp(-(y - 0.75) / 0.05))
    chest -= 0.5 / (1 + np.exp((np.minimum(x, 1 - x) - 0.06) / 0.03))
    chest -= 0.3 / (1 + np.exp((y - 0.04 - 0.8 * np.clip(0.35 - np.minimum(x, 1 - x), 0, None)) / 0.03))
    flat = (chest - chest.mean()).ravel()
    return np.asarray(flat / np.linalg.norm(flat), dtype=np.float32)

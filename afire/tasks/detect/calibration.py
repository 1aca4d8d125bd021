"""From a score to what it means: percentile among normals, conformal p-value, and the threshold of a false-alarm rate.

The calibration films are normals that neither trained the networks nor chose the score. If a new film is normal and
comes from where they come from, its p-value is at most a with probability at most a, whatever the score is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from afire.errors import UserError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """Scores of the calibration normals, rising."""

    normal_scores: Floats

    @classmethod
    def of(cls, scores: ArrayLike) -> Calibration:
        """From the scores (N,) of held-out normal films."""
        found = np.sort(np.asarray(scores, np.float64))
        if len(found) == 0 or not np.isfinite(found).all():
            raise UserError("calibration needs finite scores of at least one normal film.")
        return cls(found)

    def __len__(self) -> int:
        return len(self.normal_scores)

    def p_values(self, scores: ArrayLike) -> Floats:
        """(1 + normals that score at least as high) / (1 + normals): never below 1 / (n + 1)."""
        as_high = len(self) - np.searchsorted(self.normal_scores, np.asarray(scores, np.float64), side="left")
        found: Floats = (1 + as_high) / (1 + len(self))
        return found

    def percentiles(self, scores: ArrayLike) -> Floats:
        """Percent of calibration normals that score lower, ties counting half."""
        values = np.asarray(scores, np.float64)
        below = np.searchsorted(self.normal_scores, values, side="left")
        upto = np.searchsorted(self.normal_scores, values, side="right")
        found: Floats = 50 * (below + upto) / len(self)
        return found

    def threshold(self, false_alarms: float) -> float:
        """The smallest score whose p-value is at most ``false_alarms``; infinite when there are too few normals.

        A film alarms when its score is at least this.
        """
        may_pass = int(np.floor(false_alarms * (len(self) + 1) + 1e-9)) - 1  # normals that may score as high
        if may_pass < 0:
            return float("inf")
        if may_pass >= len(self):
            return float("-inf")
        return float(np.nextafter(self.normal_scores[len(self) - 1 - may_pass], np.inf))

    def smallest_rate(self) -> float:
        """The lowest false-alarm rate that this many normals can vouch for."""
        return 1 / (1 + len(self))

"""From probabilities to masks: which threshold, and how small a connected piece may be.

Shapes: B films, S pixels a side, T thresholds, A areas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import label

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """What validation films decided, and the Dice over all of them that it gave."""

    threshold: float
    min_area: float
    dice: float


def choose(
    areas_BTA: Floats, overlaps_BTA: Floats, truth_B: Floats, thresholds: Sequence[float], least: Sequence[float]
) -> Choice:
    """Best mean Dice over films; of equal pairs the threshold nearest to a half, then the smallest area, wins."""
    whole = areas_BTA + truth_B[:, None, None]
    dice_TA = np.divide(2 * overlaps_BTA, whole, out=np.ones(whole.shape), where=whole > 0).mean(axis=0)
    pairs = [(t, a) for t in range(len(thresholds)) for a in range(len(least))]
    t, a = min(pairs, key=lambda pair: (-dice_TA[pair], abs(thresholds[pair[0]] - 0.5), least[pair[1]]))
    return Choice(round(thresholds[t], 6), least[a], float(dice_TA[t, a]))


def piece_sizes(inside: NDArray[np.bool_], truth: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Pixels of each connected piece of ``inside`` (S, S), and how many of them lie in ``truth``."""
    pieces, _ = label(inside)
    areas = np.bincount(pieces.ravel())[1:].astype(np.float64)
    return areas, np.bincount(pieces.ravel(), truth.ravel())[1:].astype(np.float64)


def without_small_pieces(masks: NDArray[np.bool_], least: float) -> NDArray[np.bool_]:
    """Masks (B, S, S) without connected pieces of fewer than ``least`` pixels."""
    if least <= 0:
        return masks
    kept = np.zeros_like(masks)
    for number, mask in enumerate(masks):
        pieces, _ = label(mask)
        large = np.bincount(pieces.ravel()) >= least
        large[0] = False  # what lies outside
        kept[number] = large[pieces]
    return kept

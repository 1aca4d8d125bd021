"""From probabilities to masks: which threshold, and how small a connected piece may be.

Shapes: B films, S pixels a side, T thresholds, A areas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import label

Floats = NDArray[np.float64]


By = Literal["all", "both"]


@dataclass(frozen=True)
class Choice:
    """What validation films decided, and the value that it gave."""

    threshold: float
    min_area: float
    value: float


def choose(
    areas_BTA: Floats,
    overlaps_BTA: Floats,
    truth_B: Floats,
    thresholds: Sequence[float],
    least: Sequence[float],
    by: By,
) -> Choice:
    """The pair with the best mean Dice; of equals the threshold nearest to a half, then the smallest area, wins.

    ``all``: Dice over all films. ``both``: the mean of that and of Dice over films with a mask. Where most films have
    none, a network that has learnt little is best when it says nothing at all, and only ``both`` sees it learn.
    """
    whole = areas_BTA + truth_B[:, None, None]
    dice_BTA = np.divide(2 * overlaps_BTA, whole, out=np.ones(whole.shape), where=whole > 0)
    value_TA, positive = dice_BTA.mean(axis=0), truth_B > 0
    if by == "both" and positive.any():
        value_TA = (value_TA + dice_BTA[positive].mean(axis=0)) / 2
    pairs = [(t, a) for t in range(len(thresholds)) for a in range(len(least))]
    t, a = min(pairs, key=lambda pair: (-value_TA[pair], abs(thresholds[pair[0]] - 0.5), least[pair[1]]))
    return Choice(round(thresholds[t], 6), least[a], float(value_TA[t, a]))


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

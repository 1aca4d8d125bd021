"""Synthetic lesions the usual way: NumPy, one film at a time, one lesion at a time (default settings only)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afire.lesions.places import DRAW_BITS, Draw

Film = NDArray[np.float64]


def lesion_mask(film: Film, draws: NDArray[np.int64]) -> Film:
    """What the lesions of one view add to a film; ``draws`` (slots, draws)."""

    def pick(number: int, limit: int) -> int:
        return int(number) * limit >> DRAW_BITS

    height, width = film.shape
    scale = min(height, width) / 224
    smallest, largest, window = round(16 * scale), round(64 * scale), round(60 * scale)
    highlighted = np.flatnonzero(film > _otsu(film))
    mask = np.zeros_like(film)
    for draw in draws[: 1 + pick(draws[0, Draw.COUNT], 4)]:
        centre_y, centre_x = divmod(int(highlighted[pick(draw[Draw.TEXTURE], len(highlighted))]), width)
        left = min(max(centre_x - window // 2, 0), width - window)
        top = min(max(centre_y - window // 2, 0), height - window)
        across = smallest + pick(draw[Draw.WIDTH], largest - smallest + 1)
        down = smallest + pick(draw[Draw.HEIGHT], largest - smallest + 1)
        texture = _resize(film[top : top + window, left : left + window], down, across)
        u, v = (2 * (np.arange(side) + 0.5) / side - 1 for side in (across, down))
        delta = np.exp(-(u[None, :] ** 2 + v[:, None] ** 2) / 0.5)
        amplitude = 0.2 + 0.6 * draw[Draw.AMPLITUDE] / (1 << DRAW_BITS)
        x, y = pick(draw[Draw.PLACE_X], width - across + 1), pick(draw[Draw.PLACE_Y], height - down + 1)
        mask[y : y + down, x : x + across] += amplitude * delta * texture
    return np.clip(mask, 0, 1)


def _otsu(film: Film) -> float:
    low, high = film.min(), film.max()
    counts, edges = np.histogram(film, bins=256, range=(low, high))
    below = np.cumsum(counts)[:-1]
    sum_below = np.cumsum(counts * np.arange(256))[:-1]
    total, total_sum = film.size, (counts * np.arange(256)).sum()
    spread = (total_sum * below - total * sum_below) ** 2.0 / np.maximum(below * (total - below), 1)
    return float(edges[1 + int(np.argmax(spread))])


def _resize(window: Film, down: int, across: int) -> Film:
    def between(target: int, source: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Film]:
        at = np.clip((np.arange(target) + 0.5) * source / target - 0.5, 0, source - 1)
        low = at.astype(np.int64)
        return low, np.minimum(low + 1, source - 1), at - low

    y0, y1, y = between(down, window.shape[0])
    x0, x1, x = between(across, window.shape[1])
    above = window[np.ix_(y0, x0)] * (1 - x) + window[np.ix_(y0, x1)] * x
    under = window[np.ix_(y1, x0)] * (1 - x) + window[np.ix_(y1, x1)] * x
    resized: Film = above * (1 - y[:, None]) + under * y[:, None]
    return resized

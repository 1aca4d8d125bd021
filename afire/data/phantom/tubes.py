"""Tubes in space and their shadow: ribs, vessels, airways and wires are all drawn with this."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afire.data.phantom.frame import Array, Floats, Frame

_GOLDEN = 0.6180339887


class Shadow:
    """Path length (cm) through tubes along polylines, summed pixel by pixel.

    Matter is spread onto the pixels it falls on, so a tube seen end-on is as dense as it should be. Samples are
    collected on a grid of half pixels and shared among the nearest pixels once, at the end.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._wide = 2 * frame.size + 4  # two half pixels of margin on each side
        self._cells: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []
        self._mass: list[Floats] = []

    def add(
        self,
        points_KN3: Floats,
        radius_KN: Floats,
        *,
        wall: float = 1.0,
        strength_KN: Floats | float = 1.0,
        step: float = 0.5,
    ) -> None:
        """Add K tubes of N points each, sampled every ``step`` pixels.

        ``wall`` is the solid share of the radius: 1 is a rod, 0.3 a hollow bone.
        """
        frame = self.frame
        points, radius, strength = _resample(step * frame.pixel, points_KN3, radius_KN, strength_KN)
        x = points[..., 0] + points[..., 2] * np.float32(np.sin(frame.yaw))
        y = points[..., 1]
        step_x, step_y, step_z = _steps(x), _steps(y), _steps(points[..., 2])
        flat = np.hypot(step_x, step_y) + np.float32(1e-6)
        lanes = max(1, int(np.ceil(2 * float(radius.max()) / (0.75 * frame.pixel))))
        # Lanes swing by a low-discrepancy sequence, else their lattice beats against the pixels' as stripes.
        swing = 0.9 * (np.mod(np.arange(x.shape[1])[:, None] * _GOLDEN, 1) - 0.5)
        across = ((np.arange(lanes) + 0.5 + swing) / lanes * 2 - 1).astype(np.float32)  # (N, J) in radii
        chord = np.sqrt(np.clip(1 - across**2, 0, None))
        if wall < 1:
            chord -= np.float32(0.75) * np.sqrt(np.clip(np.float32((1 - wall) ** 2) - across**2, 0, None))
        length = np.sqrt(flat * flat + step_z * step_z)
        pixel_area = frame.extent[0] * frame.extent[1] / frame.size**2
        mass = (radius * radius * strength * length * np.float32(4 / lanes / pixel_area))[..., None] * chord
        aside = radius[..., None] * across / flat[..., None]
        self._collect(x[..., None] - aside * step_y[..., None], y[..., None] + aside * step_x[..., None], mass)

    def _collect(self, x: Floats, y: Floats, mass: Floats) -> None:
        col, row = self.frame.project(x, y)
        last = self._wide - 1
        # What falls beside the film lands in the outermost cells, which no pixel takes a share of.
        left = np.clip(2 * col + np.float32(3), 0, last).astype(np.int32)
        top = np.clip(2 * row + np.float32(3), 0, last).astype(np.int32)
        self._cells.append((top.ravel(), left.ravel()))
        self._mass.append(mass.ravel())

    def image(self) -> Array:
        """The sum of all tubes added, (S, S)."""
        size = self.frame.size
        image = np.zeros((size, size), dtype=np.float32)
        if not self._cells:
            return image
        top = np.concatenate([cells[0] for cells in self._cells])
        left = np.concatenate([cells[1] for cells in self._cells])
        # only the pixels between the outermost samples: a letter should not cost as much as the ribs
        (row, rows), (col, cols) = _touched(top, size), _touched(left, size)
        wide = 2 * cols + 4
        cells = (np.clip(top - 2 * row, 0, 2 * rows + 3) * wide) + np.clip(left - 2 * col, 0, wide - 1)
        total = np.bincount(cells, weights=np.concatenate(self._mass), minlength=(2 * rows + 4) * wide)
        halves = total.astype(np.float32).reshape(2 * rows + 4, wide)
        image[row : row + rows, col : col + cols] = _share(_share(halves, 0), 1)
        return image


def _touched(half_pixels: NDArray[np.int32], size: int) -> tuple[int, int]:
    """First pixel that samples reach, and how many from there on."""
    first = max(0, (int(half_pixels.min()) - 4) // 2)
    last = min(size - 1, int(half_pixels.max()) // 2)
    return min(first, size - 1), max(1, last - first + 1)


def tubes(frame: Frame, points_KN3: Floats, radius_KN: Floats, *, strength_KN: Floats | float = 1.0) -> Array:
    """Path length through solid tubes as an (S, S) image."""
    shadow = Shadow(frame)
    shadow.add(points_KN3, radius_KN, strength_KN=strength_KN)
    return shadow.image()


def _share(halves: Array, axis: int) -> Array:
    """Linear weights from half pixels to pixels along ``axis``: 2S + 4 become S."""
    count = halves.shape[axis] // 2 - 2

    def every_second(start: int) -> Array:
        part = slice(start, start + 2 * count, 2)
        return halves[part] if axis == 0 else halves[:, part]

    inner, outer = every_second(2) + every_second(3), every_second(1) + every_second(4)
    return np.float32(0.75) * inner + np.float32(0.25) * outer


def _steps(along_KN: Floats) -> Floats:
    """Central differences along the last axis; numpy.gradient costs three times as much here."""
    steps = np.empty_like(along_KN)
    steps[:, 1:-1] = (along_KN[:, 2:] - along_KN[:, :-2]) * np.float32(0.5)
    steps[:, 0], steps[:, -1] = along_KN[:, 1] - along_KN[:, 0], along_KN[:, -1] - along_KN[:, -2]
    return steps


def _resample(step: float, points: Floats, radius: Floats, strength: Floats | float) -> tuple[Floats, Floats, Floats]:
    """Interpolate polylines so finely that neighbouring samples lie at most ``step`` cm apart."""
    kinks = points.shape[1]
    longest = float(np.linalg.norm(np.diff(points, axis=1), axis=2).sum(axis=1).max())
    count = max(kinks, int(np.ceil(longest / step)) + 1)
    place = np.linspace(0, kinks - 1, count)
    left = np.minimum(place.astype(np.int64), kinks - 2)
    share = (place - left).astype(np.float32)

    def along(values: Floats) -> Floats:
        weight = share.reshape(-1, *[1] * (values.ndim - 2))
        start, stop = values[:, left], values[:, left + 1]
        result: Floats = start + (stop - start) * weight
        return result

    full = np.broadcast_to(np.asarray(strength, dtype=np.float32), radius.shape)
    return along(points.astype(np.float32)), along(radius.astype(np.float32)), along(full)

"""Tubes in space and the shadow they cast: vessels, airways, collar bones, wires."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afire.data.phantom.physics import Array, Floats, Frame

_GOLDEN = 0.6180339887
Point = tuple[float, float, float]


def bow(first: Point, middle: Point, last: Point) -> Floats:
    """24 points on the parabola through three, (24, 3)."""
    t = np.linspace(0, 1, 24)[:, None]
    result: Floats = (
        np.asarray(first) * (1 - t) * (1 - 2 * t)
        + np.asarray(middle) * 4 * t * (1 - t)
        + np.asarray(last) * t * (2 * t - 1)
    )
    return result


class Shadow:
    """Path length (cm) through tubes along polylines, summed pixel by pixel.

    Matter is spread onto the pixels it falls on, so a tube seen end-on is as dense as it should be. The samples of all
    tubes are collected and spread at once, at the end.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._rows: list[Floats] = []
        self._columns: list[Floats] = []
        self._mass: list[Floats] = []

    def add(
        self, points_KN3: Floats, radius_KN: Floats, *, wall: float = 1.0, strength_KN: Floats | float = 1.0
    ) -> None:
        """Add K tubes of N points each. ``wall`` is the solid share of the radius: 1 is a rod, 0.3 a hollow bone."""
        frame = self.frame
        points, radius, strength = _resample(frame.pixel, points_KN3, radius_KN, strength_KN)
        x = points[..., 0] + points[..., 2] * np.float32(np.sin(frame.yaw))
        y = points[..., 1]
        step_x, step_y, step_z = _steps(x), _steps(y), _steps(points[..., 2])
        flat = np.hypot(step_x, step_y) + np.float32(1e-6)
        # a sample fills two pixels, so a thin solid tube needs fewer lanes than a thick or a hollow one
        wide = float(radius.max()) / frame.pixel
        lanes = max(1, int(np.ceil((1.4 if wall == 1 and wide < 3 else 2) * wide)))
        # Lanes swing by a low-discrepancy sequence, else their lattice beats against the pixels' as stripes.
        swing = 0.9 * (np.mod(np.arange(x.shape[1])[:, None] * _GOLDEN, 1) - 0.5)
        across = ((np.arange(lanes) + 0.5 + swing) / lanes * 2 - 1).astype(np.float32)  # (N, J) in radii
        chord = np.sqrt(np.clip(1 - across**2, 0, None))
        if wall < 1:
            chord -= np.float32(0.75) * np.sqrt(np.clip(np.float32((1 - wall) ** 2) - across**2, 0, None))
        length = np.sqrt(flat * flat + step_z * step_z)
        pixel_area = frame.extent[0] * frame.extent[1] / frame.size**2
        mass = (radius * radius * strength * length * np.float32(4 / lanes / pixel_area))[..., None] * chord
        # The projection is affine: project the centre line and one side of the tube, interpolate between lanes.
        column, row = frame.project(x, y)
        side_column, side_row = frame.project(x - radius * step_y / flat, y + radius * step_x / flat)
        self._columns.append((column[..., None] + (side_column - column)[..., None] * across).ravel())
        self._rows.append((row[..., None] + (side_row - row)[..., None] * across).ravel())
        self._mass.append(mass.ravel())

    @property
    def empty(self) -> bool:
        """Whether nothing was added."""
        return not self._mass

    def line(self, path_N2: Floats, radius: float, strength: float, *, wall: float = 1.0) -> None:
        """Add one tube in the film's plane."""
        count = len(path_N2)
        points = np.column_stack([path_N2, np.zeros(count)])[None]
        self.add(points, np.full((1, count), radius), wall=wall, strength_KN=strength)

    def dot(self, centre: tuple[float, float], radius: float, strength: float) -> None:
        """Add a small ball, as a tube about as long as it is thick."""
        x, y = centre
        self.line(np.array([(x, y - 0.66 * radius), (x, y + 0.66 * radius)]), radius, strength)

    def plate(self, centre: tuple[float, float], half: tuple[float, float], turn: float, strength: float) -> None:
        """Add a plate with rounded corners, a centimetre thick; ``strength`` is what its middle adds."""
        counts = [int(np.ceil(2 * side / (0.6 * self.frame.pixel))) for side in half]
        steps = [((np.arange(count) + 0.5) / count * 2 - 1) * side for count, side in zip(counts, half, strict=True)]
        u, v = (part.ravel() for part in np.meshgrid(*steps))
        inside = (np.abs(u) / half[0]) ** 4 + (np.abs(v) / half[1]) ** 4 < 1
        u, v = u[inside], v[inside]
        x, y = centre[0] + u * np.cos(turn) - v * np.sin(turn), centre[1] + u * np.sin(turn) + v * np.cos(turn)
        column, row = self.frame.project(x, y)
        self._columns.append(column.astype(np.float32))
        self._rows.append(row.astype(np.float32))
        pixel_area = self.frame.extent[0] * self.frame.extent[1] / self.frame.size**2
        cell_area = 4 * half[0] * half[1] / (counts[0] * counts[1])
        self._mass.append(np.full(column.shape, strength * cell_area / pixel_area, dtype=np.float32))

    def balls(self, x: Floats, y: Floats, radius: Floats, strength: float) -> None:
        """Add small balls, each as one sample: for those that are hardly larger than a pixel."""
        column, row = self.frame.project(x, y)
        self._columns.append(column)
        self._rows.append(row)
        pixel_area = self.frame.extent[0] * self.frame.extent[1] / self.frame.size**2
        self._mass.append(radius**3 * np.float32(4 / 3 * np.pi * strength / pixel_area))

    def image(self) -> Array:
        """The sum of all tubes added, (S, S)."""
        size = self.frame.size
        if not self._mass:
            return np.zeros((size, size), dtype=np.float32)
        # A margin takes what falls beside the film: one pixel before, two behind, cut off at the end.
        margin = np.zeros((size + 3, size + 3), dtype=np.float32)
        rows = np.clip(np.concatenate(self._rows) + np.float32(1), 0, size + 1)
        columns = np.clip(np.concatenate(self._columns) + np.float32(1), 0, size + 1)
        # Only the part between the outermost samples: a letter should not cost as much as the ribs.
        top, left = int(rows.min()), int(columns.min())
        part = _spread(rows - np.float32(top), columns - np.float32(left), np.concatenate(self._mass))
        margin[top : top + part.shape[0], left : left + part.shape[1]] = part
        return margin[1:-2, 1:-2]


def tubes(frame: Frame, points_KN3: Floats, radius_KN: Floats) -> Array:
    """Path length through solid tubes as an (S, S) image."""
    shadow = Shadow(frame)
    shadow.add(points_KN3, radius_KN)
    return shadow.image()


def _spread(rows: Floats, columns: Floats, mass: Floats) -> NDArray[np.float64]:
    """Add each mass to its four nearest pixels, in proportion to nearness; just large enough to hold them all."""
    top, left = rows.astype(np.int32), columns.astype(np.int32)
    high, wide = int(top.max()) + 2, int(left.max()) + 2
    cells = (top * np.int32(wide) + left).astype(np.intp)  # numpy.bincount would convert at every call
    right_mass = mass * (columns - left).astype(np.float64)
    low = (rows - top).astype(np.float64)
    total = np.zeros(high * wide)
    for shift, part in ((0, mass - right_mass), (1, right_mass)):
        low_part = part * low
        for further, weights in ((shift, part - low_part), (shift + wide, low_part)):
            sums = np.bincount(cells, weights=weights)
            total[further : further + sums.size] += sums
    return total.reshape(high, wide)


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

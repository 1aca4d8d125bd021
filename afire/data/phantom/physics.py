"""The film in centimetres, the curves and tubes that anatomy is made of, and random fields.

Body coordinates are centimetres of an adult with the origin in the midline at the carina: x to the image's right (the
patient's left), y down, z towards the breastbone. All anatomy is drawn in these, so a film looks alike at every size.
Children are drawn at an adult's scale with a child's proportions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Array = NDArray[np.float32]
Floats = NDArray[np.floating[Any]]
_PURPOSES = (
    "roster",
    "patient",
    "vessels",
    "findings",
    "disease",
    "pose",
    "frame",
    "style",
    "texture",
    "objects",
    "pixels",
)
WATER = 0.19  # attenuation per cm of soft tissue at chest energies
BONE = 0.42  # what a cm of bone adds
LUNG = 0.25  # density of lung against water
METAL = 4.0  # what a cm of steel or lead adds
_GOLDEN = 0.6180339887
Point = tuple[float, float, float]


def stream(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """An independent generator for each purpose, so that drawing one part never shifts the numbers of another."""
    return np.random.default_rng([seed, _PURPOSES.index(purpose), *numbers])


class Curve:
    """A smooth curve through a few points, read from a fine table: far cheaper per pixel than a spline."""

    _CELLS = 1024

    def __init__(self, at: Floats | list[float], values: Floats | list[float]) -> None:
        self.start, stop = float(at[0]), float(at[-1])
        self.per_cell = self._CELLS / (stop - self.start)
        self.table: Array = _monotone_cubic(np.asarray(at, dtype=np.float64), np.asarray(values), self._CELLS + 1)

    def __call__(self, at: Any) -> Any:
        """Values at ``at`` (any shape); constant beyond the ends."""
        cell = (np.asarray(at, dtype=np.float32) - self.start) * self.per_cell
        return self.table.take(np.clip(cell, 0, self._CELLS).astype(np.int32))


def _monotone_cubic(at: Floats, values: Floats, count: int) -> Array:
    """``count`` even samples of the monotone cubic through the points (scipy's PCHIP without its set-up time)."""
    width, rise = np.diff(at), np.diff(values)
    slope = rise / width
    before, after = slope[:-1], slope[1:]
    heavy, light = 2 * width[1:] + width[:-1], width[1:] + 2 * width[:-1]
    turning = before * after <= 0
    safe_before, safe_after = np.where(turning, 1, before), np.where(turning, 1, after)
    inner = np.where(turning, 0, (heavy + light) / (heavy / safe_before + light / safe_after))
    steep = np.concatenate([[slope[0]], inner, [slope[-1]]])
    grid = np.linspace(at[0], at[-1], count)
    piece = np.clip(np.searchsorted(at, grid, side="right") - 1, 0, len(at) - 2)
    h, t = width[piece], (grid - at[piece]) / width[piece]
    bend = steep[piece] + steep[piece + 1] - 2 * slope[piece]
    lean = 3 * slope[piece] - 2 * steep[piece] - steep[piece + 1]
    curve: Array = (values[piece] + h * t * (steep[piece] + t * (lean + t * bend))).astype(np.float32)
    return curve


def _closed_curve(angle: Floats, radius: Floats, at: Floats) -> Array:
    """Radius at the angles ``at`` of a smooth outline through the points, which are sorted by angle."""
    turn = 2 * np.pi
    angle = np.concatenate([angle[-2:] - turn, angle, angle[:2] + turn])
    radius = np.concatenate([radius[-2:], radius, radius[:2]])
    steep = (radius[2:] - radius[:-2]) / (angle[2:] - angle[:-2])
    piece = np.searchsorted(angle, at, side="right") - 1
    width = (angle[1:] - angle[:-1])[piece]
    t = (at - angle[piece]) / width
    start, stop = radius[piece], radius[piece + 1]
    first, last = steep[piece - 1] * width, steep[piece] * width
    bend, lean = 2 * (start - stop) + first + last, 3 * (stop - start) - 2 * first - last
    curve: Array = (start + t * (first + t * (lean + t * bend))).astype(np.float32)
    return curve


class Contour:
    """A closed outline around a centre, given by a few points: ``reach`` is 1 on it, below 1 inside."""

    _CELLS = 2048

    def __init__(self, centre: tuple[float, float], points: Floats) -> None:
        """``points`` has shape (N, 2) and goes around the centre once."""
        self.centre = centre
        offset = points - np.asarray(centre)
        angle = np.arctan2(offset[:, 1], offset[:, 0])
        order = np.argsort(angle)
        angle, radius = angle[order], np.hypot(offset[:, 0], offset[:, 1])[order]
        self.table: Array = _closed_curve(angle, radius, np.linspace(-np.pi, np.pi, self._CELLS + 1))

    def reach(self, x: Any, y: Any) -> Any:
        """Distance from the centre as a fraction of the outline's, at (x, y) of any shape."""
        dx, dy = x - np.float32(self.centre[0]), y - np.float32(self.centre[1])
        cell = (np.arctan2(dy, dx) + np.float32(np.pi)) * np.float32(self._CELLS / (2 * np.pi))
        away = np.sqrt(dx * dx + dy * dy)  # numpy.hypot costs ten times as much
        return away / self.table.take(np.clip(cell, 0, self._CELLS).astype(np.int32))


@dataclass(frozen=True)
class Frame:
    """A square film of ``size`` pixels: its centre and extent in the body's plane, in centimetres."""

    size: int
    centre: tuple[float, float]
    extent: tuple[float, float]  # width, height
    roll: float  # turn in the film's plane, radians
    yaw: float  # turn about the body's long axis, radians

    @property
    def pixel(self) -> float:
        """Mean side of a pixel in centimetres."""
        return float(np.sqrt(self.extent[0] * self.extent[1])) / self.size

    @cached_property
    def grid(self) -> tuple[Array, Array]:
        """x and y of all pixel centres, both (S, S)."""
        steps = ((np.arange(self.size, dtype=np.float32) + 0.5) / self.size - 0.5).astype(np.float32)
        return self.at(*np.meshgrid(steps, steps))

    def at(self, u: Any, v: Any) -> tuple[Any, Any]:
        """Body coordinates of film fractions u, v in [-0.5, 0.5]."""
        across, down = u * np.float32(self.extent[0]), v * np.float32(self.extent[1])
        cos, sin = np.float32(np.cos(self.roll)), np.float32(np.sin(self.roll))
        return self.centre[0] + across * cos - down * sin, self.centre[1] + across * sin + down * cos

    def project(self, x: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Column and row (pixel centres at whole numbers) of points in the body's plane."""
        cos, sin = float(np.cos(self.roll)), float(np.sin(self.roll))
        dx, dy = x - self.centre[0], y - self.centre[1]
        across, down = dx * cos + dy * sin, dy * cos - dx * sin
        return (
            (across / self.extent[0] + 0.5) * self.size - 0.5,
            (down / self.extent[1] + 0.5) * self.size - 0.5,
        )

    def columns(self, left: float, right: float) -> tuple[slice, slice]:
        """The part of the film whose columns can hold x from ``left`` to ``right``."""
        lean = abs(float(np.sin(self.roll))) * self.extent[1] / 2
        start, stop = ((x - self.centre[0]) / self.extent[0] + 0.5 for x in (left - lean, right + lean))
        return np.s_[:, max(0, int(start * self.size)) : max(0, int(stop * self.size) + 2)]

    def turned(self, z: float) -> float:
        """How far a structure at depth ``z`` moves sideways because the patient stands turned."""
        return z * float(np.sin(self.yaw))


def smoothstep(value: Any) -> Any:
    """0 below 0, 1 above 1, smooth between."""
    clipped = np.clip(value, 0, 1)
    return clipped * clipped * (3 - 2 * clipped)


def dome(squared: Any) -> Any:
    """sqrt(1 - squared), 0 outside: the profile of the path length through a round body."""
    return np.sqrt(np.clip(1 - squared, 0, 1))  # with both ends numpy.clip is twice as fast as with one


def _taps(cells: int, size: int, start: float, step: float) -> tuple[NDArray[np.intp], Array]:
    """Cells and weights, both (4, S), of a cubic B-spline read at ``start + step * pixel``, constant at the ends."""
    place = start + step * np.arange(size)
    first = np.floor(place)
    t = place - first
    weights = np.stack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]) / 6
    cell = np.clip(first[None] + np.arange(-1, 3)[:, None], 0, cells - 1).astype(np.intp)
    return cell, weights.astype(np.float32)


def _spread_out(coarse: Array, size: int, start: tuple[float, float], step: tuple[float, float]) -> Array:
    """``coarse`` (h, w) read smoothly at (S, S) places; columns first, where it is still small."""
    cell, weight = _taps(coarse.shape[1], size, start[1], step[1])
    wide = sum(coarse[:, cell[t]] * weight[t] for t in range(4))
    cell, weight = _taps(coarse.shape[0], size, start[0], step[0])
    result: Array = wide[cell[0]] * weight[0][:, None]  # type: ignore[index]
    for t in range(1, 4):
        result += wide[cell[t]] * weight[t][:, None]  # type: ignore[index]
    return result


def mottle(rng: np.random.Generator, frame: Frame, grain: float) -> Array:
    """Smooth random field (S, S) of mean 0 and deviation about 1 that changes over ``grain`` centimetres."""
    step = (frame.extent[1] / grain / frame.size, frame.extent[0] / grain / frame.size)
    shape = (int(frame.extent[1] / grain) + 4, int(frame.extent[0] / grain) + 4)
    coarse = rng.standard_normal(shape, dtype=np.float32)
    return _spread_out(coarse, frame.size, (1 + step[0] / 2, 1 + step[1] / 2), step) * np.float32(2.1)


def blurred(image: Array, deviation: float, frame: Frame) -> Array:
    """Gaussian blur by ``deviation`` cm, on a grid just fine enough to carry the result."""
    across, down = (deviation / extent * frame.size for extent in frame.extent)  # in pixels
    factor = max(1, int(min(across, down) / 2.5))
    if factor == 1:
        result: Array = gaussian_filter(image, (down, across), mode="nearest", truncate=3)
        return result
    cells = frame.size // factor
    square = image[: cells * factor, : cells * factor]
    coarse = square.reshape(cells, factor, cells * factor).mean(axis=1).reshape(cells, cells, factor).mean(axis=2)
    # the B-spline and the averaging blur too: a third of a cell and a twelfth of one, in squares
    sigma = [np.sqrt(max(0.1, (side / factor) ** 2 - 1 / 3)) for side in (down, across)]
    smooth = gaussian_filter(coarse, sigma, mode="nearest", truncate=3)
    start = 0.5 / factor - 0.5
    return _spread_out(smooth, frame.size, (start, start), (1 / factor, 1 / factor))


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
        u, v = (grid.ravel() for grid in np.meshgrid(*steps))
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
        patch = _spread(rows - np.float32(top), columns - np.float32(left), np.concatenate(self._mass))
        margin[top : top + patch.shape[0], left : left + patch.shape[1]] = patch
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
    for shift, share in ((0, mass - right_mass), (1, right_mass)):
        low_part = share * low
        for further, weights in ((shift, share - low_part), (shift + wide, low_part)):
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

"""The film in centimetres: where each pixel looks through the body, and the curves anatomy is made of.

Body coordinates are centimetres with the origin in the midline at the carina: x to the image's right (the patient's
left), y down, z towards the breastbone. All anatomy is drawn in these, so a film looks alike at every size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline

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
    "exposure",
    "texture",
    "objects",
    "pixels",
)


def stream(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """An independent generator for each purpose, so that drawing one part never shifts the numbers of another."""
    return np.random.default_rng([seed, _PURPOSES.index(purpose), *numbers])


class Curve:
    """A smooth curve through a few points, read from a fine table: far cheaper per pixel than a spline."""

    _CELLS = 2048

    def __init__(self, at: Floats | list[float], values: Floats | list[float]) -> None:
        self.start, stop = float(at[0]), float(at[-1])
        self.per_cell = self._CELLS / (stop - self.start)
        self.table: Array = _monotone_cubic(np.asarray(at, dtype=np.float64), np.asarray(values), self._CELLS + 1)

    def __call__(self, at: Any) -> Any:
        """Values at ``at`` (any shape); constant beyond the ends."""
        cell = (np.asarray(at, dtype=np.float32) - self.start) * self.per_cell
        return self.table[np.clip(cell, 0, self._CELLS).astype(np.int32)]


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


class Contour:
    """A closed outline around a centre, given by a few points: ``reach`` is 1 on it, below 1 inside."""

    _CELLS = 4096

    def __init__(self, centre: tuple[float, float], points: Floats) -> None:
        """``points`` has shape (N, 2) and goes around the centre once."""
        self.centre = centre
        offset = points - np.asarray(centre)
        angle = np.arctan2(offset[:, 1], offset[:, 0])
        order = np.argsort(angle)
        angle, radius = angle[order], np.hypot(offset[:, 0], offset[:, 1])[order]
        spline = CubicSpline(np.append(angle, angle[0] + 2 * np.pi), np.append(radius, radius[0]), bc_type="periodic")
        self.table: Array = spline(np.linspace(-np.pi, np.pi, self._CELLS + 1)).astype(np.float32)

    def reach(self, x: Any, y: Any) -> Any:
        """Distance from the centre as a fraction of the outline's, at (x, y) of any shape."""
        dx, dy = x - np.float32(self.centre[0]), y - np.float32(self.centre[1])
        cell = (np.arctan2(dy, dx) + np.float32(np.pi)) * np.float32(self._CELLS / (2 * np.pi))
        return np.hypot(dx, dy) / self.table[np.clip(cell, 0, self._CELLS).astype(np.int32)]


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

    def turned(self, z: float) -> float:
        """How far a structure at depth ``z`` moves sideways because the patient stands turned."""
        return z * float(np.sin(self.yaw))


def smoothstep(value: Any) -> Any:
    """0 below 0, 1 above 1, smooth between."""
    clipped = np.clip(value, 0, 1)
    return clipped * clipped * (3 - 2 * clipped)


def dome(squared: Any) -> Any:
    """sqrt(1 - squared), 0 outside: the profile of the path length through a round body."""
    return np.sqrt(np.clip(1 - squared, 0, None))

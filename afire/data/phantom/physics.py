"""The film in centimetres, the curves anatomy is made of, and from path lengths to a grey image.

Body coordinates are centimetres with the origin in the midline at the carina: x to the image's right (the patient's
left), y down, z towards the breastbone. All anatomy is drawn in these, so a film looks alike at every size. Exposure is
attenuation, scatter, noise and the film curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.interpolate import CubicSpline
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
    "exposure",
    "texture",
    "objects",
    "pixels",
)
WATER = 0.19  # attenuation per cm of soft tissue at chest energies
BONE = 0.42  # what a cm of bone adds
LUNG = 0.25  # density of lung against water


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


@dataclass(frozen=True)
class Exposure:
    """How the film was taken and developed."""

    scatter: float  # scattered light against primary light
    noise: float
    black: float  # shift of the dark end of the grey scale
    white: float
    steepness: float
    gamma: float
    edge: float  # strength of the digital edge enhancement
    background: float  # grey level of unexposed tissue-free film
    texture: float  # mottle of the lung


def draw_exposure(rng: np.random.Generator) -> Exposure:
    """Exposure and processing of one film."""
    return Exposure(
        scatter=float(rng.uniform(0.15, 0.5)),
        noise=float(rng.uniform(0.004, 0.016)),
        black=float(np.clip(rng.normal(0, 0.12), -0.3, 0.3)),
        white=float(np.clip(rng.normal(0, 0.2), -0.45, 0.6)),
        steepness=float(rng.uniform(1.2, 3.0)),
        gamma=float(np.exp(rng.normal(0.05, 0.2))),
        edge=float(rng.uniform(0.0, 1.3)),
        background=float(rng.choice([0.0, 0.0, rng.uniform(0.02, 0.16)])),
        texture=float(rng.uniform(0.6, 1.4)),
    )


def resized(image: Array, size: tuple[int, int], method: Image.Resampling = Image.Resampling.BICUBIC) -> Array:
    """``image`` at another (height, width); averages when it shrinks."""
    picture = Image.fromarray(np.ascontiguousarray(image, dtype=np.float32))
    return np.asarray(picture.resize((size[1], size[0]), method), dtype=np.float32)


def mottle(rng: np.random.Generator, frame: Frame, grain: float) -> Array:
    """Smooth random field (S, S) of mean 0 and deviation about 1 that changes over ``grain`` centimetres."""
    shape = tuple(int(np.ceil(extent / grain)) + 3 for extent in (frame.extent[1], frame.extent[0]))
    return resized(rng.standard_normal(shape, dtype=np.float32), (frame.size, frame.size)) * np.float32(1.35)


def expose(
    attenuation: Array,
    body: Array,
    window: tuple[float, float],
    exposure: Exposure,
    frame: Frame,
    rng: np.random.Generator,
) -> Array:
    """The film, (S, S) in [0, 1], bright where much was absorbed.

    ``window`` is the attenuation of well-aerated lung and of the mediastinum: the ends of the useful grey scale. It is
    given by the anatomy and not measured on the film, so a disease changes the film only where it is.
    """
    primary = np.exp(-attenuation)
    scatter = exposure.scatter * _scattered(primary, body, frame)
    light = primary + scatter
    count = np.sqrt(np.clip(light, 1e-4, None)) / np.float32(exposure.noise * 0.22 * frame.size / 224)
    light = np.clip(light * (1 + rng.standard_normal(light.shape, dtype=np.float32) / count), 1e-4, None)
    density = -np.log(gaussian_filter(light, 0.4))
    if exposure.edge:
        smooth = _blurred(density, 1.1, frame)
        density += np.float32(exposure.edge) * np.clip(density - smooth, -0.25, 0.25)
    veil = exposure.scatter * float(np.mean(np.exp(-np.asarray(window))))
    low, high = (float(-np.log(np.exp(-level) + veil)) for level in window)
    black, white = low * (0.22 + exposure.black), high + (exposure.white + 0.6) * (high - low)
    return _develop((density - np.float32(black)) / np.float32(white - black), exposure)


def _scattered(primary: Array, body: Array, frame: Frame) -> Array:
    """Scattered light: what the body sends sideways, spread over centimetres."""
    sent = primary * (1 - np.exp(body * np.float32(-0.25)))
    return _blurred(sent, 4.5, frame) * smoothstep(body / 6)  # type: ignore[no-any-return]


def _blurred(image: Array, deviation: float, frame: Frame) -> Array:
    """Gaussian blur by ``deviation`` cm, on a grid just fine enough to carry the result."""
    cells = min(frame.size, max(32, int(2 * frame.extent[1] / deviation)))
    coarse = resized(image, (cells, cells), Image.Resampling.BOX)
    sigma = (deviation * cells / frame.extent[1], deviation * cells / frame.extent[0])
    return resized(gaussian_filter(coarse, sigma, mode="nearest", truncate=3), image.shape)


def _develop(level: Array, exposure: Exposure) -> Array:
    """An S-shaped film curve through 0 and 1, read from a table."""
    cells, low, high = 4096, -0.2, 1.25
    half = exposure.steepness / 2
    curve = np.tanh(half * (2 * np.linspace(low, high, cells + 1) - 1)) / np.tanh(half)
    bright = np.clip(0.5 + 0.5 * curve, 0, 1) ** exposure.gamma
    table: Array = (exposure.background + (0.985 - exposure.background) * bright).astype(np.float32)
    cell = (level - np.float32(low)) * np.float32(cells / (high - low))
    film: Array = table[np.clip(cell, 0, cells).astype(np.int32)]
    return film

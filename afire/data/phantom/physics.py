"""From path lengths to a grey image: attenuation, scatter, noise and the film curve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter

from afire.data.phantom.frame import Array, Frame, smoothstep

WATER = 0.19  # attenuation per cm of soft tissue at chest energies
BONE = 0.42  # what a cm of bone adds
LUNG = 0.25  # density of lung against water


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

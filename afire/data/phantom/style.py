"""How a film was taken and developed: scatter, noise, processing and grey curve. Changes grey values, no geometry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.ndimage import gaussian_filter

from afire.data.phantom.physics import Array, Frame, blurred, smoothstep

Scanner = Literal["any", "digital", "scanned"]
_CELLS, _LOW, _HIGH = 4096, -0.2, 1.25  # of the table that holds the grey curve


@dataclass(frozen=True)
class Style:
    """The grey side of a film: what a scanner and its software make of the same rays."""

    scatter: float = 0.25  # scattered light against primary light
    noise: float = 0.0  # deviation of a pixel's light at full exposure
    grain: float = 0.0  # share of the noise that is coarser than a pixel
    black: float = 0.0  # shift of the dark end of the grey scale
    white: float = 0.0
    steepness: float = 2.0  # of the S-shaped grey curve
    gamma: float = 1.0
    edge: float = 0.0  # strength of the fine edge enhancement
    edge_radius: float = 0.6  # cm
    latitude: float = 0.0  # how much of the large-scale contrast the processing takes away
    latitude_radius: float = 3.0  # cm
    blur: float = 0.0  # cm
    shrunk: float = 1.0  # resolution that the film once had, against what it has now
    background: float = 0.0  # grey level of unexposed tissue-free film


PLAIN = Style(scatter=0.0)
"""Neither scatter, noise nor processing: a pixel's grey follows from its own ray alone."""


def draw_style(rng: np.random.Generator, scanner: Scanner = "any") -> Style:
    """Exposure and processing of one film, of the digital or the scanned ones if these are asked for."""
    digital = rng.random() < 0.75  # else a scanned film: softer, grainier, not processed
    if scanner != "any":
        digital = scanner == "digital"
    return Style(
        scatter=float(rng.uniform(0.2, 1.0)),
        noise=float(np.exp(rng.uniform(np.log(0.002), np.log(0.008)))),
        grain=float(rng.uniform(0.0, 1.0)),
        black=float(np.clip(rng.normal(0, 0.11), -0.3, 0.3)),
        white=float(np.clip(rng.normal(0, 0.17), -0.45, 0.5)),
        steepness=float(rng.uniform(0.8, 3.0)),
        gamma=float(np.exp(rng.normal(0.0, 0.2))),
        edge=float(rng.uniform(0.0, 1.0)) if digital else 0.0,
        edge_radius=float(rng.uniform(0.3, 1.2)),
        latitude=float(rng.beta(1.2, 2.0) * 0.75) if digital else 0.0,
        latitude_radius=float(rng.uniform(2.0, 5.0)),
        blur=float(rng.gamma(1.5, 0.025) if digital else rng.uniform(0.02, 0.1)),
        shrunk=float(rng.uniform(0.45, 0.9)) if rng.random() < 0.2 else 1.0,
        background=float(rng.uniform(0.02, 0.18)) if rng.random() < 0.3 else 0.0,
    )


def expose(
    attenuation: Array,
    body: Array,
    window: tuple[float, float],
    style: Style,
    frame: Frame,
    rng: np.random.Generator,
) -> Array:
    """The film, (S, S) in [0, 1], bright where much was absorbed.

    ``window`` is the attenuation of well-aerated lung and of the mediastinum: the ends of the useful grey scale. It is
    given by the anatomy and not measured on the film, so a disease changes the film only where it is.
    """
    light = np.exp(-attenuation)
    if style.scatter:
        light += np.float32(style.scatter) * _scattered(light, body, frame)
    light = _sharpness(light, style, frame)
    if style.noise:
        light = light * (1 + _noise(light, style, frame, rng))
    density = -np.log(np.clip(light, 1e-4, 9))
    density = _processed(density, window, style, frame)
    veil = style.scatter * float(np.mean(np.exp(-np.asarray(window))))
    low, high = (float(-np.log(np.exp(-level) + veil)) for level in window)
    black = low - (0.9 - 1.2 * style.black) * (high - low)
    white = high + (0.8 + 0.6 * style.white) * (high - low)
    return _develop((density - np.float32(black)) * np.float32(1 / (white - black)), style)


def _scattered(primary: Array, body: Array, frame: Frame) -> Array:
    """Scattered light: what the body sends sideways, spread over centimetres."""
    sent = primary * (1 - np.exp(body * np.float32(-0.25)))
    return blurred(sent, 4.5, frame) * smoothstep(body * np.float32(1 / 6))  # type: ignore[no-any-return]


def _sharpness(light: Array, style: Style, frame: Frame) -> Array:
    """What focus, screen and an earlier resolution took away."""
    lost = 0.4 * np.sqrt(1 / style.shrunk**2 - 1)  # pixels: a film that was shrunk and enlarged again
    sigma = float(np.hypot(style.blur / frame.pixel, lost))
    return light if sigma < 0.2 else gaussian_filter(light, sigma, mode="nearest", truncate=2.5)


def _noise(light: Array, style: Style, frame: Frame, rng: np.random.Generator) -> Array:
    """Relative noise of the light: few rays, much noise. A pixel of a small film gathers the rays of many."""
    noise = _bell(rng, light.shape)
    if style.grain > 0.2:  # a box of four pixels costs a tenth of a Gaussian
        coarse = noise[:-1] + noise[1:]
        noise[:-1, :-1] += np.float32(style.grain) * (coarse[:, :-1] + coarse[:, 1:] - noise[:-1, :-1])
    scale = style.noise * 0.22 * frame.size / 224
    weak: Array = np.sqrt(np.clip(light, 1e-3, 9))
    return noise * (np.float32(scale) / weak)


def _bell(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Noise of mean 0 and deviation 1: the sum of three random bytes, a quarter of the time of a normal draw."""
    count = int(np.prod(shape))
    first, second, third = np.frombuffer(rng.bytes(3 * count), dtype=np.uint8).reshape(3, *shape)
    total: Array = first.astype(np.float32)
    total += second
    total += third
    total -= np.float32(382.5)
    total *= np.float32(1 / 128)
    return total


def _processed(density: Array, window: tuple[float, float], style: Style, frame: Frame) -> Array:
    """Fine edges made stronger, large differences made smaller."""
    if style.latitude > 0.02:
        large = blurred(np.clip(density, 0.5 * window[0], window[1]), style.latitude_radius, frame)
        density = density - np.float32(style.latitude) * (large - np.float32(0.5 * sum(window)))
    if style.edge > 0.02:
        smooth = blurred(density, style.edge_radius, frame)
        density = density + np.float32(style.edge) * np.clip(density - smooth, -0.25, 0.25)
    return density


def _develop(level: Array, style: Style) -> Array:
    """An S-shaped grey curve through 0 and 1, read from a table."""
    half = style.steepness / 2
    curve = np.tanh(half * (2 * np.linspace(_LOW, _HIGH, _CELLS + 1) - 1)) / np.tanh(half)
    bright = np.clip(0.5 + 0.5 * curve, 0, 1) ** style.gamma
    table: Array = (style.background + (0.985 - style.background) * bright).astype(np.float32)
    cell = (level - np.float32(_LOW)) * np.float32(_CELLS / (_HIGH - _LOW))
    film: Array = table.take(np.clip(cell, 0, _CELLS).astype(np.int32))
    return film

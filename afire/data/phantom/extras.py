"""What a film shows besides the chest: gas in the stomach, leads on the skin, the side marker, the shutters' edge."""

from __future__ import annotations

import numpy as np

from afire.data.phantom.anatomy import Thorax
from afire.data.phantom.frame import Array, Frame, dome, smoothstep
from afire.data.phantom.tubes import Shadow

_STROKES = {
    "L": [[(0, 0), (0, 1)], [(0, 1), (0.55, 1)]],
    "R": [[(0, 0), (0, 1)], [(0, 0), (0.4, 0.02), (0.55, 0.25), (0.4, 0.48), (0, 0.5)], [(0.25, 0.5), (0.6, 1)]],
}


def stomach_gas(rng: np.random.Generator, frame: Frame, thorax: Thorax) -> Array:
    """Path length through gas below the left diaphragm, often with a level, and through a few bowel loops."""
    x, y = frame.grid
    p = thorax.patient
    under = smoothstep((y - thorax.diaphragm(x)) / 0.6 - 0.6)
    gas = np.zeros_like(x)
    if rng.random() < 0.75:
        centre = (p.width * rng.uniform(0.3, 0.6), thorax.domes[1] + rng.uniform(1.2, 3.2))
        half = (rng.uniform(1.4, 3.6), rng.uniform(0.9, 2.0))
        bubble = dome(((x - np.float32(centre[0])) / half[0]) ** 2 + ((y - np.float32(centre[1])) / half[1]) ** 2)
        if rng.random() < 0.5:
            bubble = bubble * smoothstep((np.float32(centre[1] + 0.4 * half[1]) - y) / 0.25)
        gas += np.float32(rng.uniform(1.0, 5.0)) * bubble
    for _ in range(int(rng.integers(0, 6))):
        centre = (rng.uniform(-0.8, 0.9) * p.width, thorax.base + rng.uniform(0, 8))
        half = (rng.uniform(0.6, 2.0), rng.uniform(0.5, 1.2))
        away = ((x - np.float32(centre[0])) / half[0]) ** 2 + ((y - np.float32(centre[1])) / half[1]) ** 2
        gas += np.float32(rng.uniform(0.5, 2.0)) * np.exp(-1.5 * away)
    return gas * under  # type: ignore[no-any-return]


def leads(rng: np.random.Generator, frame: Frame, thorax: Thorax) -> Array | None:
    """Now and then wires of a monitor with their electrodes, as path length of something dense."""
    if rng.random() > 0.08:
        return None
    p = thorax.patient
    wires, count = [], int(rng.integers(1, 4))
    for _ in range(count):
        side = rng.choice((-1, 1))
        end = (side * p.width * rng.uniform(0.4, 1.0), rng.uniform(p.apex + 2, thorax.base))
        out = (side * p.width * rng.uniform(0.9, 1.4), rng.uniform(thorax.base, thorax.base + 12))
        bow = rng.normal(0, 4, 2)
        t = np.linspace(0, 1, 24)[:, None]
        middle = 0.5 * (np.array(end) + out) + bow
        path = np.array(end) * (1 - t) ** 2 + 2 * middle * t * (1 - t) + np.array(out) * t**2
        wires.append(np.column_stack([path, np.full(24, 8.0)]))
    lines = np.stack(wires)
    shadow = Shadow(frame)
    shadow.add(lines, np.full((count, 24), 0.06), strength_KN=5.0)
    shadow.add(lines[:, :2], np.full((count, 2), 0.4), strength_KN=0.6)  # an electrode: short and thick
    return shadow.image()


def marker(rng: np.random.Generator, frame: Frame) -> Array | None:
    """Opacity (S, S) of a lead letter near an upper corner: L on the image's right, R on its left."""
    if rng.random() > 0.8:
        return None
    letter = str(rng.choice(["L", "R"]))
    height = rng.uniform(1.0, 1.7)
    corner = np.array([rng.uniform(0.33, 0.43) * (1 if letter == "L" else -1), rng.uniform(-0.46, -0.36)])
    lean = np.deg2rad(rng.normal(0, 8))
    turn = np.array([[np.cos(lean), np.sin(lean)], [-np.sin(lean), np.cos(lean)]])
    shadow = Shadow(frame)
    x0, y0 = frame.at(*corner)
    thick = 0.08 * height
    for stroke in _STROKES[letter]:
        line = (np.array(stroke, dtype=np.float64) - 0.5) * height @ turn + [x0, y0]
        shadow.add(np.column_stack([line, np.zeros(len(line))])[None], np.full((1, len(line)), thick))
    opacity: Array = np.clip(shadow.image() * np.float32(rng.uniform(0.7, 1.0) / (1.5 * thick)), 0, 1)
    return opacity


def shutters(rng: np.random.Generator, frame: Frame, thorax: Thorax) -> Array | None:
    """Share of light (S, S) the collimator lets through, when its edge is on the film; it never cuts into the lungs."""
    if rng.random() > 0.25:
        return None
    p = thorax.patient
    x, y = frame.grid
    tilt = np.float32(rng.normal(0, 0.012))
    across, down = x + tilt * y, y - tilt * x
    left, right = (side * (p.width + rng.uniform(3.5, 9)) for side in (-1, 1))
    top, bottom = p.apex - rng.uniform(2.0, 5), thorax.base + rng.uniform(4.0, 12)
    inside = np.minimum(np.minimum(across - left, right - across), np.minimum(down - top, bottom - down))
    return smoothstep(inside / np.float32(0.35) + 0.5)  # type: ignore[no-any-return]

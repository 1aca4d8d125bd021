"""Diseases around the lung and of its shape: effusion, pneumothorax, pleura, collapse, emphysema, large heart.

As in :mod:`afire.data.phantom.opacities`, each changes what the rays pass through and returns its extent.
"""

from __future__ import annotations

import numpy as np

from afire.data.phantom.chest import Chest, between
from afire.data.phantom.physics import Array, dome, mottle, smoothstep


def effusion(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """Fluid in the pleural space: it blunts the angle, hides the diaphragm and climbs along the wall as a meniscus."""
    x, y = chest.frame.grid
    thorax = chest.thorax
    at_wall = thorax.base - between(1.8, 14.0, severity)
    climb = float(rng.uniform(2.4, 4.2)) + 1.5 * severity
    across = np.clip(np.float32(side) * x / np.maximum(thorax.lateral(y), 1), 0, 1.05)
    from_middle = (across - np.float32(0.5)) * 2
    rise = from_middle * from_middle * np.where(from_middle > 0, np.float32(1), np.float32(0.3))
    surface = np.float32(at_wall) + np.float32(climb) * (1 - rise)
    # a thin sheet at its upper edge, the whole depth of the chest further down
    share = smoothstep((y - surface) * np.float32(1 / (1.4 + 1.6 * severity))) * chest.side(side)
    fluid = share * chest.lung
    chest.fill(share)
    # fluid behind the liver is there too, but no reader would outline it
    return np.where(y < thorax.base, fluid * np.float32(0.6), np.float32(0))


def pneumothorax(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """Air outside the lung: a strip along apex and wall without vessels, darker, behind a fine pleural line."""
    x, y = chest.frame.grid
    thorax = chest.thorax
    p = thorax.patient
    gap = between(0.8, 5.5, severity)
    stop = between(0.3, 0.95, 0.5 * float(rng.random()) + 0.5 * severity)  # where the strip ends, from top to base
    down = chest.down()
    waves = np.float32(0.2) * np.sin(y * np.float32(rng.uniform(0.3, 0.7)) + np.float32(rng.uniform(0, 6.3)))
    strip = np.float32(gap) * np.sqrt(np.clip(1 - down * np.float32(1 / stop), 0, 1)) * (1 + waves)
    from_wall = thorax.lateral(y) - np.float32(side) * thorax.wall_x(x, y) - strip
    from_top = y - np.float32(p.apex + 0.8 * gap)
    # cm inside the collapsed lung's edge: the smaller of the two, with the corner between them rounded
    edge = 0.5 * (from_wall + from_top - np.sqrt(np.square(from_wall - from_top) + np.float32(1.5)))
    here = chest.side(side) * (down < stop)
    outside = smoothstep(np.float32(0.5) - edge * 4) * here
    emptied = chest.lung * outside
    width = np.float32(max(0.1, 0.5 * chest.frame.pixel))
    line = np.exp(-np.square(edge / width)) * here * np.clip(chest.lung * np.float32(1 / 3), 0, 1)
    chest.lung = chest.lung - emptied
    chest.vessels = chest.vessels * (1 - outside)
    chest.air = chest.air + emptied
    chest.water = chest.water + np.float32(0.06) / width * line
    return np.where(chest.inside.behind <= 0, emptied * np.float32(0.4), np.float32(0))


def thickened_pleura(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """A rind of tissue along the wall or a cap over the lung's top, seen edge-on."""
    x, y = chest.frame.grid
    thorax = chest.thorax
    p = thorax.patient
    thick = between(0.5, 2.0, severity)
    down = chest.down()
    waves = 1 + np.float32(0.35) * mottle(rng, chest.frame, 2.5)
    if rng.random() < 0.35:  # a cap
        top = p.apex + 0.012 * np.square(np.abs(x) - np.float32(0.4 * p.width)) * 8
        from_edge = (y - top) * np.float32(0.8) + 4 * (1 - chest.clear)
        along = smoothstep((np.float32(0.2) - down) * 12)
    else:
        start, stop = sorted(rng.uniform(0.2, 1.0, 2))
        start, stop = min(float(start), 0.6), float(max(stop, start + 0.35))
        from_edge = thorax.lateral(y) - np.float32(side) * thorax.wall_x(x, y)
        along = smoothstep((down - np.float32(start)) * 9) * smoothstep((np.float32(stop) - down) * 9)
    depth = np.float32(thick) * waves * along
    share = smoothstep((depth - from_edge) * np.float32(1 / 0.3) + np.float32(0.3)) * chest.side(side)
    share = share * np.minimum(along * 4, 1)
    seen = np.clip(chest.lung * np.float32(1.2), 0, 1) * (chest.inside.behind <= 0)
    chest.water = chest.water + np.float32(between(1.0, 4.0, severity)) * share * seen
    return share * seen  # type: ignore[no-any-return]


def atelectasis(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """Lung without air: plates across the lower zone, or a lobe that has shrunk to a wedge at the heart."""
    if rng.random() < 0.55:
        return _plates(chest, rng, side, severity)
    x, y = chest.frame.grid
    p = chest.thorax.patient
    upper = bool(rng.random() < 0.35)
    out = np.float32(side) * x
    if upper:  # from the top of the mediastinum, with a lower edge that sags outwards
        edge = np.float32(p.apex + chest.height * rng.uniform(0.22, 0.36)) - np.float32(rng.uniform(0.1, 0.35)) * out
        inside = np.minimum(edge - y, (np.float32(p.width * rng.uniform(0.5, 0.8)) - out) * np.float32(0.7))
    else:  # from the hilum down to the diaphragm, beside or behind the heart
        floor = np.float32(chest.thorax.base)
        reach = np.float32(between(3.5, 8.0, float(rng.random())))
        slant = np.float32(2.8) + reach * (y - 2) / (floor - 2)
        inside = np.minimum(slant - out, (y - np.float32(1.5)) * np.float32(0.7))
    share = smoothstep(inside * np.float32(1.2)) * chest.side(side)
    share = share * (np.float32(0.85) + np.float32(0.15) * np.clip(mottle(rng, chest.frame, 1.5), -1, 1))
    seen = np.clip(chest.lung * np.float32(0.6), 0, 1)
    chest.fill(np.float32(between(0.2, 0.9, severity)) * share)
    return share * seen * (chest.inside.behind <= 0) * np.float32(1.3)  # type: ignore[no-any-return]


def _plates(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    x, y = chest.frame.grid
    p = chest.thorax.patient
    extent = np.zeros_like(x)
    for _ in range(int(rng.integers(1, 4))):
        levels = (p.apex + 0.4 * chest.height, chest.thorax.base)
        centre = chest.point(rng, side, levels, margin=1.0)
        lean, length = float(rng.normal(0, 0.3)), float(rng.uniform(1.5, 4.5))
        thick = between(0.18, 0.6, 0.5 * severity + 0.5 * float(rng.random()))
        dx, dy = x - np.float32(centre[0]), y - np.float32(centre[1])
        along = (dx * np.float32(np.cos(lean)) + dy * np.float32(np.sin(lean))) * np.float32(1 / length)
        off = dy * np.float32(np.cos(lean)) - dx * np.float32(np.sin(lean)) + np.float32(0.25) * along * along
        shape = np.exp(-np.square(off * np.float32(1 / thick))) * smoothstep((1 - np.abs(along)) * 3)
        extent = np.maximum(extent, shape)
    extent *= chest.side(side) * np.clip(chest.lung * np.float32(0.6), 0, 1) * (chest.inside.behind <= 0)
    chest.water = chest.water + np.float32(between(0.8, 4.0, severity)) * extent
    return extent * np.float32(1.3)  # type: ignore[no-any-return]


def emphysema(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """Lungs with too much air: dark, few vessels, bullae, and a flat diaphragm (see :func:`flattening`)."""
    x, y = chest.frame.grid
    p = chest.thorax.patient
    worse = (1 + np.float32(0.25) * mottle(rng, chest.frame, 4.0)) * chest.clear
    chest.lung = chest.lung * (1 + np.float32(between(0.03, 0.17, severity)) * np.clip(worse, 0, 2))
    chest.vessels = chest.vessels * (1 - np.float32(between(0.15, 0.65, severity)) * chest.clear)
    for _ in range(int(rng.integers(0, 4))):
        radius = float(rng.uniform(1.2, 3.2))
        centre = chest.point(rng, int(rng.choice((-1, 1))), (p.apex + 0.5, p.apex + 0.55 * chest.height), 0.4 * radius)
        dx, dy = x - np.float32(centre[0]), y - np.float32(centre[1])
        reach = np.sqrt(dx * dx + dy * dy) * np.float32(1 / radius)
        hole = dome(reach * reach) * np.clip(chest.lung * np.float32(0.25), 0, 1) * chest.clear
        chest.air = chest.air + np.float32(0.45 * severity) * radius * hole * np.float32(1 - 0.75)
        chest.vessels = chest.vessels * (1 - np.minimum(hole, 1) * np.float32(0.9))
        ring = np.exp(-np.square((reach - 1) * np.float32(radius / max(0.09, 0.5 * chest.frame.pixel))))
        chest.water = (
            chest.water
            + np.float32(between(0.1, 0.5, severity))
            * ring
            * np.clip(chest.lung * np.float32(0.25), 0, 1)
            * chest.clear
        )
    uncovered = (y > chest.thorax.resting(x)) & (chest.inside.behind <= 0) & (chest.inside.cavity > 0)
    return np.where(chest.inside.field | uncovered, np.float32(1), np.float32(0))


def flattening(severity: float) -> float:
    """Centimetres by which the lungs of an emphysema push the diaphragm down."""
    return between(0.2, 1.8, severity)


def cardiomegaly(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """The heart's silhouette above the diaphragm. The heart itself was drawn large: see :func:`enlargement`."""
    return np.where(chest.inside.heart, np.float32(1), np.float32(0))


def enlargement(severity: float, magnified: float) -> float:
    """Width of a large heart over the chest's; above 0.5 is large by convention on a PA film."""
    return between(0.53, 0.68, severity) * (1 + 0.5 * (magnified - 1))

"""The fourteen diseases: how each changes the anatomy, and how severe it is.

No disease paints on the finished image. Each takes the chest, its random numbers, a side and a severity from 0 (hardly
seen) to 1, changes what the rays pass through, and returns its extent, an (S, S) image that is above 0.5 where the
disease is, however faint. First those of the lung itself, then those around the lung and of its shape. Names are those
of public datasets where those have one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from afire.data.phantom.chest import Chest, between
from afire.data.phantom.physics import Array, Shadow, dome, mottle, smoothstep

Disease = Callable[[Chest, np.random.Generator, int, float], Array]


def nodule(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """A small dense ball with a soft, slightly lobed edge, anywhere in the lung field, also before a rib."""
    return _ball(chest, rng, side, float(rng.uniform(0.6, 1.5)), between(0.45, 1.5, severity), rough=0.05)


def mass(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """A large lobed ball, sometimes with rays into its surroundings."""
    radius = between(1.6, 4.0, 0.6 * float(rng.random()) + 0.4 * severity)
    return _ball(chest, rng, side, radius, between(0.3, 1.1, severity), rough=float(rng.uniform(0.05, 0.13)))


def _ball(chest: Chest, rng: np.random.Generator, side: int, radius: float, density: float, rough: float) -> Array:
    x, y = chest.frame.grid
    top = chest.thorax.patient.apex
    centre = chest.point(rng, side, (top, chest.thorax.base), margin=min(0.8 * radius, 1.6))
    dx, dy = x - np.float32(centre[0]), y - np.float32(centre[1])
    reach = np.sqrt(dx * dx + dy * dy) / _lobed(rng, np.arctan2(dy, dx), radius, rough)
    ball = np.float32(2 * radius * density) * dome(reach * reach) * smoothstep((np.float32(1.05) - reach) / 0.3)
    chest.lung = np.maximum(chest.lung - ball, 0)
    return 1.5 - reach  # type: ignore[no-any-return]


def _lobed(rng: np.random.Generator, angle: Array, radius: float, rough: float) -> Array:
    """Distance from a centre to an irregular outline, for each direction."""
    outline = np.full_like(angle, radius)
    for order in (2, 3, 4, 5):
        wave = np.cos(np.float32(order) * angle + np.float32(rng.uniform(0, 6.3)))
        outline += np.float32(radius * rng.normal(0, rough)) * wave
    return np.maximum(outline, np.float32(0.4 * radius))  # type: ignore[no-any-return]


def cavity(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """A ring of dense wall around air, mostly high up, in clouded surroundings, sometimes with a fluid level."""
    x, y = chest.frame.grid
    p = chest.thorax.patient
    radius = float(rng.uniform(1.1, 2.8))
    high = rng.random() < 0.7
    levels = (p.apex + 1, p.apex + 0.45 * chest.height) if high else (p.apex + 2, chest.thorax.base)
    centre = chest.point(rng, side, levels, margin=0.7 * radius)
    dx, dy = x - np.float32(centre[0]), y - np.float32(centre[1])
    away = np.sqrt(dx * dx + dy * dy)
    outline = _lobed(rng, np.arctan2(dy, dx), radius, 0.05)
    outer = away / outline
    inner = away / (outline - np.float32(between(0.3, 0.7, float(rng.random())) * min(1.0, radius / 1.5)))
    # wall: what a ball of water has more than the ball of air in it, against the lung that was there
    shell = np.float32(2 * radius) * (dome(outer * outer) - dome(inner * inner))
    if rng.random() < 0.3:
        shell += np.float32(radius) * dome(inner * inner) * smoothstep((dy - np.float32(0.3 * radius)) * 5)
    cloud = smoothstep(np.float32(1.8) - outer + np.float32(0.35) * mottle(rng, chest.frame, 1.2)) * (outer > 0.9)
    cloud *= chest.side(side) * chest.clear
    strength = np.float32(between(0.3, 1.1, severity))
    chest.fill(np.clip(np.float32(0.3) * strength * cloud, 0, 1))
    chest.vessels = chest.vessels * (outer > 0.95)
    chest.lung = np.clip(chest.lung - strength * shell + 0.25 * dome(inner * inner) * radius, 0, None)
    return np.maximum(1.5 - outer, cloud)  # type: ignore[no-any-return]


def consolidation(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """Patchy water in part of a lobe: cut off by a fissure, vessels drown in it, airways stay dark."""
    frame, thorax = chest.frame, chest.thorax
    x, y = frame.grid
    p = thorax.patient
    fissure = p.apex + chest.height * float(rng.uniform(0.44, 0.54))
    upper = bool(rng.random() < 0.4)
    levels = (p.apex + 1.5, fissure) if upper else (fissure, thorax.base)
    centre = chest.point(rng, side, levels, margin=1.0)
    spread = between(2.8, 7.0, float(rng.random()))
    patches = 0.5 * mottle(rng, frame, 3.5) + 0.3 * mottle(rng, frame, 1.4) + 0.14 * mottle(rng, frame, 0.7)
    dx, dy = x - np.float32(centre[0]), (y - np.float32(centre[1])) * np.float32(1 / 0.85)
    away = (dx * dx + dy * dy) * np.float32(1 / spread**2)
    # the fissure slopes down to the side and stops the disease sharply; its other borders fray
    beyond = (y - np.float32(fissure) - np.float32(rng.uniform(0, 0.25) * side) * x) * np.float32(-1 if upper else 1)
    share = smoothstep((np.float32(1.15) + np.float32(0.6) * patches - away) * np.float32(1 / 1.5))
    share *= smoothstep(beyond * 2 + np.float32(0.5)) * chest.side(side)
    spared = np.clip(0.5 * chest.airways(side), 0, 0.5)
    chest.fill(np.float32(between(0.14, 0.75, severity)) * share * (1 - spared))
    return share * (chest.inside.lung > 1.5) * np.float32(1.5)  # type: ignore[no-any-return]


def infiltration(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """Patches and small knots in the upper zone, on one side or both, as tuberculosis begins."""
    frame = chest.frame
    x, _ = frame.grid
    low = float(rng.uniform(0.22, 0.42))
    fading = smoothstep((np.float32(low) - chest.down()) * 6 + np.float32(0.5))
    patches = mottle(rng, frame, 1.6) + 0.8 * mottle(rng, frame, 0.8)
    knots = np.maximum(mottle(rng, frame, 0.45), 0)
    other = float(rng.uniform(0.3, 1.0)) if rng.random() < 0.4 else 0.0
    where = np.where(side * x > 0, np.float32(1), np.float32(other))
    ragged = smoothstep((patches + np.float32(between(-0.3, 0.9, float(rng.random())))) * np.float32(0.8))
    share = fading * ragged * where * chest.clear
    strength = np.float32(between(0.12, 0.6, severity))
    chest.fill(np.clip(strength * share * (np.float32(0.6) + np.float32(0.5) * knots), 0, 0.9))
    return share * np.float32(1.6)  # type: ignore[no-any-return]


def miliary(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """Hundreds of knots of one to three millimetres, evenly in both lungs."""
    p = chest.thorax.patient
    count = int(between(4000, 10000, float(rng.random())))
    x = rng.uniform(-p.width, p.width, count).astype(np.float32)
    y = rng.uniform(p.apex, chest.thorax.base, count).astype(np.float32)
    radius = rng.uniform(0.09, 0.2, count).astype(np.float32)
    strength = between(0.6, 2.2, severity)
    shadow = Shadow(chest.frame)
    shadow.balls(x, y, radius, strength)
    depth = np.clip(chest.lung * np.float32(1 / 6), 0, 1) * chest.clear
    chest.water = chest.water + shadow.image() * depth
    chest.vessels = chest.vessels * (1 - np.float32(0.4 * severity) * chest.clear)
    return np.where(chest.inside.field, np.float32(1), np.float32(0))


def oedema(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """Water around the hila of both lungs, larger vessels, and fine lines at the base of the wall."""
    x, y = chest.frame.grid
    p = chest.thorax.patient
    wide, high = between(4.5, 8.5, float(rng.random())), between(5.5, 9.5, float(rng.random()))
    across = (np.abs(x) - np.float32(3.2)) * np.float32(1 / wide)
    down = (y - np.float32(rng.uniform(2.0, 5.0))) * np.float32(1 / high)
    patches = 0.13 * mottle(rng, chest.frame, 2.2) + 0.08 * mottle(rng, chest.frame, 0.9)
    share = smoothstep((np.float32(1.1) + patches - across * across - down * down) * np.float32(0.9))
    shadow = Shadow(chest.frame)
    for place in np.linspace(0.62, 0.9, int(rng.integers(4, 12))):  # septa at right angles to the wall
        level = p.apex + chest.height * (float(place) + rng.normal(0, 0.01))
        for wall in (-1, 1):
            outer = float(chest.thorax.lateral(np.float32(level)))
            path = np.array([(wall * (outer - 0.2), level), (wall * (outer - rng.uniform(1.2, 2.2)), level - 0.2)])
            shadow.line(path, 0.06, between(0.5, 2.5, severity))
    share = share * chest.clear
    lines = shadow.image() * chest.clear
    chest.water = chest.water + lines
    chest.vessels = chest.vessels * (1 + np.float32(between(0.1, 0.6, severity)) * share)
    chest.lung = chest.lung * (1 - np.float32(between(0.1, 0.5, severity)) * share)
    return np.where(chest.inside.field, np.maximum(share * 2.5, lines * 50), np.float32(0))


def fibrosis(chest: Chest, rng: np.random.Generator, side: int, severity: float) -> Array:
    """Streaks and a coarse net: towards the top of one lung, or at the base and wall of both."""
    apical = bool(rng.random() < 0.6)
    down = chest.down() + np.float32(0.04) * mottle(rng, chest.frame, 2.0)
    if apical:
        where = smoothstep((np.float32(rng.uniform(0.25, 0.42)) - down) * 7 + np.float32(0.5)) * chest.side(side)
    else:
        where = smoothstep((down - np.float32(rng.uniform(0.5, 0.7))) * 7 + np.float32(0.5))
    where = where * smoothstep(np.float32(0.9) + np.float32(0.5) * mottle(rng, chest.frame, 3.0)) * chest.clear
    net = np.abs(mottle(rng, chest.frame, 0.7)) + np.float32(0.5) * np.abs(mottle(rng, chest.frame, 0.35))
    lines = np.maximum(1 - net * np.float32(1.4), 0)  # bright where a random field crosses 0
    strands = _strands(chest, rng, side) if apical else np.float32(0)
    strength = between(0.25, 1.3, severity)
    chest.water = chest.water + np.float32(strength) * where * (np.float32(1.4) * lines + strands)
    chest.lung = chest.lung * (1 - np.float32(0.08 * strength) * where)
    return where * np.float32(1.5)  # type: ignore[no-any-return]


def _strands(chest: Chest, rng: np.random.Generator, side: int) -> Array:
    """Scars that run from the top of a lung to its hilum."""
    p = chest.thorax.patient
    shadow = Shadow(chest.frame)
    t = np.linspace(0, 1, 10)[:, None]
    for _ in range(int(rng.integers(6, 16))):
        start = np.array([side * p.width * rng.uniform(0.25, 0.75), p.apex + rng.uniform(0.5, 6)])
        end = start + (np.array([side * 3.5, 1.0]) - start) * rng.uniform(0.4, 1.0)
        path = start + (end - start) * t + np.sin(np.pi * t) * rng.normal(0, 0.4, 2)
        shadow.line(path, float(rng.uniform(0.05, 0.14)), 3.0)
    return shadow.image()


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
    visibility = np.clip(chest.lung * np.float32(1.2), 0, 1) * (chest.inside.behind <= 0)
    chest.water = chest.water + np.float32(between(1.0, 4.0, severity)) * share * visibility
    return share * visibility  # type: ignore[no-any-return]


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
    visibility = np.clip(chest.lung * np.float32(0.6), 0, 1)
    chest.fill(np.float32(between(0.2, 0.9, severity)) * share)
    return share * visibility * (chest.inside.behind <= 0) * np.float32(1.3)  # type: ignore[no-any-return]


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


CHANGES: dict[str, Disease] = {
    "Nodule": nodule,
    "Consolidation": consolidation,
    "Effusion": effusion,
    "Cardiomegaly": cardiomegaly,
    "Pneumothorax": pneumothorax,
    "Atelectasis": atelectasis,
    "Edema": oedema,
    "Mass": mass,
    "Cavity": cavity,
    "Infiltration": infiltration,
    "Fibrosis": fibrosis,
    "Miliary": miliary,
    "Pleural_Thickening": thickened_pleura,
    "Emphysema": emphysema,
}
DISEASES = tuple(CHANGES)
BOTH_SIDES = ("Cardiomegaly", "Edema", "Miliary", "Emphysema")


def draw_severity(rng: np.random.Generator) -> float:
    """From 0, hardly seen, to 1; most are in between."""
    return float(rng.beta(1.3, 1.4))

"""What a film shows besides a normal chest: five diseases, and things that are no disease.

A disease is a change of the anatomy, each of another kind: a nodule puts a ball of water into the lung, a consolidation
fills part of a lobe and spares its airways, an effusion takes the place of the lung from below, a pneumothorax empties
it from above, a large heart pushes it aside. None of them paints on the finished image: they change what the rays pass
through. A disease returns its extent, an (S, S) image that is above 0.5 where the disease is.

No disease: gas in the stomach, leads on the skin, the side marker, the edge of the shutters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from afire.data.phantom.anatomy import Thorax
from afire.data.phantom.physics import Array, Frame, dome, mottle, smoothstep
from afire.data.phantom.skeleton import Shadow, Tree, tubes

DISEASES = ("Nodule", "Consolidation", "Effusion", "Cardiomegaly", "Pneumothorax")
_STROKES = {
    "L": [[(0, 0), (0, 1)], [(0, 1), (0.55, 1)]],
    "R": [[(0, 0), (0, 1)], [(0, 0), (0.4, 0.02), (0.55, 0.25), (0.4, 0.48), (0, 0.5)], [(0.25, 0.5), (0.6, 1)]],
}


@dataclass
class Chest:
    """The inside of the chest as path lengths in cm, each (S, S); diseases change it in place.

    Where lung is taken away and nothing else is said, water takes its place.
    """

    frame: Frame
    thorax: Thorax
    tree: Tree
    lung: Array  # aerated lung
    vessels: Array
    air: Array  # free air, outside the lung
    pleura: Array  # what a pleural line adds


Disease = Callable[[Chest, np.random.Generator, int], Array]


def nodule(chest: Chest, rng: np.random.Generator, side: int) -> Array:
    """A small dense ball with a soft, slightly lobed edge, anywhere in the lung field, also before a rib."""
    x, y = chest.frame.grid
    p = chest.thorax.patient
    radius = float(rng.uniform(0.85, 2.0))
    centre = _point_in_lung(chest.thorax, rng, side, (p.apex, chest.thorax.base), margin=0.8 * radius)
    dx, dy = x - np.float32(centre[0]), y - np.float32(centre[1])
    angle = np.arctan2(dy, dx)
    outline = np.full_like(x, radius)
    for order in (2, 3, 4, 5):
        outline += np.float32(radius * rng.normal(0, 0.05)) * np.cos(order * angle + np.float32(rng.uniform(0, 6.3)))
    reach = np.hypot(dx, dy) / outline
    ball = np.float32(2 * radius * rng.uniform(1.0, 1.5)) * dome(reach * reach) * smoothstep((1.05 - reach) / 0.3)
    chest.lung = np.clip(chest.lung - ball, 0, None)
    return 1.5 - reach  # type: ignore[no-any-return]


def _point_in_lung(
    thorax: Thorax, rng: np.random.Generator, side: int, levels: tuple[float, float], margin: float
) -> tuple[float, float]:
    """A point whose surroundings of ``margin`` cm lie in the lung field; judged in cm, so the same at every size."""
    x = (side * rng.uniform(0, thorax.patient.width, 300)).astype(np.float32)
    y = rng.uniform(*levels, 300).astype(np.float32)
    clear = np.ones(x.shape, dtype=bool)
    for dx, dy in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
        clear &= thorax.look(x + np.float32(margin * dx), y + np.float32(margin * dy)).field
    chosen = int(np.argmax(clear))
    return float(x[chosen]), float(y[chosen])


def consolidation(chest: Chest, rng: np.random.Generator, side: int) -> Array:
    """Patchy water in part of a lobe: cut off by a fissure, vessels drown in it, airways stay dark."""
    frame, thorax = chest.frame, chest.thorax
    x, y = frame.grid
    p = thorax.patient
    height = thorax.base - p.apex
    fissure = p.apex + height * float(rng.uniform(0.46, 0.54))
    upper = bool(rng.random() < 0.45)
    levels = (p.apex + 1.5, fissure) if upper else (fissure, thorax.base)
    centre = _point_in_lung(thorax, rng, side, levels, margin=1.0)
    spread = float(rng.uniform(3.4, 7.0))
    patches = 0.5 * mottle(rng, frame, 3.5) + 0.3 * mottle(rng, frame, 1.4) + 0.14 * mottle(rng, frame, 0.7)
    away = ((x - np.float32(centre[0])) ** 2 + ((y - np.float32(centre[1])) / np.float32(0.85)) ** 2) / np.float32(
        spread**2
    )
    # the fissure slopes down to the side and stops the disease sharply; its other borders fray
    beyond = (y - np.float32(fissure) - np.float32(rng.uniform(0, 0.25)) * side * x) * (-1 if upper else 1)
    share = smoothstep((1.15 + 0.6 * patches - away) / 1.5) * smoothstep(beyond / 0.5 + 0.5) * (side * x > 0)
    airways = np.clip(0.9 * _airways_beside_vessels(chest, side), 0, 0.7)
    solid: Array = (np.float32(rng.uniform(0.32, 0.65)) * share * chest.lung).astype(np.float32)
    chest.lung = chest.lung - solid * (1 - airways)
    chest.vessels = chest.vessels * (1 - 0.9 * share)
    return solid * np.float32(0.5)


def _airways_beside_vessels(chest: Chest, side: int) -> Array:
    """Bronchi run along the larger vessels: their tree, moved a little, without the thin branches."""
    points, radius = chest.tree
    chosen = (side * points[:, 0, 0] > 0) & (radius[:, 0] > 0.11)
    moved = points[chosen] + np.array([0.25, -0.35, 0])
    return tubes(chest.frame, moved, 0.85 * radius[chosen])


def effusion(chest: Chest, rng: np.random.Generator, side: int) -> Array:
    """Fluid in the pleural space: it blunts the angle, hides the diaphragm and climbs along the wall as a meniscus."""
    x, y = chest.frame.grid
    thorax = chest.thorax
    amount = float(rng.beta(1.5, 1.8))
    at_wall = thorax.base - 3.2 - 11.0 * amount
    climb = float(rng.uniform(2.4, 4.2)) + 1.5 * amount
    across = np.clip(side * x / np.maximum(thorax.lateral(y), 1), 0, 1.05)
    from_middle = (across - np.float32(0.5)) * 2
    rise = from_middle * from_middle * np.where(from_middle > 0, np.float32(1), np.float32(0.3))
    surface = np.float32(at_wall) + np.float32(climb) * (1 - rise)
    # a thin sheet at its upper edge, the whole depth of the chest further down
    share = smoothstep((y - surface) / np.float32(1.4 + 1.6 * amount)) * (side * x > 0)
    fluid: Array = (share * chest.lung).astype(np.float32)
    chest.lung = chest.lung - fluid
    chest.vessels = chest.vessels * (1 - share)
    # fluid behind the liver is there too, but no reader would outline it
    return np.where(y < thorax.base, fluid * np.float32(0.6), np.float32(0))


def pneumothorax(chest: Chest, rng: np.random.Generator, side: int) -> Array:
    """Air outside the lung: a strip along apex and wall without vessels, darker, behind a fine pleural line."""
    x, y = chest.frame.grid
    thorax = chest.thorax
    p = thorax.patient
    gap = float(rng.uniform(1.6, 5.0))
    stop = float(rng.uniform(0.4, 0.95))  # where the strip ends, as a share of the lung's height
    down = (y - np.float32(p.apex)) / np.float32(thorax.base - p.apex)
    waves = np.float32(0.2) * np.sin(y * np.float32(rng.uniform(0.3, 0.7)) + np.float32(rng.uniform(0, 6.3)))
    strip = np.float32(gap) * np.sqrt(np.clip(1 - down / np.float32(stop), 0, 1)) * (1 + waves)
    from_wall = thorax.lateral(y) - side * x - strip
    from_top = y - np.float32(p.apex + 0.8 * gap)
    # cm inside the collapsed lung's edge: the smaller of the two, with the corner between them rounded
    edge = 0.5 * (from_wall + from_top - np.sqrt((from_wall - from_top) ** 2 + np.float32(1.5)))
    here = (side * x > 0) & (down < stop)
    outside = smoothstep(0.5 - edge / 0.25) * here
    emptied: Array = (chest.lung * outside).astype(np.float32)
    width = np.float32(max(0.1, 0.5 * chest.frame.pixel))
    line = np.exp(-((edge / width) ** 2)) * here * np.clip(chest.lung / 3, 0, 1)
    chest.lung = chest.lung - emptied
    chest.vessels = chest.vessels * (1 - outside)
    chest.air += emptied
    chest.pleura += np.float32(0.06) / width * line
    return emptied * np.float32(0.33)


def cardiomegaly(chest: Chest, rng: np.random.Generator, side: int) -> Array:
    """The heart's silhouette above the diaphragm. The heart itself was drawn large: see :func:`enlarged_heart`."""
    x, y = chest.frame.grid
    inside = 1.5 - chest.thorax.heart.reach(x, y)
    return np.where(y < chest.thorax.diaphragm(x) + 0.5, inside, 0)  # type: ignore[no-any-return]


def enlarged_heart(rng: np.random.Generator) -> float:
    """Width of a large heart over the chest's; above 0.5 is large by convention."""
    return float(rng.uniform(0.55, 0.7))


CHANGES: dict[str, Disease] = {
    "Nodule": nodule,
    "Consolidation": consolidation,
    "Effusion": effusion,
    "Cardiomegaly": cardiomegaly,
    "Pneumothorax": pneumothorax,
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

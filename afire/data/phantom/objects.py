"""What is on a film besides anatomy and is no disease: gas, devices, leads, markers, folds, scars, the film's edges.

All of it is drawn before any disease is chosen, from numbers of its own, so it is as frequent on films with findings as
on those without. Devices (tubes, catheters, pacemakers, wires, leads, jewellery) each add their attenuation to a
shadow; strengths are attenuations per centimetre.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afire.data.phantom.physics import Array, Floats, Frame, Shadow, dome, smoothstep
from afire.data.phantom.thorax import Thorax

Draw = Callable[[Shadow, np.random.Generator, Thorax], None]
_BOWL = [(0, 0), (0.4, 0.02), (0.55, 0.25), (0.4, 0.48), (0, 0.5)]
_STEM = [(0, 0), (0, 0.25), (0, 0.5), (0, 0.75), (0, 1)]
_LEG = [(0.25, 0.5), (0.34, 0.62), (0.42, 0.75), (0.51, 0.87), (0.6, 1)]
_BAR = [(0.12, 0.6), (0.2, 0.6), (0.3, 0.6), (0.4, 0.6), (0.48, 0.6)]
_STROKES = {  # of five points each, so that all strokes of a word are drawn at once
    "L": np.array([[(0, 0), (0, 0.5), (0, 1), (0.25, 1), (0.55, 1)]]),
    "R": np.array([_BOWL, _STEM, _LEG]),
    "A": np.array([[(0, 1), (0.15, 0.5), (0.3, 0), (0.45, 0.5), (0.6, 1)], _BAR]),
    "P": np.array([_BOWL, _STEM]),
}


def smooth(points: list[tuple[float, float]], count: int = 40) -> Floats:
    """A smooth path (N, 2) through a few points, as a tube lies in the body."""
    corners = np.array(points, dtype=np.float64)
    padded = np.concatenate([2 * corners[:1] - corners[1:2], corners, 2 * corners[-1:] - corners[-2:-1]])
    place = np.linspace(0, len(corners) - 1, count)
    piece = np.minimum(place.astype(int), len(corners) - 2)
    t = (place - piece)[:, None]
    a, b, c, d = (padded[piece + shift] for shift in range(4))
    # Catmull-Rom: through every point, in the direction of its neighbours
    path: Floats = b + 0.5 * t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)))
    return path


def windpipe_tube(shadow: Shadow, rng: np.random.Generator, thorax: Thorax) -> None:
    """A breathing tube that ends above the carina, with its dense stripe."""
    top, stop = thorax.patient.apex - 12, rng.uniform(-5.5, -2.0)
    path = smooth([(rng.normal(0, 1.0), top), (rng.normal(0, 0.4), thorax.patient.apex), (-0.2, stop)])
    shadow.line(path, 0.45, 0.3, wall=0.25)
    shadow.line(path + np.array([0.38, 0]), 0.07, 2.5)


def stomach_tube(shadow: Shadow, rng: np.random.Generator, thorax: Thorax) -> None:
    """A feeding tube from the neck behind the heart into the stomach."""
    p, floor = thorax.patient, thorax.resting_domes[1]
    end = (rng.uniform(2, 7), floor + rng.uniform(3, 8))
    path = smooth([(rng.normal(0, 1), p.apex - 12), (0.5, p.apex), (0.7, 3), (1.4, floor - 1), end], 60)
    shadow.line(path, float(rng.uniform(0.14, 0.24)), 0.8, wall=0.35)


def central_line(shadow: Shadow, rng: np.random.Generator, thorax: Thorax) -> None:
    """A catheter from neck, below the collar bone or arm to the large vein beside the heart."""
    p, side = thorax.patient, float(rng.choice((-1, -1, 1)))
    tip = (-2.0 + rng.normal(0, 0.4), rng.uniform(-2.5, 3.5))
    entry = rng.choice(3)
    joint_x, joint_y = thorax.shoulder_joint(int(side))
    starts = (
        [(side * 5.0, p.apex - 7), (side * 3.2, p.apex + 1)],
        [(side * 9.5, p.apex + 6.5), (side * 6.5, p.apex + 4.0)],
        [(joint_x + side * 3, joint_y + 9), (joint_x - side * 2.5, joint_y + 2.5), (side * 7, p.apex + 3.8)],
    )[entry]
    path = smooth([*starts, (-1.0 if side < 0 else 1.0, p.apex + 5.5), (-1.8, -5), tip], 60)
    shadow.line(path, float(rng.uniform(0.08, 0.15)), rng.uniform(1.2, 2.5))
    if entry == 1 and rng.random() < 0.4:  # a port below the skin
        shadow.plate((side * 9.5, p.apex + 6.5), (1.1, 1.3), rng.normal(0, 0.3), 0.7)


def pacemaker(shadow: Shadow, rng: np.random.Generator, thorax: Thorax) -> None:
    """A box below a collar bone and one to three leads to the heart."""
    p, side = thorax.patient, float(rng.choice((1, 1, 1, -1)))
    box = (side * rng.uniform(7.5, 10.5), p.apex + rng.uniform(6, 8.5))
    shadow.plate(box, (rng.uniform(1.8, 2.5), rng.uniform(1.9, 2.7)), rng.normal(0, 0.4), rng.uniform(1.2, 2.2))
    shadow.plate((box[0], box[1] - 1.7), (1.3, 0.6), 0.0, 0.8)
    heart_x, heart_y = thorax.heart.centre
    ends = [(heart_x + rng.uniform(1.0, 3.5), heart_y + rng.uniform(2.5, 5)), (-2.2, heart_y - 0.5), (4.5, heart_y)]
    for x, y in ends[: int(rng.integers(1, 4))]:
        path = smooth([box, (side * 7, p.apex + 3.8), (0, p.apex + 5.5), (-2.0, -2), (-2.3, heart_y), (x, y)], 70)
        shadow.line(path + rng.normal(0, 0.15, 2), 0.09, 3.0)
        shadow.dot((x, y), 0.18, 2.0)


def breastbone_wires(shadow: Shadow, rng: np.random.Generator, thorax: Thorax) -> None:
    """Wires of an earlier heart operation, sometimes with clips."""
    p = thorax.patient
    centre = 7 * np.sin(thorax.pose.yaw)
    turn = np.linspace(0, 2 * np.pi, 24)
    for level in np.linspace(p.apex + 5.5, 6.5, int(rng.integers(4, 8))):
        wide, high = rng.uniform(0.45, 0.8), rng.uniform(0.3, 0.6)
        x = centre + rng.normal(0, 0.15) + wide * np.cos(turn)
        shadow.line(np.column_stack([x, level + high * np.sin(turn)]), 0.05, 4.0)
    for _ in range(int(rng.integers(0, 8))):
        x, y = rng.normal(2, 1.5), rng.uniform(-4, 8)
        shadow.line(np.array([(x, y), (x + rng.normal(0, 0.3), y + rng.normal(0, 0.3))]), 0.06, 4.0)


def leads(shadow: Shadow, rng: np.random.Generator, thorax: Thorax) -> None:
    """Wires of a monitor on the skin, with their electrodes."""
    p = thorax.patient
    for _ in range(int(rng.integers(2, 6))):
        side = rng.choice((-1, 1))
        end = (side * p.width * rng.uniform(0.4, 1.0), rng.uniform(p.apex + 2, thorax.base))
        out = (side * p.width * rng.uniform(0.5, 1.4), thorax.base + rng.uniform(3, 14))
        between = (0.5 * (end[0] + out[0]) + rng.normal(0, 3), 0.5 * (end[1] + out[1]) + rng.normal(0, 3))
        shadow.line(smooth([end, between, out]), 0.06, 2.2)
        shadow.plate(end, (0.55, 0.55), 0.0, rng.uniform(0.3, 0.9))


def drain(shadow: Shadow, rng: np.random.Generator, thorax: Thorax) -> None:
    """A tube through the chest wall that lies beside the lung."""
    p, side = thorax.patient, float(rng.choice((-1, 1)))
    entry, tip = rng.uniform(0, 8), p.apex + rng.uniform(2, 8)
    path = smooth(
        [
            (side * (p.width + 6), entry + 4),
            (side * p.width * 0.97, entry),
            (side * p.width * 0.75, 0.5 * (entry + tip)),
            (side * p.width * 0.5, tip),
        ]
    )
    shadow.line(path, 0.4, 0.22, wall=0.25)
    shadow.line(path + np.array([0.3, 0]), 0.06, 2.0)


def worn(shadow: Shadow, rng: np.random.Generator, thorax: Thorax) -> None:
    """What people forgot to take off: a necklace, buttons, hooks."""
    p = thorax.patient
    kind = rng.choice(3)
    if kind == 0:
        low = p.apex + rng.uniform(4, 11)
        path = smooth(
            [(-5, p.apex - 3), (-3, 0.5 * (p.apex + low)), (0, low), (3, 0.5 * (p.apex + low)), (5, p.apex - 3)]
        )
        shadow.line(path, 0.05, rng.uniform(2, 5))
        shadow.dot((0.0, low + 0.4), 0.35, 2.0)
    elif kind == 1:
        x = rng.normal(0, 1.2)
        for level in np.arange(p.apex + 3, thorax.base, rng.uniform(5, 8)):
            shadow.plate((x, level), (0.55, 0.55), 0.0, 0.35)
    else:
        for side in (-1, 1):
            x, y = side * p.width * rng.uniform(0.3, 0.7), rng.uniform(p.apex + 1, p.apex + 6)
            shadow.plate((x, y), (0.5, 0.25), rng.normal(0, 0.3), 2.0)


DEVICES: dict[str, tuple[float, Draw]] = {
    "tube in the windpipe": (0.03, windpipe_tube),
    "stomach tube": (0.04, stomach_tube),
    "central line": (0.06, central_line),
    "pacemaker": (0.025, pacemaker),
    "breastbone wires": (0.03, breastbone_wires),
    "leads": (0.08, leads),
    "drain": (0.02, drain),
    "worn": (0.04, worn),
}
"""Each with its share of the films."""


@dataclass
class Objects:
    """What lies on or in the body, each an (S, S) image, or 0 where there is none."""

    names: list[str] = field(default_factory=list)  # the devices
    dense: Array | float = 0.0  # attenuation of devices, leads and calcium
    soft: Array | float = 0.0  # cm of water: folds of skin and clothing, scars
    gas: Array | float = 0.0  # cm of air below the diaphragm
    bubble: NDArray[np.bool_] | None = None  # where the stomach's bubble is


def draw_objects(rng: np.random.Generator, frame: Frame, thorax: Thorax) -> Objects:
    """Everything of a film that is neither anatomy nor disease, but for its edges."""
    objects = Objects()
    objects.gas, objects.bubble = _gas(rng, frame, thorax)
    shadow = Shadow(frame)
    likely = 1.6 if thorax.pose.view == "AP" else 0.8
    for name, (share, draw) in DEVICES.items():
        if rng.random() < share * likely:
            draw(shadow, rng, thorax)
            objects.names.append(name)
    _calcium(shadow, rng, thorax)
    if not shadow.empty:
        objects.dense = shadow.image()
    objects.soft = _folds_and_scars(rng, frame, thorax)
    return objects


def _gas(rng: np.random.Generator, frame: Frame, thorax: Thorax) -> tuple[Array, NDArray[np.bool_]]:
    """Path length through gas below the left diaphragm, often with a level, and through a few bowel loops."""
    x, y = frame.grid
    p = thorax.patient
    gas = np.zeros_like(x)
    bubble = np.zeros(x.shape, dtype=bool)
    if rng.random() < 0.75:
        half = (rng.uniform(1.4, 3.6), rng.uniform(0.9, 2.0))
        centre = (p.width * rng.uniform(0.3, 0.6), thorax.resting_domes[1] + rng.uniform(1.2, 3.2))
        window = _window(frame, centre, half)
        px, py = x[window], y[window]
        ball = dome(_away(px, py, centre, half))
        ball *= smoothstep((py - thorax.diaphragm(px)) * np.float32(1 / 0.6) - np.float32(0.6))
        if rng.random() < 0.5:
            ball *= smoothstep((np.float32(centre[1] + 0.4 * half[1]) - py) * np.float32(4))
        bubble[window] = ball > 0.25
        gas[window] += np.float32(rng.uniform(1.0, 5.0)) * ball
    for _ in range(int(rng.integers(0, 6))):
        centre = (rng.uniform(-0.8, 0.9) * p.width, thorax.base + rng.uniform(0, 8))
        half = (rng.uniform(0.6, 2.0), rng.uniform(0.5, 1.2))
        strength = rng.uniform(0.5, 2.0)
        window = _window(frame, centre, (1.8 * half[0], 1.8 * half[1]))
        px, py = x[window], y[window]
        under = smoothstep((py - thorax.diaphragm(px)) * np.float32(1 / 0.6) - np.float32(0.6))
        gas[window] += np.float32(strength) * np.exp(np.float32(-1.5) * _away(px, py, centre, half)) * under
    return gas, bubble


def _away(x: Array, y: Array, centre: tuple[float, float], half: tuple[float, float]) -> Array:
    """Squared distance from an ellipse's centre: 1 on its outline."""
    across, down = (
        (x - np.float32(centre[0])) * np.float32(1 / half[0]),
        (y - np.float32(centre[1])) * np.float32(1 / half[1]),
    )
    return across * across + down * down  # type: ignore[no-any-return]


def _window(frame: Frame, centre: tuple[float, float], half: tuple[float, float]) -> tuple[slice, slice]:
    """The part of the film that holds an ellipse."""
    column, row = frame.project(np.asarray(centre[0]), np.asarray(centre[1]))
    reach = max(half) * 1.1 / frame.pixel + 2
    start_row, start_column = max(0, int(row - reach)), max(0, int(column - reach))
    stop_row, stop_column = max(0, int(row + reach) + 1), max(0, int(column + reach) + 1)
    return np.s_[start_row:stop_row, start_column:stop_column]


def _calcium(shadow: Shadow, rng: np.random.Generator, thorax: Thorax) -> None:
    """Now and then a healed granuloma: a few millimetres, very dense. With age a rim of chalk in the aortic arch."""
    p = thorax.patient
    for _ in range(int(rng.random() < 0.1) * int(rng.integers(1, 4))):
        x, y = rng.choice((-1, 1)) * p.width * rng.uniform(0.25, 0.8), rng.uniform(p.apex + 2, thorax.resting_domes[-1])
        shadow.dot((x, y), float(rng.uniform(0.12, 0.3)), 0.5)
    if p.years > 60 and rng.random() < 0.3:
        angle = np.linspace(-1.4, 0.9, 16)
        arch = [1.5 + 0.5 * p.knob + p.knob * np.cos(angle), -3.2 + 1.4 * p.knob * np.sin(angle)]
        shadow.line(np.column_stack(arch), 0.06, 0.5)


def _folds_and_scars(rng: np.random.Generator, frame: Frame, thorax: Thorax) -> Array | float:
    """Folds of clothing and skin, and thin scars in the lung."""
    p = thorax.patient
    shadow = Shadow(frame)
    if rng.random() < 0.15:  # clothing
        top, bend = rng.uniform(p.apex, 4), rng.normal(0, 2.0)
        for _ in range(int(rng.integers(2, 6))):
            t = np.linspace(0, 1, 12)
            x0, x1 = rng.uniform(-1.1, 1.1, 2) * p.width
            y = top + rng.uniform(0, 14) + t * rng.normal(0, 6) + bend * np.sin(np.pi * t)
            shadow.line(np.column_stack([x0 + (x1 - x0) * t, y]), float(rng.uniform(0.15, 0.5)), rng.uniform(0.3, 0.8))
    if rng.random() < 0.1:  # a scar
        side = rng.choice((-1, 1))
        start = np.array(
            [side * p.width * rng.uniform(0.3, 0.75), rng.uniform(p.apex + 3, thorax.resting_domes[-1] - 1)]
        )
        angle, length = rng.uniform(0, np.pi), rng.uniform(1.0, 3.5)
        t = np.linspace(0, 1, 6)[:, None]
        path = start + t * length * np.array([np.cos(angle), np.sin(angle)]) + 0.3 * np.sin(np.pi * t) * rng.normal()
        shadow.line(path, float(rng.uniform(0.06, 0.12)), rng.uniform(1.0, 2.5))
    soft: Array | float = 0.0 if shadow.empty else shadow.image()
    if rng.random() < (0.15 if thorax.pose.view == "AP" else 0.04):
        soft = soft + _skin_fold(rng, frame, thorax)
    return soft


def _skin_fold(rng: np.random.Generator, frame: Frame, thorax: Thorax) -> Array:
    """A fold of skin between body and film: dense at its edge, fading away from it over centimetres."""
    x, y = frame.grid
    p = thorax.patient
    side = np.float32(rng.choice((-1, 1)))
    bow = np.float32(rng.uniform(-0.015, 0.015))
    middle = y - np.float32(rng.uniform(-2, 6))
    edge = side * x - np.float32(p.width * rng.uniform(0.45, 0.9)) - np.float32(rng.normal(0, 0.15)) * y
    edge -= bow * middle * middle
    strength = np.float32(rng.uniform(0.5, 1.6))
    fading = np.exp(-np.maximum(edge, 0) * np.float32(0.5)) * smoothstep(edge * 4 + np.float32(0.5))
    return strength * fading * np.exp(-np.square(middle * np.float32(1 / 8)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Edges:
    """The film's own edges and letters: share of light (S, S) that the shutters let through, opacity of letters."""

    light: Array | None
    letters: Array | None
    border: Array | None  # 1 inside, 0 on the border
    border_grey: float

    def apply(self, image: Array) -> Array:
        """``image`` with shutters, border and letters."""
        if self.light is not None:
            image = image * self.light
        if self.border is not None:
            image = np.float32(self.border_grey) + (image - np.float32(self.border_grey)) * self.border
        if self.letters is not None:
            image = image + (np.float32(0.97) - image) * self.letters
        return image

    @property
    def visible(self) -> NDArray[np.bool_] | None:
        """Where the body can be seen, if not everywhere."""
        hiding = [layer > 0.5 for layer in (self.light, self.border) if layer is not None]
        return np.logical_and.reduce(hiding) if hiding else None


def draw_edges(rng: np.random.Generator, frame: Frame, thorax: Thorax) -> Edges:
    """Shutters, border and letters of a film."""
    light = _shutters(rng, frame, thorax) if rng.random() < 0.25 else None
    border, grey = None, 0.0
    if rng.random() < 0.15:
        steps = (np.arange(frame.size, dtype=np.float32) + 0.5) / frame.size
        margins = rng.uniform(0, 0.045, 4) * (rng.random(4) < 0.6)
        inside = [np.minimum(steps - low, 1 - high - steps) for low, high in (margins[:2], margins[2:])]
        shares = [np.clip(distance * np.float32(frame.size) + 0.5, 0, 1).astype(np.float32) for distance in inside]
        border, grey = shares[0][:, None] * shares[1], float(rng.choice([0.0, 0.0, 0.9, rng.uniform(0, 0.3)]))
    letters = _letters(rng, frame, thorax.pose.view) if rng.random() < 0.85 else None
    return Edges(light, letters, border, grey)


def _letters(rng: np.random.Generator, frame: Frame, view: str) -> Array:
    """Opacity (S, S) of lead letters: L on the image's right, R on its left, sometimes with the view below."""
    letter = str(rng.choice(["L", "R"]))
    height = rng.uniform(0.8, 1.9)
    aside = rng.uniform(0.31, 0.45) * (1 if letter == "L" else -1)
    level = rng.uniform(-0.46, -0.34) if rng.random() < 0.8 else rng.uniform(-0.3, 0.2)
    lean = np.deg2rad(rng.normal(0, 8))
    turn = np.array([[np.cos(lean), np.sin(lean)], [-np.sin(lean), np.cos(lean)]])
    x0, y0 = frame.at(aside, level)
    signs = [(letter, 0.0, 0.0, 1.0)]
    if rng.random() < 0.3:
        signs += [(sign, 0.15 + 0.3 * place, 1.25, 0.35) for place, sign in enumerate(view)]
    thick = rng.uniform(0.06, 0.1) * height
    lines = np.concatenate([_STROKES[sign] * small - 0.5 + [right, down] for sign, right, down, small in signs])
    lines = lines * height @ turn + [x0, y0]
    thin = np.concatenate([np.full(len(_STROKES[sign]), np.sqrt(small)) for sign, _, _, small in signs])
    shadow = Shadow(frame)
    flat = np.concatenate([lines, np.zeros((*lines.shape[:2], 1))], axis=-1)
    shadow.add(flat, np.repeat(thick * thin[:, None], lines.shape[1], axis=1))
    return np.clip(shadow.image() * np.float32(rng.uniform(0.6, 1.0) / (1.5 * thick)), 0, 1)  # type: ignore[no-any-return]


def _shutters(rng: np.random.Generator, frame: Frame, thorax: Thorax) -> Array:
    """Share of light (S, S) the collimator lets through; its edge never cuts into the lungs."""
    p = thorax.patient
    x, y = frame.grid
    tilt = np.float32(rng.normal(0, 0.012))
    across, down = x + tilt * y, y - tilt * x
    left, right = (side * (p.width + rng.uniform(1.5, 7)) for side in (-1, 1))
    top, bottom = p.apex - rng.uniform(1.5, 4.5), thorax.base + rng.uniform(2.0, 9)
    inside = np.minimum(
        np.minimum(across - np.float32(left), np.float32(right) - across),
        np.minimum(down - np.float32(top), np.float32(bottom) - down),
    )
    return smoothstep(inside * np.float32(1 / 0.35) + np.float32(0.5))  # type: ignore[no-any-return]

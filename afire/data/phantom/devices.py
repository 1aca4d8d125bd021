"""Devices on and in the body: tubes, catheters, pacemakers, wires, leads, jewellery. None of them is a disease.

Each adds its attenuation to a shadow. Strengths are attenuations per centimetre.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from afire.data.phantom.physics import Floats
from afire.data.phantom.thorax import Thorax
from afire.data.phantom.tubes import Shadow

Draw = Callable[[Shadow, np.random.Generator, Thorax], None]


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

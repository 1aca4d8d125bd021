"""Bones: ribs and spine by formula, collar bones, shoulder blades and upper arms as tubes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afire.data.phantom.anatomy import SIDES
from afire.data.phantom.physics import Array, Frame, Shadow, bow, dome, smoothstep
from afire.data.phantom.thorax import Thorax

_RIBS = 12
_FRONT_RIBS = 8  # the lower ones end before they reach the front
_CELLS = 256
_Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Bones:
    """Path length (S, S) through all bones, and where some of them are."""

    path: Array
    ribs: _Bools
    clavicles: _Bools
    spine: _Bools


def bones(frame: Frame, thorax: Thorax) -> Bones:
    """All bones of ``thorax`` as they fall on the film."""
    ribs = _ribs(frame, thorax)
    clavicles = _clavicles(frame, thorax)
    total = ribs + clavicles + _shoulders(frame, thorax)
    total += _blade_plates(frame, thorax)
    column = _add_spine(total, frame, thorax)
    return Bones(np.float32(thorax.patient.bone) * total, ribs > 0.02, clavicles > 0.1, column)


def _ribs(frame: Frame, thorax: Thorax) -> Array:
    """Path length through the ribs: each a tilted ring from the spine around to the front.

    All ribs of a half of the ring are one family of curves, so a pixel asks which curve is next to it and how far away.
    """
    p = thorax.patient
    x, y = frame.grid
    x = thorax.wall_x(x, y)
    ring = thorax.lateral(y) + np.float32(0.5)
    across = np.clip(np.abs(x) / ring, 0, 1)
    turned = np.sqrt(np.clip(1 - across * across, 0.004, 1))  # 1 seen from behind, 0 seen along the wall
    steep = across / turned
    depth = np.float32(min(0.62, (p.depth + 0.6) / p.width))
    grazing = np.sqrt(1 + np.square(depth * steep))  # rays run along a rib at the wall
    fall = np.float32(p.rib_drop / 2) * (np.float32(0.55) + np.float32(0.45) * smoothstep((y - p.apex) * 0.1))
    outwards = np.float32(p.rib_slope)
    inside = smoothstep((ring + np.float32(0.45) - np.abs(x)) * 2) * smoothstep(
        (np.float32(thorax.base + 4) - y) * 0.25
    )
    left = (x > 0) * np.int8(_RIBS)
    per_cm = np.float32(1 / p.rib_spacing)
    start = np.float32(p.apex + 0.3 + p.rib_offset)

    down = outwards * across * (np.float32(0.2) + np.float32(0.8) * across)
    front = down + fall * (1 + turned) + np.float32(0.8 * p.rib_slope) * (1 - across)
    down += fall * (1 - turned)
    # the neck of a rib rises a little before it falls
    down -= np.float32(0.5) * smoothstep((across - 0.1) * 6) * (1 - across)
    tilt = np.sqrt(1 + np.square((outwards * (np.float32(0.2) + np.float32(1.6) * across) + fall * steep) / ring))
    place = (y - down - start) * per_cm
    strength = np.clip(grazing, 1, 2.6) * smoothstep((across - 0.09) * 20) * inside
    # the last two end in the flank
    strength *= smoothstep((np.float32(1.4) - across - np.float32(0.4) * np.clip(place - 9, 0, 9)) * 5)
    back = _family(thorax, place, left, tilt, 1.0, _RIBS) * strength

    tilt = np.sqrt(1 + np.square((fall * steep + np.float32(0.2) * outwards) / ring))
    # towards the breastbone a rib ends in cartilage
    strength = np.clip(grazing, 1, 1.6) * smoothstep((across - 0.42) * 6) * inside
    front = _family(thorax, (y - front - start) * per_cm, left, tilt, 1.05, _FRONT_RIBS) * strength
    return np.float32(0.85) * back + np.float32(0.42 - 0.12 * p.young) * front  # type: ignore[no-any-return]


def _family(thorax: Thorax, place: Array, left: NDArray[np.int8], tilt: Array, stout: float, count: int) -> Array:
    """Thickness (S, S) of ribs whose middles lie where ``place`` is a whole number below ``count``."""
    p = thorax.patient
    nearest = np.rint(place)
    number = np.clip(nearest, 0, count - 1).astype(np.int8)
    shift = np.array(p.rib_jitter, dtype=np.float32) * np.float32(1 / p.rib_spacing)
    off = np.abs(place - nearest + shift.take(number + left))
    off *= np.float32(_CELLS * p.rib_spacing / (p.rib_half * stout)) / tilt
    profile = _RIB_PROFILE.take(np.clip(off, 0, _CELLS).astype(np.int32))
    return profile * _STOUT.take(number) * (nearest == number)  # type: ignore[no-any-return]


def _rib_profile() -> Array:
    """Thickness in cm from a rib's middle to its edge: a shell around a spongy core; 0 at the end."""
    at = np.linspace(0, 1, _CELLS + 1)
    shell = np.sqrt(1 - at**2) - 0.62 * np.sqrt(np.clip(0.8**2 - at**2, 0, None))
    shell[-1] = 0
    return shell.astype(np.float32)


_RIB_PROFILE = _rib_profile()
_STOUT = np.array([0.8, 1.05, 0.95, 1.0, 1.1, 0.95, 1.0, 1.05, 0.9, 0.85, 0.7, 0.5], dtype=np.float32)


def _clavicles(frame: Frame, thorax: Thorax) -> Array:
    p = thorax.patient
    curve = np.linspace(0, 1, 24)
    lifted = 1.6 if thorax.pose.view == "AP" else 0.0  # from the front they project above the lung tops
    collar = []
    for side in SIDES:
        joint_x, joint_y = thorax.shoulder_joint(side)
        inner_y, outer_y = p.apex + 4.3 - lifted, joint_y - 2.4 + 0.25 * p.clavicle - 0.5 * lifted
        x = side * (1.9 + (abs(joint_x) - 3.1) * curve)
        y = inner_y + (outer_y - inner_y) * curve - 0.7 * np.sin(2 * np.pi * curve) * (1 - 0.3 * curve)
        collar.append(np.stack([x, y, 6.5 - 6 * curve**1.4], axis=-1))
    stout = np.interp(curve, [0, 0.03, 0.08, 0.3, 0.8, 0.95, 1], [0.5, 0.9, 0.85, 0.6, 0.58, 0.7, 0.3])
    shadow = Shadow(frame)
    shadow.add(np.stack(collar), np.tile(stout, (2, 1)), wall=0.35, strength_KN=1.0)
    return shadow.image()


def _shoulders(frame: Frame, thorax: Thorax) -> Array:
    """Borders and spines of the shoulder blades, upper arms."""
    p = thorax.patient
    curve, fine = np.linspace(0, 1, 24), np.linspace(0, 1, 76)
    blade, arm = [], []
    for side in SIDES:
        joint_x, joint_y = thorax.shoulder_joint(side)
        elbow_x, elbow_y = thorax.elbow(side)
        top, tip = joint_y - 0.6, joint_y + 12.0
        inner, low = side * _blade_inner(thorax), side * (_blade_inner(thorax) + 0.12 * p.width)
        blade.append(bow((inner, top, -7), (inner + side * 0.2, top + 6, -7), (low, tip, -7)))
        blade.append(bow((low, tip, -7), (low + side * 2.4, top + 6, -6), (joint_x - side * 1.8, top + 2.6, -3)))
        blade.append(bow((inner, top + 2.4, -8), (inner + side * 4, top, -7), (joint_x - side * 0.3, top - 1.6, -4)))
        arm.append(
            np.array([joint_x, joint_y - 1, 0]) + 0.85 * fine[:, None] * [elbow_x - joint_x, elbow_y - joint_y, 0]
        )
    shadow = Shadow(frame)
    fading = np.tile(np.sqrt(np.sin(np.pi * np.clip(curve, 0.04, 0.96))), (len(blade), 1))
    fading *= np.tile([0.6, 1.2, 1.0], 2)[:, None]
    shadow.add(np.stack(blade), np.full(fading.shape, 0.42), wall=0.6, strength_KN=fading)
    shaft = 1.1 + 1.3 * np.exp(-(((fine - 0.05) / 0.065) ** 2)) - 1.2 * np.exp(-((fine / 0.02) ** 2))
    shadow.add(np.stack(arm), np.tile(shaft, (2, 1)), wall=0.3, strength_KN=0.8)
    return shadow.image()


def _blade_inner(thorax: Thorax) -> float:
    """|x| of a shoulder blade's inner border."""
    return thorax.patient.width * (0.92 - 0.24 * thorax.pose.wings)


def _blade_plates(frame: Frame, thorax: Thorax) -> Array:
    """The thin plates of the shoulder blades: a triangle between inner border, outer border and spine."""
    x, y = frame.grid
    inner = np.float32(_blade_inner(thorax))
    across = np.abs(x - np.float32(frame.turned(-7)))
    joint_x, joint_y = thorax.shoulder_joint(1)
    tilt = np.float32(2 * thorax.patient.tilt) * (x < 0)
    top, joint = np.float32(joint_y - 0.6) - tilt, np.float32(joint_x - 1.8)
    down = y - top
    outer = joint - (joint - inner - np.float32(0.12 * thorax.patient.width)) * (down - 2) * np.float32(1 / 10.0)
    edge = np.minimum(np.minimum(across - inner, outer - across), np.minimum(down, np.float32(12.0) - down))
    return np.float32(0.4) * smoothstep(edge * np.float32(1 / 0.8))  # type: ignore[no-any-return]


def _add_spine(bone: Array, frame: Frame, thorax: Thorax) -> _Bools:
    """Add vertebrae with their discs, pedicles and spinous processes, and the breastbone, in place; where they are."""
    p = thorax.patient
    middle, _ = frame.project(np.zeros(1), np.full(1, frame.centre[1]))
    reach = int((6.5 + p.bend[0]) / frame.extent[0] * frame.size)
    band = np.s_[:, max(0, int(middle[0]) - reach) : int(middle[0]) + reach]  # nothing of it lies further out
    x, y = (grid[band] for grid in frame.grid)
    across = x - thorax.spine(y)
    aside = np.abs(across)
    half = np.float32(1.6) + np.float32(0.022) * (y - np.float32(p.apex))
    spacing = np.float32(0.97 * p.rib_spacing)
    # phase 0 in the middle of a vertebra, 0.5 in a disc
    place = (y - np.float32(p.apex)) / spacing + np.float32(p.rib_offset)
    phase = place - np.rint(place)
    level = phase * spacing
    disc = smoothstep((np.abs(phase) - np.float32(0.33)) * np.float32(1 / 0.13))
    waist = half * (1 - np.float32(0.08) * (1 - 4 * phase * phase))
    column = np.float32(0.75) * dome(np.square(np.square(across / waist))) * (1 - np.float32(0.4) * disc)
    column += 0.1 * np.exp(-np.square((aside - waist + np.float32(0.2)) * 5)) * (1 - disc)
    rows = np.square(level)
    column += 0.28 * np.exp(-np.square((aside - 0.62 * half) * np.float32(1 / 0.3)) - rows * np.float32(1 / 0.2))
    column += 0.25 * np.exp(
        -np.square(across * np.float32(1 / 0.28)) - np.square((level - 0.22 * spacing) * np.float32(1 / 0.7))
    )
    column += 0.14 * np.exp(-np.square((aside - half - np.float32(0.7)) * np.float32(1 / 0.9)) - rows * np.float32(3.3))
    front = (x - np.float32(frame.turned(7))) * np.float32(0.5)
    along = smoothstep((y - np.float32(p.apex + 4)) * np.float32(0.5)) * smoothstep((8 - y) * np.float32(0.25))
    bone[band] += column + np.float32(0.12) * dome(np.square(np.square(front))) * along
    where = np.zeros(bone.shape, dtype=bool)
    where[band] = aside < waist
    return where

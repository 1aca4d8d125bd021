"""Bones, airways and vessels: tubes in space, placed in three dimensions so that a turn moves their shadows rightly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afire.data.phantom.anatomy import SIDES, Patient, Thorax
from afire.data.phantom.physics import Array, Floats, Frame, dome, smoothstep

_GOLDEN = 0.6180339887
_RIBS = 11
Point = tuple[float, float, float]
Tree = tuple[Floats, Floats]  # segments (K, 2, 3) and radii (K, 2)


def bones(frame: Frame, thorax: Thorax) -> Array:
    """Path length through all bones, (S, S), for bone of ordinary density."""
    shadow = Shadow(frame)
    _ribs(shadow, thorax)
    _shoulders(shadow, thorax)
    bone = shadow.image() + _blade_plates(frame, thorax)
    _add_spine(bone, frame, thorax)
    return np.float32(thorax.patient.bone) * bone


def _ribs(shadow: Shadow, thorax: Thorax) -> None:
    """Each rib is a tilted half-ring from the spine around to the front."""
    p = thorax.patient
    number = np.arange(_RIBS)
    spacing = (p.dome - p.apex - 1.0) / 9.2
    level = p.apex + 1.0 + p.rib_offset + spacing * number
    drop = p.rib_drop * np.array([0.45, 0.62, 0.76, 0.87, 0.95, 1.0, 1.03, 1.05, 1.05, 1.0, 0.9])
    ring = np.minimum(thorax.lateral(level + 0.5 * drop) + 0.25, p.width + 0.3)
    # each begins beside the spine, at its own angle on its own ring
    start = np.arcsin(np.clip(1.9 / ring, 0, 1)) / np.pi
    angle = (start[:, None] + (0.8 - start[:, None]) * np.linspace(0, 1, 48)) * np.pi
    sine, cosine = np.sin(angle), np.cos(angle)
    # the neck of a rib rises a little before it falls
    y = level[:, None] + 0.5 * drop[:, None] * (1 - cosine) - 0.5 * np.sin(2 * angle) * (angle < 0.5 * np.pi)
    z = -np.minimum(0.62 * ring, p.depth + 0.6)[:, None] * cosine
    half = p.rib_half * np.interp(angle / np.pi, [0.1, 0.35, 0.5, 0.62, 1], [0.8, 1.0, 0.62, 1.05, 1.15])
    strength = np.interp(angle / np.pi, [0, 0.5, 0.62, 0.72, 0.8], [0.62, 0.45, 0.36, 0.3, 0.0])
    strength = strength * np.where(number < 9, 1, 0.75)[:, None]
    points = []
    for side in SIDES:
        x = side * ring[:, None] * sine + thorax.spine(y) * (1 - sine) * (cosine > 0)
        points.append(np.stack([x, y, z], axis=-1))
    both = np.concatenate(points)
    shadow.add(both, np.tile(half, (2, 1)), wall=0.26, strength_KN=np.tile(strength, (2, 1)))


def _shoulders(shadow: Shadow, thorax: Thorax) -> None:
    """Collar bones, borders and spines of the shoulder blades, upper arms."""
    p = thorax.patient
    curve, fine = np.linspace(0, 1, 24), np.linspace(0, 1, 90)
    collar, blade, arm = [], [], []
    for side in SIDES:
        joint_x, joint_y = thorax.shoulder_joint(side)
        elbow_x, elbow_y = thorax.elbow(side)
        inner_y, outer_y = p.apex + 4.3, joint_y - 2.4 + 0.25 * p.clavicle
        x = side * (2.0 + (abs(joint_x) - 3.2) * curve)
        y = inner_y + (outer_y - inner_y) * curve - 0.7 * np.sin(2 * np.pi * curve) * (1 - 0.3 * curve)
        collar.append(np.stack([x, y, 6.5 - 6 * curve**1.4], axis=-1))
        top, tip = joint_y - 0.6, joint_y + 12.5
        inner, low = side * p.width * 0.72, side * p.width * 0.82
        blade.append(_bow((inner, top, -7), (inner + side * 0.2, top + 6, -7), (low, tip, -7)))
        blade.append(_bow((low, tip, -7), (low + side * 2.6, top + 6, -6), (joint_x - side * 1.8, top + 2.6, -3)))
        blade.append(_bow((inner, top + 2.4, -8), (inner + side * 4, top, -7), (joint_x - side * 0.3, top - 1.6, -4)))
        arm.append(np.array([joint_x, joint_y - 1, 0]) + fine[:, None] * [elbow_x - joint_x, elbow_y - joint_y, 0])
    stout = np.interp(curve, [0, 0.03, 0.08, 0.3, 0.8, 0.95, 1], [0.4, 0.8, 0.8, 0.5, 0.5, 0.6, 0.2])
    shadow.add(np.stack(collar), np.tile(stout, (2, 1)), wall=0.4, strength_KN=1.0)
    fading = np.tile(0.7 * np.sqrt(np.sin(np.pi * np.clip(curve, 0.04, 0.96))), (len(blade), 1))
    shadow.add(np.stack(blade), np.full(fading.shape, 0.4), wall=0.6, strength_KN=fading)
    shaft = 1.05 + 1.1 * np.exp(-(((fine - 0.035) / 0.05) ** 2)) - 0.9 * np.exp(-((fine / 0.02) ** 2))
    shadow.add(np.stack(arm), np.tile(shaft, (2, 1)), wall=0.3, strength_KN=0.7)


def _bow(first: Point, middle: Point, last: Point) -> Floats:
    """24 points on the parabola through three, (24, 3)."""
    t = np.linspace(0, 1, 24)[:, None]
    result: Floats = (
        np.asarray(first) * (1 - t) * (1 - 2 * t)
        + np.asarray(middle) * 4 * t * (1 - t)
        + np.asarray(last) * t * (2 * t - 1)
    )
    return result


def _blade_plates(frame: Frame, thorax: Thorax) -> Array:
    """The thin plates of the shoulder blades: a triangle between inner border, outer border and spine."""
    x, y = frame.grid
    inner = np.float32(0.72 * thorax.patient.width)
    plate = np.zeros_like(x)
    for side in SIDES:
        joint_x, joint_y = thorax.shoulder_joint(side)
        top, joint = np.float32(joint_y - 0.6), np.float32(abs(joint_x) - 1.8)
        across = side * (x - frame.turned(-7))
        outer = joint - (joint - np.float32(0.84 * thorax.patient.width)) * (y - top - 2) / np.float32(10.5)
        sides = np.minimum(across - inner, outer - across)
        edge = np.minimum(sides, np.minimum(y - top, top + np.float32(12.5) - y))
        plate += np.float32(0.3) * smoothstep(edge / 0.8)
    return plate


def _add_spine(bone: Array, frame: Frame, thorax: Thorax) -> None:
    """Add vertebrae with their discs, pedicles and spinous processes, and the breastbone, in place."""
    p = thorax.patient
    middle, _ = frame.project(np.zeros(1), np.full(1, frame.centre[1]))
    reach = int(6.5 / frame.extent[0] * frame.size)
    band = np.s_[:, max(0, int(middle[0]) - reach) : int(middle[0]) + reach]  # nothing of it lies further out
    x, y = (part[band] for part in frame.grid)
    across = x - thorax.spine(y)
    aside = np.abs(across)
    half = np.float32(1.7) + np.float32(0.022) * (y - np.float32(p.apex))
    spacing = np.float32(2.1 + 0.02 * (p.dome - p.apex))
    # phase 0 in the middle of a vertebra, 0.5 in a disc
    phase = np.mod((y - np.float32(p.apex)) / spacing + np.float32(p.rib_offset), 1) - np.float32(0.5)
    level = phase * spacing
    disc = smoothstep((np.abs(phase) - 0.33) / 0.13)
    waist = half * (1 - 0.08 * (1 - 4 * phase * phase))
    column = 0.6 * dome(np.square(np.square(across / waist))) * (1 - 0.4 * disc)
    column += 0.08 * np.exp(-(((aside - waist + 0.2) / 0.2) ** 2)) * (1 - disc)
    column += 0.22 * np.exp(-(((aside - 0.62 * half) / 0.3) ** 2) - (level / 0.45) ** 2)
    column += 0.2 * np.exp(-((across / 0.28) ** 2) - ((level - 0.22 * spacing) / 0.7) ** 2)
    column += 0.12 * np.exp(-(((aside - half - 0.7) / 0.9) ** 2) - (level / 0.55) ** 2)
    front = (x - np.float32(frame.turned(7))) / np.float32(2.0)
    along = smoothstep((y - np.float32(p.apex + 4)) / 2) * smoothstep((8 - y) / 4)
    bone[band] += column + 0.12 * dome(np.square(np.square(front))) * along


def airway(frame: Frame, thorax: Thorax) -> Array:
    """Path length through the air of windpipe and main bronchi."""
    x, y = frame.grid
    right = _bow((-0.45, 0, -2), (-1.7, 1.5, -2), (-3.4, 3.9, -2))
    left = _bow((-0.05, 0, -2), (1.8, 1.2, -2), (4.3, 2.9, -2))
    radius = np.stack([np.linspace(0.7, 0.5, 24), np.linspace(0.62, 0.45, 24)])
    bronchi = tubes(frame, np.stack([right, left]), radius)
    # the windpipe runs along the pixels' columns, where sampled tubes would show stripes: a formula does not
    half = np.float32(0.8 if thorax.patient.female else 0.92)
    lean = np.float32(-0.02) * (y - np.float32(thorax.patient.apex)) + np.float32(frame.turned(-1))
    pipe = 2 * half * dome(((x - lean) / half) ** 2) * smoothstep(0.7 - y)
    return bronchi + pipe  # type: ignore[no-any-return]


def vessel_tree(rng: np.random.Generator, patient: Patient, base: float) -> Tree:
    """The lung vessels of both sides, branching from the hila outwards."""
    starts, headings, calibres = [], [], []
    for side, top in ((-1, 0.2), (1, -0.9)):
        place = np.linspace(0, 1, 13)  # along the hilum, from its top to the lower lobe
        fan = np.interp(place, [0, 0.3, 0.6, 1], [-80, -20, 35, 86]) + rng.normal(0, 9, 13)
        angle = np.deg2rad(fan)  # from straight outwards, downwards positive
        starts.append(np.column_stack([side * (2.9 + 1.5 * place), top + 5.4 * place**1.2]))
        headings.append(np.where(side > 0, angle, np.pi - angle))
        stout = np.interp(place, [0, 0.4, 0.75, 1], [0.36, 0.33, 0.42, 0.46]) * patient.branching
        calibres.append(stout * rng.uniform(0.75, 1.2, 13))
    start: Floats = np.concatenate(starts)
    heading: Floats = np.concatenate(headings)
    calibre: Floats = np.concatenate(calibres)
    scale = (base - patient.apex) / 27
    segments: list[Floats] = []
    radii: list[Floats] = []
    for generation in range(6):
        length = rng.uniform(1.7 * scale, 3.3 * scale, heading.size) * 0.93**generation
        middle = heading + rng.normal(0, 0.12, heading.shape)
        stop = start + np.column_stack([length * np.cos(middle), length * np.sin(middle)])
        thin = calibre * 0.86
        segments.append(np.stack([start, stop], axis=1))
        radii.append(np.stack([calibre, thin], axis=1))
        spread = rng.uniform(0.14, 0.5, (2, heading.size)) * np.array([[1], [-1]])
        share = rng.uniform(0.66, 0.95, (2, heading.size))
        splits = rng.random(heading.size) < (0.75 if generation else 1.0)
        main = np.where(splits, middle + spread[0] * 0.6, middle)
        start = np.concatenate([stop, stop[splits]])
        heading = np.concatenate([main, middle[splits] + spread[1][splits]])
        calibre = np.concatenate([thin * np.where(splits, share[0], 0.95), (thin * share[1] * 0.85)[splits]])
    lines, widths = np.concatenate(segments), np.concatenate(radii)
    return np.concatenate([lines, np.zeros((*lines.shape[:2], 1))], axis=-1), widths


def place_vessels(tree: Tree, thorax: Thorax) -> Tree:
    """The branches that lie in this film's lungs; a shallow breath pushes the lower ones together."""
    points, radius = tree
    placed = points.copy()
    placed[..., 1] *= np.where(points[..., 1] > 0, 1 - 0.045 * thorax.pose.breath, 1)
    ends = placed[..., :2].astype(np.float32)
    aerated = (thorax.look(ends[..., 0], ends[..., 1]).lung > 0).any(axis=1)
    return placed[aerated], radius[aerated]


def vessels(frame: Frame, tree: Tree) -> Array:
    """Path length through the lung vessels and the soft shadow of the hila."""
    points, radius = tree
    shadow = Shadow(frame)
    # tubes added together share the sampling of the thickest, so thin ones are added apart
    for low, high in ((0.0, 0.09), (0.09, 0.18), (0.18, 0.36), (0.36, 9.0)):
        group = (radius[:, 0] >= low) & (radius[:, 0] < high)
        if group.any():
            shadow.add(points[group], radius[group])
    return shadow.image() + _hilar_haze(frame)


def _hilar_haze(frame: Frame) -> Array:
    """Around the hila many small vessels and nodes add up to a soft shadow."""
    x, y = frame.grid
    haze = np.zeros_like(x)
    for centre_x, centre_y in ((-3.9, 2.2), (3.9, 1.0)):
        haze += np.exp(-(((x - np.float32(centre_x)) / 1.5) ** 2) - ((y - np.float32(centre_y)) / 2.4) ** 2)
    return np.float32(2.2) * haze


class Shadow:
    """Path length (cm) through tubes along polylines, summed pixel by pixel.

    Matter is spread onto the pixels it falls on, so a tube seen end-on is as dense as it should be. The samples of all
    tubes are collected and spread at once, at the end.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._rows: list[Floats] = []
        self._columns: list[Floats] = []
        self._mass: list[Floats] = []

    def add(
        self, points_KN3: Floats, radius_KN: Floats, *, wall: float = 1.0, strength_KN: Floats | float = 1.0
    ) -> None:
        """Add K tubes of N points each. ``wall`` is the solid share of the radius: 1 is a rod, 0.3 a hollow bone."""
        frame = self.frame
        points, radius, strength = _resample(frame.pixel, points_KN3, radius_KN, strength_KN)
        x = points[..., 0] + points[..., 2] * np.float32(np.sin(frame.yaw))
        y = points[..., 1]
        step_x, step_y, step_z = _steps(x), _steps(y), _steps(points[..., 2])
        flat = np.hypot(step_x, step_y) + np.float32(1e-6)
        lanes = max(1, int(np.ceil(2 * float(radius.max()) / frame.pixel)))
        # Lanes swing by a low-discrepancy sequence, else their lattice beats against the pixels' as stripes.
        swing = 0.9 * (np.mod(np.arange(x.shape[1])[:, None] * _GOLDEN, 1) - 0.5)
        across = ((np.arange(lanes) + 0.5 + swing) / lanes * 2 - 1).astype(np.float32)  # (N, J) in radii
        chord = np.sqrt(np.clip(1 - across**2, 0, None))
        if wall < 1:
            chord -= np.float32(0.75) * np.sqrt(np.clip(np.float32((1 - wall) ** 2) - across**2, 0, None))
        length = np.sqrt(flat * flat + step_z * step_z)
        pixel_area = frame.extent[0] * frame.extent[1] / frame.size**2
        mass = (radius * radius * strength * length * np.float32(4 / lanes / pixel_area))[..., None] * chord
        # The projection is affine: project the centre line and one side of the tube, interpolate between lanes.
        column, row = frame.project(x, y)
        side_column, side_row = frame.project(x - radius * step_y / flat, y + radius * step_x / flat)
        self._columns.append((column[..., None] + (side_column - column)[..., None] * across).ravel())
        self._rows.append((row[..., None] + (side_row - row)[..., None] * across).ravel())
        self._mass.append(mass.ravel())

    def image(self) -> Array:
        """The sum of all tubes added, (S, S)."""
        size = self.frame.size
        if not self._mass:
            return np.zeros((size, size), dtype=np.float32)
        # A margin takes what falls beside the film: one pixel before, two behind, cut off at the end.
        margin = np.zeros((size + 3, size + 3), dtype=np.float32)
        rows = np.clip(np.concatenate(self._rows) + np.float32(1), 0, size + 1)
        columns = np.clip(np.concatenate(self._columns) + np.float32(1), 0, size + 1)
        # Only the part between the outermost samples: a letter should not cost as much as the ribs.
        top, left = int(rows.min()), int(columns.min())
        part = _spread(rows - np.float32(top), columns - np.float32(left), np.concatenate(self._mass))
        margin[top : top + part.shape[0], left : left + part.shape[1]] = part
        return margin[1:-2, 1:-2]


def tubes(frame: Frame, points_KN3: Floats, radius_KN: Floats) -> Array:
    """Path length through solid tubes as an (S, S) image."""
    shadow = Shadow(frame)
    shadow.add(points_KN3, radius_KN)
    return shadow.image()


def _spread(rows: Floats, columns: Floats, mass: Floats) -> NDArray[np.float64]:
    """Add each mass to its four nearest pixels, in proportion to nearness; just large enough to hold them all."""
    top, left = rows.astype(np.int32), columns.astype(np.int32)
    high, wide = int(top.max()) + 2, int(left.max()) + 2
    cells = top * np.int32(wide) + left
    right_mass = mass * (columns - left)
    low = rows - top
    total = np.zeros(high * wide)
    for shift, part in ((0, mass - right_mass), (1, right_mass)):
        low_part = part * low
        for further, weights in ((shift, part - low_part), (shift + wide, low_part)):
            sums = np.bincount(cells, weights=weights)
            total[further : further + sums.size] += sums
    return total.reshape(high, wide)


def _steps(along_KN: Floats) -> Floats:
    """Central differences along the last axis; numpy.gradient costs three times as much here."""
    steps = np.empty_like(along_KN)
    steps[:, 1:-1] = (along_KN[:, 2:] - along_KN[:, :-2]) * np.float32(0.5)
    steps[:, 0], steps[:, -1] = along_KN[:, 1] - along_KN[:, 0], along_KN[:, -1] - along_KN[:, -2]
    return steps


def _resample(step: float, points: Floats, radius: Floats, strength: Floats | float) -> tuple[Floats, Floats, Floats]:
    """Interpolate polylines so finely that neighbouring samples lie at most ``step`` cm apart."""
    kinks = points.shape[1]
    longest = float(np.linalg.norm(np.diff(points, axis=1), axis=2).sum(axis=1).max())
    count = max(kinks, int(np.ceil(longest / step)) + 1)
    place = np.linspace(0, kinks - 1, count)
    left = np.minimum(place.astype(np.int64), kinks - 2)
    share = (place - left).astype(np.float32)

    def along(values: Floats) -> Floats:
        weight = share.reshape(-1, *[1] * (values.ndim - 2))
        start, stop = values[:, left], values[:, left + 1]
        result: Floats = start + (stop - start) * weight
        return result

    full = np.broadcast_to(np.asarray(strength, dtype=np.float32), radius.shape)
    return along(points.astype(np.float32)), along(radius.astype(np.float32)), along(full)

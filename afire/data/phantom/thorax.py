"""The soft parts of one patient in one pose, as they project: body, lungs, heart, mediastinum, diaphragm.

Every function takes body coordinates of any shape and returns path lengths in centimetres of water or of lung.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from afire.data.phantom.anatomy import SIDES, Patient, Pose
from afire.data.phantom.physics import Contour, Curve, Frame, dome, smoothstep

# Outline of a heart of ordinary size: right atrium, base, pulmonary trunk, left appendage, apex, underside.
_HEART_CENTRE = (1.5, 6.3)
_HEART_POINTS = np.array(
    [
        (-4.1, 6.9),
        (-3.7, 4.6),
        (-3.1, 2.4),
        (-2.2, 0.0),
        (0.4, -1.4),
        (2.9, -0.7),
        (4.2, 1.6),
        (5.5, 4.2),
        (6.9, 6.8),
        (7.8, 9.2),
        (7.9, 11.1),
        (6.5, 12.5),
        (3.0, 12.9),
        (-0.5, 12.5),
        (-3.1, 11.4),
        (-4.0, 9.3),
    ]
)
_STRAIGHT = 0.5  # cm: a spine that bends less moves nothing else
# From a lung's top to its base: half-widths of the chest to the wall and to the inner edge, half-depths of the lung.
_LEVELS = np.array([-0.02, 0, 0.008, 0.03, 0.07, 0.13, 0.22, 0.34, 0.5, 0.7, 0.88, 1.0, 1.5])
_LATERAL = np.array([0.4, 0.4, 0.475, 0.545, 0.625, 0.71, 0.80, 0.875, 0.94, 0.98, 1.0, 0.99, 0.95])
_LATERAL_CHILD = np.array([0.4, 0.4, 0.455, 0.52, 0.59, 0.675, 0.765, 0.855, 0.93, 0.98, 1.0, 1.0, 0.95])
_MEDIAL = np.array([0.4, 0.4, 0.33, 0.27, 0.2, 0.12, -0.05, -0.4, -1.0, -1.0, -1.0, -1.0, -1.0])
_DEPTH = np.array([0.0, 0.0, 0.2, 0.38, 0.55, 0.7, 0.84, 0.94, 1.0, 1.0, 0.97, 0.94, 0.9])


@dataclass(frozen=True)
class Inside:
    """The chest's inside where it was looked at."""

    cavity: Any  # path length through all that is not wall
    heart_reach: Any  # below 1 in the heart's silhouette
    heart_share: Any  # how much of the heart's full depth: its base fades into the great vessels
    mediastinum: Any  # path length
    behind: Any  # 0 above the diaphragm's silhouette, 1 where only the back of the lung is left
    depth: float

    @cached_property
    def lung(self) -> Any:
        """Path length through lung, after heart and mediastinum have taken their place."""
        reach = np.square(self.heart_reach)
        heart = np.float32(1.55 * self.depth) * dome(reach * np.sqrt(reach)) * self.heart_share
        # below the diaphragm only the back of the lung is left, behind the heart
        whole = _union(heart, self.mediastinum)
        displaced = whole + (0.3 * self.mediastinum - whole) * self.behind
        return np.clip(self.cavity - displaced, 0, 99)

    @cached_property
    def heart(self) -> Any:
        """The heart's silhouette above the diaphragm."""
        return (self.heart_reach <= 1) & (self.behind <= 0)

    @cached_property
    def middle(self) -> Any:
        """The mediastinum beside the heart, above the diaphragm."""
        return (self.mediastinum >= 0.4 * self.depth) & (self.behind <= 0) & ~self.heart

    @cached_property
    def field(self) -> Any:
        """Where a reader would outline the lungs: beside heart and mediastinum, above the diaphragm."""
        air = (self.cavity > 0.28 * self.depth) & (self.behind <= 0)
        return air & (self.heart_reach > 1) & (self.mediastinum < 0.4 * self.depth)


class Thorax:
    """The soft parts of one patient in one pose."""

    def __init__(self, patient: Patient, pose: Pose, enlarged: float | None = None, flattened: float = 0.0) -> None:
        """``enlarged`` is a heart's width over the chest's that replaces the patient's own; ``flattened`` are the
        centimetres by which overinflated lungs push the diaphragm down."""
        self.patient, self.pose, self.flattened = patient, pose, flattened
        p = patient
        resting = {-1: p.dome - pose.breath, 1: p.dome + p.dome_gap - 0.9 * pose.breath}
        self.resting_domes = resting
        self.base = max(resting.values()) + 4.2 - 1.2 * p.young  # level of the costophrenic angles
        self.domes = {side: level + flattened for side, level in resting.items()}
        level = p.apex + (self.base - p.apex) * _LEVELS
        lateral = _LATERAL + (_LATERAL_CHILD - _LATERAL) * p.young
        self.lateral = Curve(level, p.width * lateral)
        self._medial = Curve(level, p.width * _MEDIAL)
        self._half_depth = Curve(level, p.depth * _DEPTH)
        self._top = 0.4 * p.width  # |x| of a lung's top
        self.heart = self._heart(enlarged, resting[1])
        self._torso_width, self._torso_depth = self._torso()
        wide, child = 0.5 * (1 + pose.magnified), p.thymus
        self._right_edge = Curve(
            [p.apex - 2, p.apex + 2, -5, -2, 0, 4, 14],
            [-4.4 * wide, -2.6 * wide, -2.0 * wide - 0.6 * child, -2.3 * wide - 0.8 * child, -2.7, -2.1, -2.0],
        )
        self._left_edge = Curve(
            [p.apex - 2, p.apex + 2, -6, -3, 2, 8, 14],
            [4.2 * wide, 2.5 * wide, 2.0 * wide + 0.4 * child, 2.0 * wide + 0.9 * child, 2.5, 2.0, 1.9],
        )
        self._aorta_x = Curve([-4, -1, 6, 14], [1.5 + 0.5 * p.knob, 1.6 + 0.45 * p.knob, 1.7, 0.9])

    def sway(self, y: Any) -> Any:
        """How far the spine bends to the side at level ``y``."""
        amplitude, frequency, phase = self.patient.bend
        return np.float32(amplitude) * np.sin(y * np.float32(frequency) + np.float32(phase))

    @property
    def bent(self) -> bool:
        """Whether the spine bends so far that ribs and mediastinum follow."""
        return self.patient.bend[0] > _STRAIGHT

    def spine(self, y: Any) -> Any:
        """x of the spine's middle at level ``y``."""
        return self.sway(y) - np.float32(6.5 * np.sin(self.pose.yaw))

    def wall_x(self, x: Any, y: Any) -> Any:
        """x as the rib cage sees it, which follows a bent spine a little."""
        return x - np.float32(0.35) * self.sway(y) if self.bent else x

    def _heart(self, enlarged: float | None, floor: float) -> Contour:
        p = self.patient
        ratio = p.cardiothoracic * self.pose.magnified
        # the outline above is 12 cm wide: stretch it to this patient's share of the chest
        wide = 2 * p.width * ratio / 12.0
        tall = (floor + 1.6 - _HEART_CENTRE[1]) / 6.3
        points = (_HEART_POINTS - _HEART_CENTRE) * (wide, 0.5 * (wide + tall))
        points[:, 0] *= 1 + (0.07 * p.heart_lean) * (points[:, 1] > 2)
        points[:, 1] *= 1 - 0.05 * p.heart_lean
        if enlarged is not None:
            left, right = points[:, 0].max(), -points[:, 0].min()
            grown = (2 * p.width * enlarged - 0.3 * right) / (left + 0.7 * right)  # mostly to the left
            points[:, 0] *= np.where(points[:, 0] > 0, grown, 0.3 + 0.7 * grown)
            points[:, 1] *= np.where(points[:, 1] > 0, 1.0, 0.55 + 0.45 * grown)  # it rests on the diaphragm
        centre = (_HEART_CENTRE[0] + 4.5 * np.sin(self.pose.yaw), float(floor + 1.5 - points[:, 1].max()))
        return Contour(centre, points + centre)

    def _torso(self) -> tuple[Curve, Curve]:
        p = self.patient
        top = p.apex
        neck = 5.0 + 0.3 * p.wall + (0 if p.female else 0.6)
        outer = p.width + p.wall
        shoulder = p.shoulder - self.pose.shrug
        outline = (
            (top - 14, neck),
            (top - 5.2, neck),
            (shoulder - 4.2, 0.75 * p.width),
            (shoulder - 2.6, 1.12 * p.width),
            (shoulder - 0.5, 1.34 * p.width),
            (shoulder + 3, 1.36 * p.width),
            (shoulder + 8, 1.05 * outer),
            (top + 17, outer),
            (self.base + 14, 0.98 * outer),
        )
        at, width = np.array(outline).T
        at = np.maximum.accumulate(at) + np.arange(at.size) * 1e-3  # rising, also where shoulders stand high
        level = np.concatenate([[top - 14, top - 4, top - 1], np.linspace(top, self.base + 10, 24)])
        covered = np.maximum(self._half_depth(level[3:]) + 1.5, 6.2)
        covered *= 1 - 0.12 * smoothstep(
            (level[3:] - self.resting_domes[-1]) / 6
        )  # the belly is flatter than the chest
        depth = np.concatenate([[5.4, 5.6, 6.0], covered]) + 0.4 * p.wall
        return Curve(at, width), Curve(level, depth)

    def look(self, x: Any, y: Any, middle: Any = np.s_[...]) -> Inside:
        """What lies between the ribs at (x, y), of any shape; ``middle`` is the part that can hold the mediastinum."""
        # behind and before its dome the lung reaches deeper than the silhouette
        below = (y - self.diaphragm(x)) * np.float32(1 / 8)
        behind = np.sqrt(np.clip(below * 45, 0, 1))
        below = np.clip(below + np.float32(self.flattened / 8), 0, 1)
        base = smoothstep((y - np.float32(self.heart.centre[1] - 7.5)) * np.float32(0.1))
        shifted = x - np.float32(0.7) * self.sway(y) if self.bent else x
        mediastinum = np.zeros_like(x)
        mediastinum[middle] = self._mediastinum(shifted[middle], y[middle])
        return Inside(
            cavity=self._cavity(self.wall_x(x, y), y) * (1 - 0.7 * behind - 0.3 * np.sqrt(below)),
            heart_reach=self.heart.reach(shifted, y),
            heart_share=np.float32(0.35) + np.float32(0.65) * base,
            mediastinum=mediastinum,
            behind=behind,
            depth=self.patient.depth,
        )

    def _cavity(self, x: Any, y: Any) -> Any:
        """Path length through the chest cavity, as if it had neither floor nor heart nor mediastinum."""
        across = np.abs(x) - np.float32(self._top)
        span = np.where(across > 0, self.lateral(y), self._medial(y)) - np.float32(self._top)
        share = np.abs(across) / (np.abs(span) + np.float32(0.02))
        profile = dome(share * share * np.sqrt(share))
        return 2 * self._half_depth(y) * profile

    def diaphragm(self, x: Any) -> Any:
        """Level of the diaphragm's silhouette at ``x``."""
        across = np.abs(x)
        crest, outer = np.float32(self.patient.crest * self.patient.width), np.float32(self.patient.width * 0.99)
        out = np.clip((across - crest) / (outer - crest), 0, 1.3)
        inwards = np.clip(1 - across / crest, 0, 1)
        level = self.domes[-1] + (self.domes[1] - self.domes[-1]) * smoothstep((x + 3) * np.float32(1 / 6))
        return level + (np.float32(self.base) - level) * out * out * np.sqrt(out) + np.float32(1.1) * inwards * inwards

    def resting(self, x: Any) -> Any:
        """Level of the diaphragm before overinflated lungs pushed it down."""
        return self.diaphragm(x) - np.float32(self.flattened)

    def _mediastinum(self, x: Any, y: Any) -> Any:
        """Path length through great vessels, gullet and spine: what keeps the lungs apart."""
        p = self.patient
        turn = np.float32(np.sin(self.pose.yaw))
        right, left = self._right_edge(y) + 2 * turn, self._left_edge(y) - turn
        share = np.abs((2 * x - left - right) / (left - right))
        column = np.float32(1.3 * p.depth) * dome(share * share)
        across, down = x - np.float32(1.5 + 0.5 * p.knob) - 1.5 * turn, (y + 3.2) * np.float32(0.7)
        arch = np.float32(0.7 * p.depth) * dome((across * across + down * down) / np.float32(p.knob**2))
        offset = (x - self._aorta_x(y) + 4 * turn) / np.float32(0.8 * p.knob)
        aorta = np.float32(0.5 * p.depth) * dome(offset * offset) * smoothstep((y + 3.5) * np.float32(0.5))
        return _union(_union(column, arch), aorta)

    @property
    def middle(self) -> float:
        """Nothing of the mediastinum lies further aside."""
        return 6.5 + self.patient.thymus + 0.7 * self.patient.bend[0]

    def body(self, frame: Frame) -> Any:
        """Path length through the whole body: trunk, neck, shoulders, arms, breasts, chin."""
        x, y = frame.grid
        share = np.square(x / self._torso_width(y))
        turn = 1 + np.float32(0.5 * np.sin(self.pose.yaw)) * x * np.float32(1 / self.patient.width)
        trunk = 2 * self._torso_depth(y) * dome(np.square(share)) * turn
        limbs = np.zeros_like(x)
        for side, (left, right) in zip(SIDES, ((-99.0, 0.0), (0.0, 99.0)), strict=True):
            half = frame.columns(left, right)
            limbs[half] = np.maximum(limbs[half], self._arm(x[half], y[half], side))
        # a root of squares joins trunk and limbs without a crease
        joined = np.sqrt(np.square(trunk) + np.square(limbs) * np.float32(0.55))
        whole = np.maximum(joined, limbs) + self._breasts(x, y)
        return whole if self.pose.chin is None else whole + self._chin(x, y, self.pose.chin)

    def _chin(self, x: Any, y: Any, level: float) -> Any:
        across = (x - np.float32(9 * np.sin(self.pose.yaw))) * np.float32(1 / 6.5)
        down = (y - np.float32(level - 7)) * np.float32(1 / 7)
        return np.float32(13) * dome(across * across + down * down)

    def shoulder_joint(self, side: int) -> tuple[float, float]:
        """Where the head of the humerus sits."""
        tilt = side * self.patient.tilt
        return side * (self.patient.width * 1.0 + 3.2), self.patient.shoulder - self.pose.shrug + tilt

    def elbow(self, side: int) -> tuple[float, float]:
        x, y = self.shoulder_joint(side)
        return x + side * 30 * float(np.sin(self.pose.arm)), y + 30 * float(np.cos(self.pose.arm))

    def _arm(self, x: Any, y: Any, side: int) -> Any:
        (x0, y0), (x1, y1) = self.shoulder_joint(side), self.elbow(side)
        y0 += 0.45 * self.patient.wall + 1.4  # the muscle hangs below the joint
        dx, dy = x1 - x0, y1 - y0
        x, y = x - np.float32(x0), y - np.float32(y0)
        along = np.clip(x * np.float32(dx / (dx * dx + dy * dy)) + y * np.float32(dy / (dx * dx + dy * dy)), 0, 1)
        thick = np.float32(4.4 + 0.5 * self.patient.wall) * (1.12 - 0.35 * along)
        away = np.square(x - along * np.float32(dx)) + np.square(y - along * np.float32(dy))
        return 2 * np.sqrt(np.clip(thick * thick - away, 0, 999))

    def _breasts(self, x: Any, y: Any) -> Any:
        p = self.patient
        if p.breast < 0.05:
            return np.float32(0)
        centre, half = 0.62 * p.width, 3.6 + 2.4 * p.breast
        across = (np.abs(x) - np.float32(centre)) * np.float32(1 / half)
        down = y - np.float32(p.breast_level)
        vertical = np.where(down > 0, down * np.float32(1 / (0.75 * half)), down * np.float32(1 / (1.7 * half)))
        soft = np.clip(1 - across * across - vertical * vertical, 0, 1)
        # a sharp fold below, a soft slope above
        return np.float32(3.6 * p.breast) * np.where(down > 0, np.sqrt(soft) * (0.55 + 0.45 * soft), soft)


def _union(first: Any, second: Any) -> Any:
    """Path length through two overlapping bodies: a little more than the longer, without a crease."""
    return np.sqrt(np.sqrt(np.square(np.square(first)) + np.square(np.square(second))))

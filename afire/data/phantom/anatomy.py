"""A patient's anatomy, drawn once for all films of the patient, and the soft tissue it projects: body, lungs, heart.

Every function takes body coordinates of any shape and returns path lengths in centimetres of water or of lung.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from afire.data.phantom.physics import Contour, Curve, dome, smoothstep, stream

SIDES = (-1, 1)  # the patient's right lies on the image's left

# Outline of a heart of ordinary size around (1.5, 6.5): right atrium, base, left appendage, apex, underside.
_HEART_CENTRE = (1.5, 6.3)
_HEART_POINTS = np.array(
    [
        (-4.0, 6.8),
        (-3.7, 4.6),
        (-3.3, 2.0),
        (-2.0, -0.6),
        (1.4, -1.4),
        (3.7, -0.2),
        (4.6, 2.0),
        (5.9, 4.4),
        (7.2, 7.0),
        (7.9, 9.4),
        (7.8, 11.3),
        (6.3, 12.6),
        (3.0, 12.9),
        (-0.5, 12.4),
        (-3.0, 11.2),
        (-3.9, 9.2),
    ]
)


@dataclass(frozen=True)
class Patient:
    """What stays the same from film to film. Lengths in centimetres, levels as y."""

    number: int
    female: bool
    age: float  # 0 young .. 1 old
    wall: float  # soft tissue around the rib cage
    width: float  # largest half-width of the rib cage inside
    depth: float  # largest half-depth of the lungs
    apex: float  # level of the lung tops
    dome: float  # level of the right diaphragm in full inspiration
    dome_gap: float  # how much lower the left diaphragm stands
    cardiothoracic: float  # heart width over chest width
    heart_lean: float  # shape of the left border: -1 upright .. 1 lying
    knob: float  # radius of the aortic knob
    bone: float  # density of bone, 1 ordinary
    rib_drop: float  # how far a rib falls from spine to front
    rib_offset: float
    rib_half: float  # half-height of a rib
    clavicle: float  # level of the outer end against the inner one
    shoulder: float  # level of the shoulder joints
    tilt: float  # how much lower the left shoulder hangs
    breast: float  # 0 none
    breast_level: float
    bend: tuple[float, float]  # sideways bend of the spine: amplitude and phase
    branching: float  # prominence of the vessels


def draw_patient(seed: int, number: int) -> Patient:
    """The patient ``number`` of phantom ``seed``."""
    rng = stream(seed, "patient", number)
    female = bool(rng.random() < 0.48)
    build = float(np.clip(rng.normal(), -2, 2))
    weight = float(np.clip(rng.gamma(3.2, 0.32) - 0.25, 0.05, 2.4))  # skewed: few are very heavy
    age = float(rng.beta(2.0, 1.6))
    apex = float(-11.0 + rng.normal(0, 0.5) - 0.4 * build)
    return Patient(
        number=number,
        female=female,
        age=age,
        wall=2.2 + 2.2 * weight,
        width=float((12.5 if female else 13.6) + 0.7 * build + rng.normal(0, 0.35)),
        depth=float(8.0 + 0.4 * build + 0.5 * weight + rng.normal(0, 0.4)),
        apex=apex,
        dome=float(apex + (21.6 if female else 22.8) + 0.7 * build - 0.9 * weight + rng.normal(0, 1.1)),
        dome_gap=float(np.clip(rng.normal(1.2, 0.6), -0.3, 2.6)),
        cardiothoracic=float(np.clip(rng.normal(0.425 + 0.03 * age + 0.012 * weight, 0.025), 0.36, 0.495)),
        heart_lean=float(np.clip(rng.normal(0.25 * weight + 0.3 * age - 0.35, 0.4), -1, 1)),
        knob=float(1.15 + 0.75 * age + rng.normal(0, 0.12)),
        bone=float(np.clip(1.15 - 0.35 * age + rng.normal(0, 0.12), 0.6, 1.35)),
        rib_drop=float(np.clip(rng.normal(9.0, 1.0), 6.5, 11.5)),
        rib_offset=float(rng.uniform(-0.5, 0.9)),
        rib_half=float(np.clip(rng.normal(0.62, 0.06), 0.48, 0.8)),
        clavicle=float(rng.normal(-1.6, 1.0)),
        shoulder=float(apex + rng.normal(2.6, 0.8)),
        tilt=float(rng.normal(0, 0.4)),
        breast=float(rng.uniform(0.35, 1.25) * (0.7 + 0.4 * weight)) if female else float(0.18 * weight),
        breast_level=float(rng.normal(8.0, 1.4)),
        bend=(float(abs(rng.normal(0, 0.3))), float(rng.uniform(0, 2 * np.pi))),
        branching=float(np.clip(rng.normal(1.35, 0.18), 0.9, 1.8)),
    )


@dataclass(frozen=True)
class Pose:
    """What changes from film to film: breath, turn, arms."""

    breath: float  # cm by which the diaphragm stands above full inspiration
    yaw: float
    arm: float  # angle of the upper arms from the body, radians
    shrug: float  # cm by which the shoulders are lifted


@dataclass(frozen=True)
class Inside:
    """The chest's inside where it was looked at."""

    cavity: Any  # path length through all that is not wall
    heart_reach: Any  # below 1 in the heart's silhouette
    heart_share: Any  # how much of the heart's full depth: its base fades into the great vessels
    mediastinum: Any  # path length
    behind: Any  # 0 above the diaphragm's silhouette, 1 where only the back of the lung is left
    depth: float

    @property
    def lung(self) -> Any:
        """Path length through lung, after heart and mediastinum have taken their place."""
        reach = self.heart_reach
        heart = np.float32(1.45 * self.depth) * dome(reach * reach * np.sqrt(reach)) * self.heart_share
        # below the diaphragm only the back of the lung is left, behind the heart
        whole = _union(heart, self.mediastinum)
        taken = whole + (0.3 * self.mediastinum - whole) * self.behind
        return np.clip(self.cavity - taken, 0, None)

    @property
    def field(self) -> Any:
        """Where a reader would outline the lungs: beside heart and mediastinum, above the diaphragm."""
        clear = (self.heart_reach > 1) & (self.mediastinum < 0.4 * self.depth)
        return clear & (self.cavity > 0.28 * self.depth) & (self.behind <= 0)


class Thorax:
    """The soft parts of one patient in one pose."""

    def __init__(self, patient: Patient, pose: Pose, enlarged: float | None = None) -> None:
        """``enlarged`` is a heart's width over the chest's that replaces the patient's own."""
        self.patient, self.pose = patient, pose
        p = patient
        self.domes = {-1: p.dome - pose.breath, 1: p.dome + p.dome_gap - 0.9 * pose.breath}
        self.base = max(self.domes.values()) + 4.2  # level of the costophrenic angles
        level = p.apex + (self.base - p.apex) * np.array(
            [-0.02, 0, 0.008, 0.03, 0.07, 0.13, 0.22, 0.34, 0.5, 0.7, 0.88, 1.0, 1.5]
        )
        lateral = [0.36, 0.36, 0.435, 0.51, 0.59, 0.68, 0.775, 0.86, 0.93, 0.98, 1.0, 0.99, 0.95]
        medial = [0.36, 0.36, 0.29, 0.22, 0.17, 0.08, -0.1, -0.4, -1.0, -1.0, -1.0, -1.0, -1.0]
        thick = [0.0, 0.0, 0.16, 0.33, 0.5, 0.66, 0.82, 0.94, 1.0, 1.0, 0.97, 0.94, 0.9]
        self.lateral = Curve(level, p.width * np.array(lateral))
        self._medial = Curve(level, p.width * np.array(medial))
        self._half_depth = Curve(level, p.depth * np.array(thick))
        self._crest = 0.44 * p.width  # |x| of the highest point of a dome, and the middle of a lung's top
        self.heart = self._heart(enlarged)
        self._torso_width, self._torso_depth = self._torso()
        self._right_edge = Curve([p.apex - 2, p.apex + 2, -5, 0, 4, 14], [-4.4, -3.3, -2.8, -2.7, -2.1, -2.0])
        self._left_edge = Curve([p.apex - 2, p.apex + 2, -6, -3, 2, 8, 14], [4.2, 3.0, 2.4, 2.3, 2.5, 2.0, 1.9])
        self._aorta_x = Curve([-4, -1, 6, 14], [1.5 + 0.5 * p.knob, 1.6 + 0.45 * p.knob, 1.7, 0.9])

    def spine(self, y: Any) -> Any:
        """x of the spine's middle at level ``y``."""
        amplitude, phase = self.patient.bend
        return amplitude * np.sin(y * np.float32(0.16) + phase) - 6.5 * float(np.sin(self.pose.yaw))

    def _heart(self, enlarged: float | None) -> Contour:
        p = self.patient
        # the outline above is 11.9 cm wide: stretch it to this patient's share of the chest
        wide = 2 * p.width * p.cardiothoracic / 11.9
        tall = (self.domes[1] + 1.6 - _HEART_CENTRE[1]) / 6.3
        points = (_HEART_POINTS - _HEART_CENTRE) * (wide, 0.5 * (wide + tall))
        points[:, 0] *= 1 + (0.07 * p.heart_lean) * (points[:, 1] > 2)
        points[:, 1] *= 1 - 0.05 * p.heart_lean
        if enlarged is not None:
            left, right = points[:, 0].max(), -points[:, 0].min()
            grown = (2 * p.width * enlarged - 0.3 * right) / (left + 0.7 * right)  # mostly to the left
            points[:, 0] *= np.where(points[:, 0] > 0, grown, 0.3 + 0.7 * grown)
            points[:, 1] *= np.where(points[:, 1] > 0, 1.0, 0.55 + 0.45 * grown)  # it rests on the diaphragm
        centre = (_HEART_CENTRE[0] + 4.5 * np.sin(self.pose.yaw), float(self.domes[1] + 1.5 - points[:, 1].max()))
        return Contour(centre, points + centre)

    def _torso(self) -> tuple[Curve, Curve]:
        p = self.patient
        top = p.apex
        neck = 5.0 + 0.5 * p.wall * 0.6 + (0 if p.female else 0.6)
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
        depth = np.concatenate([[5.4, 5.6, 6.0], covered]) + 0.4 * p.wall
        return Curve(at, width), Curve(level, depth)

    def look(self, x: Any, y: Any) -> Inside:
        """What lies between the ribs at (x, y), of any shape."""
        # behind and before its dome the lung reaches deeper than the silhouette
        below = np.clip((y - self.diaphragm(x)) / np.float32(8), 0, 1)
        behind = np.sqrt(np.clip(below * 45, 0, 1))
        base = smoothstep((y - np.float32(self.heart.centre[1] - 7.5)) / np.float32(10))
        return Inside(
            cavity=self._cavity(x, y) * (1 - 0.7 * behind - 0.3 * np.sqrt(below)),
            heart_reach=self.heart.reach(x, y),
            heart_share=np.float32(0.3) + np.float32(0.7) * base,
            mediastinum=self._mediastinum(x, y),
            behind=behind,
            depth=self.patient.depth,
        )

    def _cavity(self, x: Any, y: Any) -> Any:
        """Path length through the chest cavity, as if it had neither floor nor heart nor mediastinum."""
        across = np.abs(x)
        middle = np.float32(self._crest * 0.84)
        span = np.where(across > middle, self.lateral(y), self._medial(y)) - middle
        share = np.abs((across - middle) / (np.where(np.abs(span) < 0.02, 0.02, span)))
        profile = dome(share * share * np.sqrt(share))
        return 2 * self._half_depth(y) * profile

    def diaphragm(self, x: Any) -> Any:
        """Level of the diaphragm's silhouette at ``x``."""
        across = np.abs(x)
        crest, outer = np.float32(self._crest), np.float32(self.patient.width * 0.99)
        out = np.clip((across - crest) / (outer - crest), 0, 1.3)
        inwards = np.clip((crest - across) / crest, 0, 1)
        level = self.domes[-1] + (self.domes[1] - self.domes[-1]) * smoothstep((x + 3) / 6)
        return level + (np.float32(self.base) - level) * out * out * np.sqrt(out) + np.float32(0.5) * inwards * inwards

    def _mediastinum(self, x: Any, y: Any) -> Any:
        """Path length through great vessels, gullet and spine: what keeps the lungs apart."""
        p = self.patient
        turn = np.float32(np.sin(self.pose.yaw))
        right, left = self._right_edge(y) + 2 * turn, self._left_edge(y) - turn
        share = np.abs((2 * x - left - right) / (left - right))
        column = np.float32(1.4 * p.depth) * dome(share * share * share)
        knob = ((x - np.float32(1.5 + 0.5 * p.knob) - 1.5 * turn) ** 2 + ((y + 3.2) * np.float32(0.7)) ** 2) / p.knob**2
        arch = np.float32(0.75 * p.depth) * dome(knob)
        offset = (x - self._aorta_x(y) + 4 * turn) / np.float32(0.8 * p.knob)
        aorta = np.float32(0.5 * p.depth) * dome(offset * offset) * smoothstep((y + 3.5) / 2)
        return _union(_union(column, arch), aorta)

    def body(self, x: Any, y: Any) -> Any:
        """Path length through the whole body: trunk, neck, shoulders, arms, breasts."""
        share = np.abs(x) / self._torso_width(y)
        trunk = 2 * self._torso_depth(y) * dome(np.square(np.square(share)))  # ** 4 costs ten times as much
        limbs = np.maximum.reduce([self._arm(x, y, side) for side in SIDES])
        # a root of squares joins trunk and limbs without a crease
        joined = np.sqrt(np.square(trunk) + np.square(limbs) * np.float32(0.55))
        return np.maximum(joined, limbs) + self._breasts(x, y)

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
        along = np.clip(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy), 0, 1)
        thick = np.float32(4.4 + 0.5 * self.patient.wall) * (1.12 - 0.35 * along)
        away = ((x - x0 - along * dx) ** 2 + (y - y0 - along * dy) ** 2) / thick**2
        return 2 * thick * dome(away)

    def _breasts(self, x: Any, y: Any) -> Any:
        p = self.patient
        if p.breast < 0.05:
            return np.float32(0)
        centre, half = 0.62 * p.width, 3.6 + 2.4 * p.breast
        across = (np.abs(x) - np.float32(centre)) / np.float32(half)
        down = y - np.float32(p.breast_level)
        vertical = np.where(down > 0, down / np.float32(0.75 * half), down / np.float32(1.7 * half))
        squared = across**2 + vertical**2
        soft = np.clip(1 - squared, 0, 1)
        # a sharp fold below, a soft slope above
        return np.float32(3.6 * p.breast) * np.where(down > 0, np.sqrt(soft) * (0.55 + 0.45 * soft), soft)


def _union(first: Any, second: Any) -> Any:
    """Path length through two overlapping bodies: a little more than the longer, without a crease."""
    return np.sqrt(np.sqrt(np.square(np.square(first)) + np.square(np.square(second))))

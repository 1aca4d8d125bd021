"""A patient's anatomy, drawn once for all films of the patient: who it is, and how they stand before the film."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from afire.data.phantom.physics import stream

SIDES = (-1, 1)  # the patient's right lies on the image's left
_CHILDREN = 0.25  # share of the patients


@dataclass(frozen=True)
class Patient:
    """What stays the same from film to film. Lengths in centimetres of an adult, levels as y."""

    number: int
    female: bool
    years: float
    young: float  # 0 from 16 years on .. 1 at birth: the proportions of a child
    scale: float  # true length of a centimetre drawn: 1 adult
    wall: float  # soft tissue around the rib cage
    width: float  # largest half-width of the rib cage inside
    depth: float  # largest half-depth of the lungs
    apex: float  # level of the lung tops
    dome: float  # level of the right diaphragm in full inspiration
    dome_gap: float  # how much lower the left diaphragm stands
    crest: float  # |x| of the highest point of a dome, in half-widths
    cardiothoracic: float  # heart width over chest width, on a PA film
    heart_lean: float  # shape of the left border: -1 upright .. 1 lying
    knob: float  # radius of the aortic knob
    thymus: float  # width that a child's thymus adds to the upper mediastinum
    bone: float  # density of bone, 1 ordinary
    rib_drop: float  # how far a rib falls from spine to front
    rib_slope: float  # how much of it falls evenly towards the side
    rib_offset: float
    rib_spacing: float
    rib_half: float  # half-height of a rib
    rib_jitter: tuple[float, ...]  # cm, for each rib of each side
    clavicle: float  # level of the outer end against the inner one
    shoulder: float  # level of the shoulder joints
    tilt: float  # how much lower the left shoulder hangs
    breast: float  # 0 none
    breast_level: float
    bend: tuple[float, float, float]  # sideways bend of the spine: amplitude, frequency, phase
    branching: float  # prominence of the vessels


@lru_cache(maxsize=64)  # the films of a patient are drawn one after the other
def draw_patient(seed: int, number: int) -> Patient:
    """The patient ``number`` of phantom ``seed``."""
    rng = stream(seed, "patient", number)
    female = bool(rng.random() < 0.48)
    child = bool(rng.random() < _CHILDREN)
    years = float(17 * rng.beta(0.9, 1.8)) if child else float(18 + 72 * rng.beta(1.6, 1.6))
    young = float(np.clip(1 - years / 16, 0, 1))
    old = float(np.clip((years - 18) / 62, 0, 1))
    grown = 1 - young
    build = float(np.clip(rng.normal(), -2, 2))
    weight = float(np.clip(rng.gamma(3.2, 0.32) - 0.25, 0.05, 2.4)) * (0.45 + 0.55 * grown)  # few are very heavy
    apex = float(-11.0 + rng.normal(0, 0.5) - 0.4 * build + 1.6 * young)
    dome = apex + (21.4 if female else 22.4) + 0.8 * build - 0.9 * weight - 4.0 * young + rng.normal(0, 1.1)
    scoliosis = rng.random() < 0.08
    return Patient(
        number=number,
        female=female,
        years=years,
        young=young,
        scale=0.38 + 0.62 * grown,
        wall=(2.0 + 2.1 * weight) * (1 - 0.35 * young),
        width=float((12.7 if female else 13.6) + 0.7 * build + rng.normal(0, 0.35)),
        depth=float(8.0 + 0.4 * build + 0.5 * weight + rng.normal(0, 0.4)),
        apex=apex,
        dome=float(dome),
        dome_gap=float(np.clip(rng.normal(1.2, 0.6), -0.3, 2.6)),
        crest=float(np.clip(rng.normal(0.44, 0.04), 0.34, 0.54)),
        cardiothoracic=float(np.clip(rng.normal(0.43 + 0.03 * old + 0.012 * weight + 0.07 * young, 0.024), 0.36, 0.52)),
        heart_lean=float(np.clip(rng.normal(0.25 * weight + 0.3 * old - 0.3, 0.4), -1, 1)),
        knob=float(1.15 + 0.75 * old - 0.35 * young + rng.normal(0, 0.12)),
        thymus=float(young**2 * rng.uniform(0.2, 2.4)),
        bone=float(np.clip(1.12 - 0.35 * old + rng.normal(0, 0.14), 0.6, 1.4)),
        rib_drop=float(np.clip(rng.normal(5.6 - 1.6 * young, 0.7), 3.0, 7.5)),
        rib_slope=float(np.clip(rng.normal(4.2 - 1.6 * young, 1.0), 0.8, 6.4)),
        rib_offset=float(rng.uniform(-0.6, 0.6)),
        rib_spacing=float((dome - apex) / 9.3 * rng.uniform(0.94, 1.06)),
        rib_half=float(np.clip(rng.normal(0.43 + 0.04 * young, 0.05), 0.32, 0.6)),
        rib_jitter=tuple(float(shift) for shift in rng.normal(0, 0.17, 24)),
        clavicle=float(rng.normal(-1.6 + 0.8 * young, 1.0)),
        shoulder=float(apex + rng.normal(2.4, 0.8)),
        tilt=float(rng.normal(0, 0.4)),
        breast=float(rng.uniform(0.3, 1.25) * (0.7 + 0.4 * weight)) * float(young < 0.2)
        if female
        else float(0.18 * weight),
        breast_level=float(rng.normal(7.5, 1.4)),
        bend=(
            float(rng.uniform(0.8, 2.6) if scoliosis else abs(rng.normal(0, 0.3))),
            float(rng.uniform(0.12, 0.22)),
            float(rng.uniform(0, 2 * np.pi)),
        ),
        branching=float(np.clip(rng.normal(1.3, 0.2), 0.8, 1.8)),
    )


@dataclass(frozen=True)
class Pose:
    """What changes from film to film: view, breath, turn, arms."""

    breath: float  # cm by which the diaphragm stands above full inspiration
    yaw: float
    arm: float  # angle of the upper arms from the body, radians; above a right angle they are lifted
    shrug: float  # cm by which the shoulders are lifted
    view: str = "PA"
    wings: float = 0.0  # 0: shoulder blades drawn aside .. 1: before the lungs
    chin: float | None = None  # level of a chin that is on the film

    @property
    def magnified(self) -> float:
        """How much larger the heart is than on a PA film: from the front it lies further from the film."""
        return 1.14 if self.view == "AP" else 1.0


def draw_pose(rng: np.random.Generator, patient: Patient) -> Pose:
    """How ``patient`` stands, sits or lies on one film; small children mostly lie."""
    lying = bool(rng.random() < (0.85 if patient.years < 6 else 0.28))
    lifted = lying and rng.random() < 0.7 * patient.young
    chin = rng.random() < (0.5 * patient.young if lying else 0.03)
    return Pose(
        breath=float(np.clip(rng.gamma(1.8, 1.1 if lying else 0.75), 0, 5.0 - 1.5 * patient.young)),
        yaw=float(np.deg2rad(np.clip(rng.normal(0, 4.0 if lying else 2.3), -11, 11))),
        arm=float(np.deg2rad(rng.uniform(100, 150) if lifted else rng.uniform(4, 40))),
        shrug=float(np.clip(rng.normal(0.8 if lying else 0, 0.8), -1.5, 2.5)),
        view="AP" if lying else "PA",
        wings=float(rng.uniform(0.4, 1.0) if lying else rng.beta(1.2, 2.5)),
        chin=float(patient.apex - rng.uniform(3.5, 6.5)) if chin else None,
    )

"""One film of the phantom, from its number alone: who, in which split and pose, with which findings.

It is composed as path lengths through tissue and then exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from afire.data.manifest import Box
from afire.data.phantom import diseases as extras
from afire.data.phantom import skeleton
from afire.data.phantom.anatomy import Patient, Pose, Thorax, draw_patient
from afire.data.phantom.diseases import CHANGES, DISEASES, Chest, enlarged_heart
from afire.data.phantom.physics import BONE, LUNG, WATER, Array, Exposure, Frame, draw_exposure, expose, mottle, stream
from afire.errors import UserError

# Films come in blocks of 12 that 5 patients share, so a film's patient is known without counting from the first.
_FILMS_PER_BLOCK = 12
_PATIENTS_PER_BLOCK = 5
_GOLDEN = 0.6180339887498949
_SECOND_FINDING = 0.15
Bools = NDArray[np.bool_]


def patient_of(seed: int, index: int) -> int:
    """Number of the patient on film ``index``; patients have 1 to 8 films, mostly 1 to 4, in a row."""
    block, position = divmod(index, _FILMS_PER_BLOCK)
    return block * _PATIENTS_PER_BLOCK + sum(position >= cut for cut in _cuts(seed, block))


@lru_cache(maxsize=1024)
def _cuts(seed: int, block: int) -> tuple[int, ...]:
    """Where in a block the next patient begins."""
    places = stream(seed, "roster", block).choice(_FILMS_PER_BLOCK - 1, _PATIENTS_PER_BLOCK - 1, replace=False)
    return tuple(sorted(int(place) + 1 for place in places))


def patient_id(number: int) -> str:
    """The id a manifest carries."""
    return f"phantom-{number:06d}"


def split_of(seed: int, number: int) -> str:
    """``train`` (70 %), ``val`` (10 %) or ``test`` (20 %) for a patient, whatever the size of the phantom.

    Steps of the golden ratio spread consecutive patients evenly, so that a small phantom has all three parts too.
    """
    start = stream(seed, "roster").random()
    place = (start + number * _GOLDEN) % 1.0
    return "train" if place < 0.7 else "val" if place < 0.8 else "test"


def draw_findings(seed: int, index: int, normal_share: float) -> tuple[str, ...]:
    """Diseases of film ``index``: none on ``normal_share`` of the films, else one, sometimes two."""
    rng = stream(seed, "findings", index)
    if rng.random() < normal_share:
        return ()
    count = 2 if rng.random() < _SECOND_FINDING else 1
    chosen = rng.permutation(len(DISEASES))[:count]
    return tuple(DISEASES[i] for i in np.sort(chosen))


@dataclass(frozen=True)
class PhantomFilm:
    """A film with all that is known about it."""

    image: Array  # (S, S) in [0, 1], bright = dense
    labels: dict[str, int]  # every disease: 1 present, 0 absent
    masks: dict[str, Bools]  # (S, S) for each disease that is present
    boxes: tuple[Box, ...]  # one for each mask
    lungs: Bools  # (S, S) the lung fields, with whatever disease lies in them
    patient: str
    view: str

    @property
    def normal(self) -> bool:
        """Without any disease."""
        return not self.masks


def draw_film(
    seed: int, index: int, size: int, *, normal_share: float = 0.5, diseases: Sequence[str] | None = None
) -> PhantomFilm:
    """Film ``index`` of the phantom ``seed`` at ``size`` x ``size`` pixels.

    Depends on its arguments only. ``diseases`` replaces the drawn ones and leaves everything else as it is:
    ``diseases=()`` is the same film of the same patient in health.
    """
    if diseases is None:
        diseases = draw_findings(seed, index, normal_share)
    unknown = [name for name in diseases if name not in CHANGES]
    if unknown:
        raise UserError(f"unknown disease {unknown[0]!r}; the phantom draws {', '.join(DISEASES)}.")
    number = patient_of(seed, index)
    patient = draw_patient(seed, number)
    pose = _draw_pose(stream(seed, "pose", index))
    enlarged = enlarged_heart(_disease_stream(seed, index, "Cardiomegaly")) if "Cardiomegaly" in diseases else None
    thorax = Thorax(patient, pose, enlarged)
    frame = _draw_frame(stream(seed, "frame", index), size, thorax)
    inside = thorax.look(*frame.grid)
    grown = skeleton.vessel_tree(stream(seed, "vessels", number), patient, patient.dome + 4)
    tree = skeleton.place_vessels(grown, thorax)
    lung = inside.lung
    vessels = skeleton.vessels(frame, tree) * np.clip(lung / 3, 0, 1)
    chest = Chest(frame, thorax, tree, lung, vessels, np.zeros_like(lung), np.zeros_like(lung))
    masks = _afflict(chest, seed, index, diseases)
    image = _compose(chest, draw_exposure(stream(seed, "exposure", index)), seed, index)
    return PhantomFilm(
        image=image,
        labels={name: int(name in masks) for name in DISEASES},
        masks=masks,
        boxes=tuple(bounds(name, mask) for name, mask in masks.items()),
        lungs=np.asarray(inside.field),
        patient=patient_id(number),
        view="PA",
    )


def _disease_stream(seed: int, index: int, name: str) -> np.random.Generator:
    return stream(seed, "disease", index, DISEASES.index(name))


def _afflict(chest: Chest, seed: int, index: int, diseases: Sequence[str]) -> dict[str, Bools]:
    """Change the chest by each disease in turn, on alternate sides so that none hides another; return their masks."""
    side = 1 if stream(seed, "disease", index, len(DISEASES)).random() < 0.5 else -1
    masks: dict[str, Bools] = {}
    for name in DISEASES:
        if name not in diseases:
            continue
        extent = CHANGES[name](chest, _disease_stream(seed, index, name), side)
        mask = extent > 0.5
        if not mask.any():  # smaller than a pixel of a tiny film
            mask = extent == extent.max()
        masks[name] = mask
        side = side if name == "Cardiomegaly" else -side
    return masks


def bounds(label: str, mask: Bools) -> Box:
    """The smallest box around a mask that is not empty."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    height, width = mask.shape
    left, top = columns[0], rows[0]
    return Box(
        label=label,
        x=float(left / width),
        y=float(top / height),
        w=float((columns[-1] + 1 - left) / width),
        h=float((rows[-1] + 1 - top) / height),
    )


def _draw_pose(rng: np.random.Generator) -> Pose:
    return Pose(
        breath=float(np.clip(rng.gamma(1.8, 0.8), 0, 4.5)),
        yaw=float(np.deg2rad(np.clip(rng.normal(0, 2.5), -6, 6))),
        arm=float(np.deg2rad(rng.uniform(6, 45))),
        shrug=float(np.clip(rng.normal(0, 0.8), -1.5, 2)),
    )


def _draw_frame(rng: np.random.Generator, size: int, thorax: Thorax) -> Frame:
    """Where the film lies: the lungs are always on it, the rest as it comes."""
    p = thorax.patient
    width = 2 * p.width + rng.uniform(7.5, 18)
    height = max(width * rng.uniform(0.95, 1.12), thorax.base - p.apex + 9.5)
    top = p.apex - rng.uniform(2.5, 7.0)
    return Frame(
        size=size,
        centre=(float(np.clip(rng.normal(0, 0.9), -2, 2)), float(top + height / 2)),
        extent=(float(width), float(height)),
        roll=float(np.deg2rad(np.clip(rng.normal(0, 1.3), -4, 4))),
        yaw=thorax.pose.yaw,
    )


def _compose(chest: Chest, exposure: Exposure, seed: int, index: int) -> Array:
    """Sum what the rays pass through, expose the film and mark it."""
    frame, thorax = chest.frame, chest.thorax
    body = thorax.body(*frame.grid)
    objects = stream(seed, "objects", index)
    tissue = _tissue(chest, body, exposure, stream(seed, "texture", index))
    tissue -= extras.stomach_gas(objects, frame, thorax)
    bone = skeleton.bones(frame, thorax)
    wires = extras.leads(objects, frame, thorax)
    attenuation = WATER * np.clip(tissue, 0, None) + BONE * (bone if wires is None else bone + wires)
    image = expose(
        attenuation, body, _window(thorax.patient), exposure, frame, stream(seed, "pixels", index, frame.size)
    )
    light = extras.shutters(objects, frame, thorax)
    letter = extras.marker(objects, frame)
    if light is not None:
        image = image * light
    if letter is not None:
        image = image + (np.float32(0.97) - image) * letter
    return np.clip(image, 0, 1).astype(np.float32)


def _tissue(chest: Chest, body: Array, exposure: Exposure, rng: np.random.Generator) -> Array:
    """Path length through soft tissue as cm of water: the body without the air in it."""
    frame = chest.frame
    grain = 0.55 * mottle(rng, frame, 0.3) + 0.8 * mottle(rng, frame, 0.7) + 0.7 * mottle(rng, frame, 3.5)
    flesh = np.float32(0.09) * mottle(rng, frame, 4.0) * np.clip(body / 8, 0, 1)
    lung = chest.lung * (1 - LUNG - np.float32(0.012 * exposure.texture) * grain)
    windpipe = 0.9 * skeleton.airway(frame, chest.thorax) * np.clip((body - chest.lung) / 6, 0, 1)
    result: Array = body + flesh - lung - chest.air - windpipe + (1 - LUNG) * chest.vessels + chest.pleura
    return result


def _window(patient: Patient) -> tuple[float, float]:
    """Attenuation of this patient's healthy lung and mediastinum: what the grey scale is set to."""
    through = 2 * (patient.depth + 1.5 + 0.4 * patient.wall)
    return WATER * (through - (1 - LUNG) * 1.7 * patient.depth), WATER * 0.97 * through

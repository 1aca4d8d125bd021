"""One film of the phantom, from its number alone: patient, split, pose and findings, drawn with exact maps.

It is composed as path lengths through tissue and then exposed. The maps show what was drawn: lungs by zone, heart,
mediastinum, diaphragm, bones, the stomach's bubble.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from afire.data.manifest import Box
from afire.data.phantom import skeleton
from afire.data.phantom.anatomy import Patient, Pose, draw_patient, draw_pose
from afire.data.phantom.chest import Chest, Tree, airway, place_vessels, vessel_tree, vessels
from afire.data.phantom.diseases import BOTH_SIDES, CHANGES, DISEASES, draw_severity, enlargement, flattening
from afire.data.phantom.objects import Objects, draw_edges, draw_objects
from afire.data.phantom.physics import BONE, LUNG, WATER, Array, Frame, mottle, stream
from afire.data.phantom.skeleton import Bones
from afire.data.phantom.style import Style, draw_style, expose
from afire.data.phantom.thorax import Inside, Thorax
from afire.errors import UserError

Bools = NDArray[np.bool_]
ZONES = ("upper", "middle", "lower")
LUNGS = tuple(f"{side} lung, {zone} zone" for side in ("right", "left") for zone in ZONES)
"""Sides are the patient's: the right lung lies on the image's left."""
ANATOMY = (*LUNGS, "heart", "mediastinum", "diaphragm", "ribs", "clavicles", "spine", "stomach bubble")
# Films come in blocks of 12 that 5 patients share, so a film's patient is known without counting from the first.
_FILMS_PER_BLOCK = 12
_PATIENTS_PER_BLOCK = 5
_GOLDEN = 0.6180339887498949
_SECOND_FINDING = 0.15


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


def draw_findings(seed: int, index: int, normal_share: float, among: Sequence[str] = DISEASES) -> tuple[str, ...]:
    """Diseases of film ``index``: none on ``normal_share`` of the films, else one ``among`` them, sometimes two."""
    rng = stream(seed, "findings", index)
    if rng.random() < normal_share:
        return ()
    count = 2 if rng.random() < _SECOND_FINDING else 1
    kinds = [name for name in DISEASES if name in among]
    chosen = rng.permutation(len(kinds))[:count]
    return tuple(kinds[i] for i in np.sort(chosen))


@dataclass(frozen=True)
class Sitting:
    """Who is on a film and how they stand: what a manifest says about it, known without drawing."""

    patient: Patient
    pose: Pose

    @property
    def view(self) -> str:
        """PA or AP."""
        return self.pose.view


def sitting_of(seed: int, index: int) -> Sitting:
    """Patient and pose of film ``index``."""
    patient = draw_patient(seed, patient_of(seed, index))
    return Sitting(patient, draw_pose(stream(seed, "pose", index), patient))


@dataclass(frozen=True)
class PhantomFilm:
    """A film with all that is known about it."""

    image: Array  # (S, S) in [0, 1], bright = dense
    labels: dict[str, int]  # every disease: 1 present, 0 absent
    severity: dict[str, float]  # of each disease that is present, 0 hardly seen .. 1
    masks: dict[str, Bools]  # (S, S) for each disease that is present
    boxes: tuple[Box, ...]  # one for each mask
    anatomy: Bools  # (A, S, S), one map for each name in ANATOMY, with whatever disease lies there
    devices: tuple[str, ...]
    sitting: Sitting
    style: Style

    @property
    def normal(self) -> bool:
        """Without any disease."""
        return not self.masks

    @property
    def lungs(self) -> Bools:
        """(S, S) the lung fields, with whatever disease lies in them."""
        fields: Bools = np.logical_or.reduce(self.anatomy[: len(LUNGS)])
        return fields

    @property
    def patient(self) -> str:
        """The id a manifest carries."""
        return patient_id(self.sitting.patient.number)

    @property
    def view(self) -> str:
        """PA or AP."""
        return self.sitting.view

    def where(self, name: str) -> Bools:
        """The map (S, S) of one part of the anatomy."""
        region: Bools = self.anatomy[ANATOMY.index(name)]
        return region


def draw_film(
    seed: int,
    index: int,
    size: int,
    *,
    normal_share: float = 0.5,
    among: Sequence[str] = DISEASES,
    diseases: Sequence[str] | None = None,
    severity: float | None = None,
    style: Style | None = None,
) -> PhantomFilm:
    """Film ``index`` of the phantom ``seed`` at ``size`` x ``size`` pixels.

    Depends on its arguments only. ``among`` are the diseases it may have. ``diseases``, ``severity`` and ``style``
    replace what would be drawn and leave everything else as it is: ``diseases=()`` is the same film of the same patient
    in health.
    """
    if diseases is None:
        diseases = draw_findings(seed, index, normal_share, check_diseases(among))
    severities = _severities(seed, index, check_diseases(diseases), severity)
    sitting = sitting_of(seed, index)
    healthy = Thorax(sitting.patient, sitting.pose)
    thorax = _with_outlines(healthy, severities)
    frame = _draw_frame(stream(seed, "frame", index), size, healthy)
    chest = _chest(frame, thorax, seed)
    masks = _afflict(chest, seed, index, severities)
    objects_rng = stream(seed, "objects", index)
    objects = draw_objects(objects_rng, frame, thorax)
    edges = draw_edges(objects_rng, frame, healthy)
    bones = skeleton.bones(frame, thorax)
    style = draw_style(stream(seed, "style", index)) if style is None else style
    image = edges.apply(_compose(chest, bones, objects, style, seed, index))
    visible = edges.visible
    if visible is not None:
        masks = {name: _kept(mask, visible) for name, mask in masks.items()}
    return PhantomFilm(
        image=np.clip(image, 0, 1).astype(np.float32),
        labels={name: int(name in masks) for name in DISEASES},
        severity=dict(severities),
        masks=masks,
        boxes=tuple(bounds(name, mask) for name, mask in masks.items()),
        anatomy=anatomy_maps(frame, thorax, chest.inside, bones, objects, visible),
        devices=tuple(objects.names),
        sitting=sitting,
        style=style,
    )


def check_diseases(names: Sequence[str]) -> Sequence[str]:
    """``names``, if the phantom can draw all of them."""
    unknown = [name for name in names if name not in CHANGES]
    if unknown:
        raise UserError(f"unknown disease {unknown[0]!r}; the phantom draws {', '.join(DISEASES)}.")
    return names


def _severities(seed: int, index: int, diseases: Sequence[str], severity: float | None) -> dict[str, float]:
    """Each disease of the film with its severity, in the order in which they are drawn."""
    if severity is not None and not 0 <= severity <= 1:
        raise UserError(f"a severity of {severity:g} is not possible; choose from 0 (hardly seen) to 1.")
    rng = stream(seed, "disease", index, len(DISEASES) + 1)
    drawn = {name: draw_severity(rng) for name in DISEASES}
    return {name: drawn[name] if severity is None else severity for name in DISEASES if name in diseases}


def _with_outlines(healthy: Thorax, severities: Mapping[str, float]) -> Thorax:
    """The chest's soft parts, with what a disease does to their outlines."""
    heart, lungs = severities.get("Cardiomegaly"), severities.get("Emphysema")
    if heart is None and lungs is None:
        return healthy
    return Thorax(
        healthy.patient,
        healthy.pose,
        enlarged=None if heart is None else enlargement(heart, healthy.pose.magnified),
        flattened=0.0 if lungs is None else flattening(lungs),
    )


def _chest(frame: Frame, thorax: Thorax, seed: int) -> Chest:
    """The inside of the chest in health."""
    patient = thorax.patient
    inside = thorax.look(*frame.grid, frame.columns(-thorax.middle, thorax.middle))
    tree = place_vessels(_vessel_tree(seed, patient), thorax)
    lung = inside.lung
    # before heart and mediastinum the vessels are hardly seen
    open_lung = np.clip(lung / np.clip(inside.cavity, 0.5, 99) * np.float32(2.2) - np.float32(0.35), 0, 1)
    shadows = vessels(frame, tree) * open_lung * np.clip(lung * np.float32(1 / 3), 0, 1)
    empty = np.zeros_like(lung)
    return Chest(frame, thorax, tree, inside, lung, shadows, air=empty, water=empty)


@lru_cache(maxsize=16)  # the films of a patient are drawn one after the other
def _vessel_tree(seed: int, patient: Patient) -> Tree:
    return vessel_tree(stream(seed, "vessels", patient.number), patient, patient.dome + 4)


def _afflict(chest: Chest, seed: int, index: int, severities: Mapping[str, float]) -> dict[str, Bools]:
    """Change the chest by each disease in turn, on alternate sides so that none hides another; return their masks."""
    side = 1 if stream(seed, "disease", index, len(DISEASES)).random() < 0.5 else -1
    masks: dict[str, Bools] = {}
    for name, severity in severities.items():
        rng = stream(seed, "disease", index, DISEASES.index(name))
        extent = CHANGES[name](chest, rng, side, severity)
        mask = extent > 0.5
        masks[name] = mask if mask.any() else extent == extent.max()  # smaller than a pixel of a tiny film
        side = side if name in BOTH_SIDES else -side
    return masks


def _kept(mask: Bools, visible: Bools) -> Bools:
    """What can be seen of a mask; all of it where that would be nothing."""
    shown: Bools = mask & visible
    return shown if shown.any() else mask


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


def _draw_frame(rng: np.random.Generator, size: int, thorax: Thorax) -> Frame:
    """Where the film lies: the lungs are always on it, the rest as it comes."""
    p = thorax.patient
    width = 2 * p.width + rng.uniform(4.0, 13.0)
    height = max(width * rng.uniform(0.88, 1.12), thorax.base - p.apex + 4.5)
    top = p.apex - rng.uniform(1.0, 6.0)
    top = min(max(top, thorax.base + 1.5 - height), p.apex - 1.0)
    return Frame(
        size=size,
        centre=(float(np.clip(rng.normal(0, 0.7), -1.5, 1.5)), float(top + height / 2)),
        extent=(float(width), float(height)),
        roll=float(np.deg2rad(np.clip(rng.normal(0, 1.6), -5, 5))),
        yaw=thorax.pose.yaw,
    )


def _compose(chest: Chest, bones: Bones, objects: Objects, style: Style, seed: int, index: int) -> Array:
    """Sum what the rays pass through and expose the film."""
    frame, patient = chest.frame, chest.thorax.patient
    body = chest.thorax.body(frame)
    tissue = _tissue(chest, body, stream(seed, "texture", index)) - objects.gas + objects.soft
    # a child is smaller than it is drawn, and its thinner bones stand out the more
    scale = np.float32(patient.scale)
    attenuation = WATER * scale * np.clip(tissue, 0, 999) + BONE * np.float32(patient.scale**0.65) * bones.path
    attenuation = attenuation + scale * objects.dense
    window = tuple(patient.scale * level for level in _window(patient))
    return expose(
        attenuation, body * scale, (window[0], window[1]), style, frame, stream(seed, "pixels", index, frame.size)
    )


def _tissue(chest: Chest, body: Array, rng: np.random.Generator) -> Array:
    """Path length through soft tissue as cm of water: the body without the air in it."""
    frame = chest.frame
    coarse = np.float32(rng.uniform(0.5, 1.3)) * np.float32(0.012)
    broad = mottle(rng, frame, 3.5)
    grain = 0.8 * mottle(rng, frame, 0.35) + 0.9 * mottle(rng, frame, 0.8) + 0.7 * broad
    flesh = np.float32(0.09) * broad * np.clip(body * np.float32(1 / 8), 0, 1)
    lung = chest.lung * (np.float32(1 - LUNG) - coarse * grain)
    result: Array = body + flesh - lung - chest.air + np.float32(1 - LUNG) * chest.vessels + chest.water
    middle = frame.columns(-6.0, 6.0)
    solid = np.clip((body[middle] - chest.lung[middle]) * np.float32(1 / 6), 0, 1)
    result[middle] -= np.float32(0.9) * airway(frame, chest.thorax)[middle] * solid
    return result


def _window(patient: Patient) -> tuple[float, float]:
    """Attenuation of this patient's healthy lung and mediastinum: what the grey scale is set to."""
    through = 2 * (patient.depth + 1.5 + 0.4 * patient.wall)
    return WATER * (through - (1 - LUNG) * 1.7 * patient.depth), WATER * (0.97 + 0.1 * patient.young) * through


def anatomy_maps(
    frame: Frame, thorax: Thorax, inside: Inside, bones: Bones, objects: Objects, visible: Bools | None
) -> Bools:
    """(A, S, S), one map for each name in ``ANATOMY``; what shutters or a border hide is on none of them."""
    x, y = frame.grid
    maps = np.zeros((len(ANATOMY), frame.size, frame.size), dtype=bool)
    third = (min(thorax.domes.values()) - thorax.patient.apex) / 3
    below = [y >= np.float32(thorax.patient.apex + step * third) for step in (1, 2)]
    left = x > 0
    for start, side in ((0, ~left), (3, left)):
        lung = inside.field & side
        maps[start] = lung & ~below[0]
        maps[start + 1] = lung & below[0] & ~below[1]
        maps[start + 2] = lung & below[1]
    maps[6] = inside.heart
    maps[7] = inside.middle
    maps[8] = (inside.behind > 0) & (inside.cavity > 0.02) & (y < np.float32(thorax.base))
    maps[9], maps[10], maps[11] = bones.ribs, bones.clavicles, bones.spine
    if objects.bubble is not None:
        maps[12] = objects.bubble
    if visible is not None:
        maps &= visible
    return maps

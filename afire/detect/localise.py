"""One detector on the test films: all its scores, a threshold for each, and whether its heat is in the right place.

A threshold belongs to a false-alarm rate on normal films that took no part in fitting: the detector's own calibration
films. They can be found again only where ``--data`` holds the films that the detector was fitted on.

For places, heatmaps are compared with boxes and masks. Only films with a box or a mask of a finding count, so the easy
pixels of normal films do not flatter.

Shapes: N films, r x c positions, S pixels a side.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.ndimage import label as connected_pieces

from afire.data.keys import Seen, films_seen
from afire.data.manifest import Manifest
from afire.data.pack import Films
from afire.data.splits import Split
from afire.detect.base import AnomalyDetector, Heat, Rows, Subsets, detector_folder, film_batches, load_detector
from afire.detect.fit import detection_subsets
from afire.detect.normals import Calibration, Floats
from afire.detect.protocol import Plain, TestFilms, check_unseen, seen_in_pretraining, trivial_scores
from afire.errors import UserError
from afire.tasks.features import data_content_hash
from afire.tasks.gradcam import find_cases
from afire.tasks.masks import load_masks, mask_cells
from afire.tasks.metrics import ranking_values
from afire.tasks.settings import MaskConfig
from afire.weights import RANDOM

Inside = NDArray[np.bool_]
PRO_LIMIT = 0.3  # share of false pixels up to which overlap is averaged
_EIGHT_NEIGHBOURS = np.ones((3, 3), int)

logger = logging.getLogger("afire")


@dataclass(frozen=True)
class Places:
    """Where findings are: rows of the manifest, and their masks (N, S, S)."""

    rows: Rows
    inside: Inside
    kind: str  # masks or boxes


@dataclass(frozen=True)
class Localisation:
    """How well heat finds the places. ``hit`` and ``chance`` (N,) are 1 or 0, and the share of the film to be hit."""

    pixel_auc: float
    pro: float
    hit: Floats
    chance: Floats


def find_places(films: Films, rows: Rows) -> Places | None:
    """Masks of findings, else boxes, among ``rows``; None where there are none. Masks of lungs are no findings."""
    places = _masked(films, rows)
    if places is None:
        places = _boxed(films, rows)
    if places is None:
        return None
    filled = places.inside.any(axis=(1, 2)) & ~places.inside.all(axis=(1, 2))
    return Places(places.rows[filled], places.inside[filled], places.kind) if filled.any() else None


def _masked(films: Films, rows: Rows) -> Places | None:
    config = MaskConfig(size="scaled")
    if films.manifest.info.get("mask") == "lungs":
        return None
    try:
        _, cells = mask_cells(films.manifest, config)
    except UserError:
        return None  # no masks at all
    abnormal = films.manifest.table["normal"].to_numpy()[rows] == 0
    masked = np.array([row for row in rows[abnormal].tolist() if cells[row]], np.int64)
    if len(masked) == 0:
        return None
    try:
        return Places(masked, load_masks(films, masked, cells, config).read(masked), "masks")
    except UserError as error:
        logger.warning("masks are not used: %s", error)
        return None


def _boxed(films: Films, rows: Rows) -> Places | None:
    table = films.manifest.table
    boxed = rows[(table["boxes"].to_numpy()[rows] != "") & (table["normal"].to_numpy()[rows] == 0)]
    labels = {box.label for row in boxed.tolist() for box in films.manifest.boxes(row)}
    masks: dict[int, Inside] = {}
    for case in find_cases(films, boxed, sorted(labels)):
        masks[case.row] = masks[case.row] | case.mask if case.row in masks else case.mask
    if not masks:
        return None
    return Places(np.array(list(masks), np.int64), np.stack(list(masks.values())), "boxes")


def localise(heat_Nrc: Heat, inside_NSS: Inside) -> Localisation:
    """Compare heat, brought to the films' size, with the places."""
    values = enlarge(heat_Nrc, inside_NSS.shape[-1])
    area, _ = ranking_values(
        values.reshape(-1).astype(np.float64), inside_NSS.reshape(-1), np.ones((1, inside_NSS.size))
    )
    hottest = values.reshape(len(values), -1).argmax(axis=1)
    flat = inside_NSS.reshape(len(values), -1)
    return Localisation(
        pixel_auc=float(area[0]),
        pro=region_overlap(values, inside_NSS),
        hit=flat[np.arange(len(flat)), hottest].astype(np.float64),
        chance=flat.mean(axis=1),
    )


def enlarge(heat_Nrc: Heat, size: int) -> Heat:
    """(N, r, c) -> (N, S, S), bilinear between the centres of the positions."""
    heat = torch.from_numpy(np.ascontiguousarray(heat_Nrc, np.float32))[:, None]
    large: Heat = F.interpolate(heat, (size, size), mode="bilinear", align_corners=False)[:, 0].numpy()
    return large


def region_overlap(values_NSS: Heat, inside_NSS: Inside, limit: float = PRO_LIMIT) -> float:
    """PRO: the share of each connected place that is found, mean over places, averaged over false-pixel rates.

    The rate runs from 0 to ``limit``; 1 is perfect. Every pixel of a place adds 1 / (its size x places) when the
    threshold passes it, every other pixel 1 / their number to the false ones; so one sort answers all thresholds.
    """
    gain = np.zeros(inside_NSS.shape, np.float64)
    places = 0
    for film, inside in enumerate(inside_NSS):
        numbers, count = connected_pieces(inside, _EIGHT_NEIGHBOURS)
        sizes = np.bincount(numbers.ravel(), minlength=count + 1)
        gain[film][inside] = 1 / sizes[numbers[inside]]
        places += count
    order = np.argsort(-values_NSS, axis=None, kind="stable")
    ends = np.flatnonzero(np.r_[np.diff(values_NSS.ravel()[order]) != 0, True])  # pixels of one value fall together
    overlap = np.r_[0.0, np.cumsum(gain.ravel()[order])[ends] / places]
    outside = ~inside_NSS.ravel()[order]
    false = np.r_[0.0, np.cumsum(outside)[ends] / outside.sum()]
    at_limit = float(np.interp(limit, false, overlap))
    within = false < limit
    rates, overlaps = np.r_[false[within], limit], np.r_[overlap[within], at_limit]
    return float(((overlaps[1:] + overlaps[:-1]) / 2 * np.diff(rates)).sum() / limit)


CHOSEN = "chosen score"
_SAME = 1e-3  # in sd of normals: recomputed calibration scores must agree with the stored ones this well


@dataclass(frozen=True)
class Measured:
    """Results of one detector: scores (N,) by row of the table, thresholds (NaN: there is none), heat of places."""

    name: str
    folder: Path
    detector: AnomalyDetector
    subsets: Subsets | None
    scores: dict[str, Floats]
    thresholds: dict[str, float]
    heat: Heat | None
    fit: Seen  # of the test films, by what was fitted
    pretraining: Seen  # of the test films, by the weights it was fitted from
    notes: list[str] = field(default_factory=list)

    @property
    def seed(self) -> int:
        return self.detector.settings.seed


def open_models(folders: Sequence[Path], films: Films, device: torch.device) -> list[tuple[str, Path, AnomalyDetector]]:
    """Detectors of one kind with a name for each: its seed, or its folder or bundle where seeds repeat."""
    inside = [detector_folder(folder) for folder in folders]
    detectors = [load_detector(folder).to(device) for folder in inside]
    seeds = [detector.settings.seed for detector in detectors]
    methods = dict.fromkeys(detector.method for detector in detectors)
    if len(methods) > 1:
        raise UserError(f"several --model are the seeds of one row, but these are of {' and '.join(methods)}.")
    for folder, detector in zip(folders, detectors, strict=True):
        size = detector.config.image.size
        if films.size != size:
            raise UserError(f"the films are {films.size} px, but {folder} takes {size} px; pack them at that size.")
    distinct = len(set(seeds)) == len(seeds)
    names = [f"seed-{seed}" if distinct else folder.resolve().name for seed, folder in zip(seeds, folders, strict=True)]
    if len(set(names)) < len(names):
        raise UserError("two --model are the same folder, or folders of the same name and seed.")
    return list(zip(names, inside, detectors, strict=True))


def measure(
    name: str,
    folder: Path,
    detector: AnomalyDetector,
    films: Films,
    test: TestFilms,
    split: Split | None,
    places: Places | None,
) -> Measured:
    """Score the test films once with everything the detector has, and its calibration films where they are here."""
    subsets, note = own_subsets(folder, detector, films, split)
    known = films_seen(folder, films, np.arange(len(films))).rows if subsets is None else None
    fitted = np.concatenate([subsets.fit, subsets.held_out]) if subsets is not None else known
    fit = check_unseen(folder, films, test.rows, fitted)
    from_random = detector.origin.get("weights", {}).get("name") == RANDOM
    pretraining = seen_in_pretraining(folder, films, test.rows, from_random)
    scores, heat = score_films(detector, films, test.rows, f"{name}: test films", places)
    thresholds = dict.fromkeys(scores, float("nan"))
    if subsets is not None:
        of_normals, _ = score_films(detector, films, subsets.calibrate, f"{name}: calibration films")
        if _agree(detector, of_normals[CHOSEN]):
            rate = detector.false_alarms
            thresholds = {key: Calibration.of(values).threshold(rate) for key, values in of_normals.items()}
        else:
            subsets, note = None, "the calibration films score otherwise than when the detector was fitted"
    thresholds[CHOSEN] = detector.threshold
    notes = [] if subsets is not None else [f"only the chosen score has a calibrated threshold: {note}"]
    notes += seen_notes(name, fit, pretraining)
    return Measured(name, folder, detector, subsets, scores, thresholds, heat, fit, pretraining, notes)


def seen_notes(name: str, fit: Seen, pretraining: Seen) -> list[str]:
    """What a reader must know about test films that are not new to the detector, or may not be."""
    notes = []
    if fit.answer == "unknown":
        notes.append(
            f"whether {fit.unknown:,} of the {fit.films:,} test films were used to fit {name} is not known: its record "
            "of films is missing or cannot be compared with these"
        )
    if pretraining.answer == "seen":
        notes.append(
            f"{pretraining.seen:,} of the {pretraining.films:,} test films were among the films of the pre-training "
            f"behind {name}: as normal films and without labels, but they are not new to it"
        )
    elif pretraining.answer == "unknown":
        notes.append(
            f"whether {pretraining.unknown:,} of the {pretraining.films:,} test films were among the films of the "
            f"pre-training behind {name} is not known: the weights it started from do not say"
        )
    return notes


def own_subsets(
    folder: Path, detector: AnomalyDetector, films: Films, split: Split | None
) -> tuple[Subsets | None, str]:
    """The films that fitted, chose and calibrated, drawn again; or None and why they cannot be."""
    origin: dict[str, Any] = detector.origin
    settings = detector.settings
    if origin.get("data", {}).get("hash") != data_content_hash(films):
        return None, _other_data(folder, films, str(origin.get("data", {}).get("name", "unknown")))
    split_hash = origin.get("split")
    if split_hash is not None and (split is None or split.hash != split_hash):
        return None, f"it was fitted with the split {str(split_hash)[:12]}, which was not given"
    fit_split = split if split_hash is not None else None
    try:
        subsets = detection_subsets(films.manifest, fit_split, settings.seed, settings.held_out, settings.choose_share)
    except UserError as error:
        return None, f"its subsets cannot be drawn again ({error})"
    if subsets.counts() != origin.get("parts"):
        return None, "its subsets cannot be drawn again: the labels have changed"
    return subsets, ""


def _other_data(folder: Path, films: Films, name: str) -> str:
    """Why a detector's subsets are not among the rows here. It says that the films are others only if that is known."""
    seen = films_seen(folder, films, np.arange(len(films)))
    if seen.answer == "seen":
        return f"it was fitted on films of this set in another form ({name}), so its subsets cannot be drawn again"
    if seen.answer == "none":
        return f"it was fitted on other films ({name})"
    return f"it was fitted on {name}, and whether those are films of this set is not known"


def trivial_of(
    plain: Plain, index: dict[int, int], measured: Measured, test: TestFilms
) -> tuple[dict[str, Floats], dict[str, float]]:
    """Trivial scores (N,) and thresholds with the same films in the same roles as the detector's.

    ``index`` maps rows of the manifest to places in ``plain``.
    """
    subsets = measured.subsets
    fit = np.concatenate([subsets.fit, subsets.choose]) if subsets is not None else test.normals
    scores = trivial_scores(plain, _at(index, fit))
    tested = {name: values[_at(index, test.rows)] for name, values in scores.items()}
    if subsets is None:
        return tested, dict.fromkeys(tested, float("nan"))
    calibration_rows = _at(index, subsets.calibrate)
    rate = measured.detector.false_alarms
    return tested, {name: Calibration.of(values[calibration_rows]).threshold(rate) for name, values in scores.items()}


def needed_rows(measured: Sequence[Measured], test: TestFilms) -> Rows:
    """Every film that a trivial detector looks at for any of the detectors."""
    subsets = [run.subsets for run in measured if run.subsets is not None]
    fitting_rows = [rows for subset in subsets for rows in (subset.fit, subset.held_out)]
    return np.unique(np.concatenate([test.rows, test.normals, *fitting_rows]))


def _at(index: dict[int, int], rows: Rows) -> Rows:
    return np.array([index[row] for row in rows.tolist()], np.int64)


def score_films(
    detector: AnomalyDetector, films: Films, rows: Rows, description: str, places: Places | None = None
) -> tuple[dict[str, Floats], Heat | None]:
    """Every score of the rows, the chosen one first, and the heat of those rows that have a place, in its order."""
    batches: dict[str, list[Floats]] = {}
    heat: dict[int, Heat] = {}
    placed_rows = set(places.rows.tolist()) if places is not None else set()
    start = 0
    for images in film_batches(films, rows, description):
        scored = detector.score(images, all_scores=True, restore=False)
        for name, values in {CHOSEN: scored.score, **scored.scores}.items():
            batches.setdefault(name, []).append(values)
        numbered = enumerate(rows[start : start + len(images)].tolist())
        heat |= {row: scored.heat[place] for place, row in numbered if row in placed_rows}
        start += len(images)
    stacked = np.stack([heat[row] for row in places.rows.tolist()]) if places is not None else None
    return {name: np.concatenate(values) for name, values in batches.items()}, stacked


def _agree(detector: AnomalyDetector, scores: Floats) -> bool:
    stored = detector.calibration.normal_scores
    return len(stored) == len(scores) and bool(np.abs(np.sort(scores) - stored).max() < _SAME * max(stored.std(), 1))


def abnormal_truth(manifest: Manifest, rows: Rows, min_films: int) -> dict[str, Floats]:
    """For each finding, truth (N,): 1 with it, 0 normal, NaN otherwise; findings in ``min_films`` films or more."""
    normal = manifest.table["normal"].to_numpy(np.float64)[rows]
    truths: dict[str, Floats] = {}
    for label in manifest.labels:
        has = (manifest.table[f"label:{label}"].to_numpy(np.float64)[rows] == 1) & (normal == 0)
        if has.sum() >= min_films:
            truths[label] = np.where(has, 1.0, np.where(normal == 1, 0.0, np.nan))
    return truths

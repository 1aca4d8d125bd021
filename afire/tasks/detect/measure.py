"""Scores of a detector's every score and of the trivial detectors on the test films, each with its threshold.

A threshold belongs to a false-alarm rate on normal films that took no part in fitting: the detector's own calibration
films. They can be found again only where ``--data`` holds the films that the detector was fitted on.

Shapes: N test films.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from afire.data.dataset import Films
from afire.data.manifest import Manifest
from afire.data.splits import Split
from afire.errors import UserError
from afire.progress import progress
from afire.tasks.detect.calibration import Calibration
from afire.tasks.detect.detector import Detector
from afire.tasks.detect.localise import Heat, Places
from afire.tasks.detect.parts import Parts, detection_parts
from afire.tasks.detect.protocol import TestFilms, check_unseen
from afire.tasks.detect.trivial import Plain, trivial_scores
from afire.tasks.features import data_content_hash

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
CHOSEN = "chosen score"
BATCH = 64
_SAME = 1e-3  # in sd of normals: recomputed calibration scores must agree with the stored ones this well


@dataclass(frozen=True)
class Measured:
    """What one detector gave: scores (N,) by row of the table, thresholds (NaN: there is none), heat of places."""

    name: str
    folder: Path
    detector: Detector
    parts: Parts | None
    scores: dict[str, Floats]
    thresholds: dict[str, float]
    heat: Heat | None
    notes: list[str] = field(default_factory=list)

    @property
    def seed(self) -> int:
        return int(self.detector.origin.get("settings", {}).get("seed", 0))


def open_models(folders: Sequence[Path], films: Films, device: torch.device) -> list[tuple[str, Path, Detector]]:
    """Detectors with a name for each: its seed, or its folder where seeds repeat."""
    detectors = [Detector.load(folder).to(device) for folder in folders]
    seeds = [int(one.origin.get("settings", {}).get("seed", 0)) for one in detectors]
    for folder, detector in zip(folders, detectors, strict=True):
        size = detector.config.image.size
        if films.size != size:
            raise UserError(f"the films are {films.size} px, but {folder} takes {size} px; pack them at that size.")
    distinct = len(set(seeds)) == len(seeds)
    names = [f"seed-{seed}" if distinct else folder.resolve().name for seed, folder in zip(seeds, folders, strict=True)]
    if len(set(names)) < len(names):
        raise UserError("two --model are the same folder, or folders of the same name and seed.")
    return list(zip(names, folders, detectors, strict=True))


def measure(
    name: str,
    folder: Path,
    detector: Detector,
    films: Films,
    test: TestFilms,
    split: Split | None,
    places: Places | None,
) -> Measured:
    """Score the test films once with everything the detector has, and its calibration films where they are here."""
    parts, note = own_parts(detector, films, split)
    check_unseen(folder, films, test.rows, [parts.fit, parts.held_out] if parts is not None else [])
    scores, heat = _score(detector, films, test.rows, f"{name}: test films", places)
    thresholds = dict.fromkeys(scores, float("nan"))
    if parts is not None:
        of_normals, _ = _score(detector, films, parts.calibrate, f"{name}: calibration films", None)
        if _agree(detector, of_normals[CHOSEN]):
            rate = detector.false_alarms
            thresholds = {key: Calibration.of(values).threshold(rate) for key, values in of_normals.items()}
        else:
            parts, note = None, "the calibration films score otherwise than when the detector was fitted"
    thresholds[CHOSEN] = detector.threshold
    notes = [] if parts is not None else [f"only the chosen score has a calibrated threshold: {note}"]
    return Measured(name, folder, detector, parts, scores, thresholds, heat, notes)


def own_parts(detector: Detector, films: Films, split: Split | None) -> tuple[Parts | None, str]:
    """The films that fitted, chose and calibrated, drawn again; or None and why they cannot be."""
    origin: dict[str, Any] = detector.origin
    settings = origin.get("settings", {})
    if origin.get("data", {}).get("hash") != data_content_hash(films):
        return None, f"it was fitted on other films ({origin.get('data', {}).get('name', 'unknown')})"
    wanted = origin.get("split")
    if wanted is not None and (split is None or split.hash != wanted):
        return None, f"it was fitted with the split {str(wanted)[:12]}, which was not given"
    used = split if wanted is not None else None
    try:
        parts = detection_parts(
            films.manifest, used, int(settings["seed"]), float(settings["held_out"]), float(settings["choose_share"])
        )
    except (KeyError, UserError) as error:
        return None, f"its parts cannot be drawn again ({error})"
    if parts.counts() != origin.get("parts"):
        return None, "its parts cannot be drawn again: the labels have changed"
    return parts, ""


def trivial_of(
    plain: Plain, index: dict[int, int], one: Measured, test: TestFilms
) -> tuple[dict[str, Floats], dict[str, float]]:
    """Trivial scores (N,) and thresholds with the same films in the same roles as the detector's.

    ``index`` maps rows of the manifest to places in ``plain``.
    """
    fit = np.concatenate([one.parts.fit, one.parts.choose]) if one.parts is not None else test.normals
    found = trivial_scores(plain, _at(index, fit))
    tested = {name: values[_at(index, test.rows)] for name, values in found.items()}
    if one.parts is None:
        return tested, dict.fromkeys(tested, float("nan"))
    held = _at(index, one.parts.calibrate)
    rate = one.detector.false_alarms
    return tested, {name: Calibration.of(values[held]).threshold(rate) for name, values in found.items()}


def needed_rows(measured: Sequence[Measured], test: TestFilms) -> Rows:
    """Every film that a trivial detector looks at for any of the detectors."""
    parts = [rows for one in measured if one.parts is not None for rows in (one.parts.fit, one.parts.held_out)]
    return np.unique(np.concatenate([test.rows, test.normals, *parts]))


def _at(index: dict[int, int], rows: Rows) -> Rows:
    return np.array([index[row] for row in rows.tolist()], np.int64)


def _score(
    detector: Detector, films: Films, rows: Rows, what: str, places: Places | None
) -> tuple[dict[str, Floats], Heat | None]:
    """Every score of the rows, the chosen one first, and the heat of those rows that have a place, in its order."""
    found: dict[str, list[Floats]] = {}
    heat: dict[int, Heat] = {}
    wanted = set(places.rows.tolist()) if places is not None else set()
    with progress(what, len(rows), "films") as bar:
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            answer = detector.score(films.batch(batch), all_scores=True, restore=False)
            found.setdefault(CHOSEN, []).append(answer.score)
            for name, values in answer.parts.items():
                found.setdefault(name, []).append(values)
            heat |= {row: answer.heat[place] for place, row in enumerate(batch.tolist()) if row in wanted}
            bar.advance(len(batch))
    stacked = np.stack([heat[row] for row in places.rows.tolist()]) if places is not None else None
    return {name: np.concatenate(values) for name, values in found.items()}, stacked


def _agree(detector: Detector, scores: Floats) -> bool:
    stored = detector.calibration.normal_scores
    return len(stored) == len(scores) and bool(np.abs(np.sort(scores) - stored).max() < _SAME * max(stored.std(), 1))


def abnormal_truth(manifest: Manifest, rows: Rows, least: int) -> dict[str, Floats]:
    """For each finding, truth (N,): 1 with it, 0 normal, NaN otherwise; findings in at least ``least`` films only."""
    normal = manifest.table["normal"].to_numpy(np.float64)[rows]
    found: dict[str, Floats] = {}
    for label in manifest.labels:
        has = (manifest.table[f"label:{label}"].to_numpy(np.float64)[rows] == 1) & (normal == 0)
        if has.sum() >= least:
            found[label] = np.where(has, 1.0, np.where(normal == 1, 0.0, np.nan))
    return found

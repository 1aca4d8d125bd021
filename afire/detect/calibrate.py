"""What surrounds a fitted detector: the choice of its score, its threshold, its domain and the scale of its heatmaps.

All of it is set from normal films that did not train the networks: when a detector is fitted, and again, without any
training, from the normal films of a place where it is going to be used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afire.config import LesionConfig
from afire.data.keys import FILMS, films_seen, remember_behind, remember_films
from afire.data.pack import Films
from afire.data.phantom import draw_batch
from afire.detect import choose as choosing
from afire.detect.atlas import make_atlas
from afire.detect.base import (
    BATCH,
    CONFIG,
    MODEL,
    SETTINGS,
    AnomalyDetector,
    HeatScale,
    NormalFilms,
    Rows,
    Subsets,
    film_batches,
)
from afire.detect.normals import Standard
from afire.errors import UserError
from afire.files import require_own
from afire.lesions.synthesis import synthesize_keyed
from afire.tasks.features import data_content_hash

FEWEST_LOCAL = 20
"""Normal films of a place that set a detector's threshold there."""
_WORTH = 20.0  # films that the spread a detector came with counts for, beside that of the local ones
_LESION_SEED = 60_000  # far from any run's own lesions
_PHANTOM_SEED, _PHANTOMS = 60_019, 64


def calibrate(detector: AnomalyDetector, films: Films, subsets: Subsets) -> None:
    """Fit a started detector and all that surrounds it: domain, choice of a score, calibration, scale of heatmaps."""
    normals = NormalFilms(films, subsets.fit)
    detector.fit(normals)
    detector.domain.fit(normals.rank_pictures())
    detector.choice = choose_score(detector, films, subsets.choose)
    scores, heats = [], []
    for images in film_batches(films, subsets.calibrate, "calibration"):
        scored = detector.score(images, restore=False)
        scores.append(scored.score)
        heats.append(scored.heat)
    detector.calibration.fit(np.concatenate(scores))
    detector.scale = HeatScale.of(heats)


def parse_scores(score: str, known: Collection[str]) -> list[str] | None:
    """``gaussian + lesion`` -> both names, which must be ``known``; ``auto`` -> None."""
    if score == "auto":
        return None
    names = [name.strip() for name in score.split("+")]
    for name in names:
        if name not in known:
            raise UserError(f"there is no score {name!r}; scores are {', '.join(known)}, or auto.")
    if len(set(names)) < len(names):
        raise UserError(f"--score {score} names a score twice.")
    return names


def choose_score(detector: AnomalyDetector, films: Films, rows: Rows) -> choosing.Choice:
    """The score of a fitted detector, by its normal films ``rows`` with and without drawn lesions."""
    settings = detector.settings
    normal: dict[str, list[NDArray[np.float64]]] = {}
    lesioned: dict[str, dict[str, list[NDArray[np.float64]]]] = {kind: {} for kind in choosing.KINDS}
    views = min(-(-choosing.DRAWN // len(rows)), 16)
    start = 0
    for images in film_batches(films, rows, "choosing a score"):
        _collect(normal, detector, images)
        indices = rows[start : start + len(images)].tolist()
        start += len(images)
        for number, (kind, config) in enumerate(choosing.KINDS.items()):
            lesioned_images = _draw(images, config.model_copy(update={"views": views}), settings.seed, number, indices)
            _collect(lesioned[kind], detector, lesioned_images)
    joined = {kind: _join(scores) for kind, scores in lesioned.items()}
    references: dict[str, dict[str, NDArray[np.float64]]] = {}
    if bool(detector.domain.chest.any()):
        for scores, images in zip((references, joined), phantoms(detector.config.image.size), strict=True):
            phantom_scores: dict[str, list[NDArray[np.float64]]] = {}
            for batch in torch.split(images, BATCH):
                _collect(phantom_scores, detector, batch)
            scores[choosing.FINDINGS] = _join(phantom_scores)
    names = parse_scores(settings.score, detector.meanings)
    return choosing.choose(_join(normal), joined, names, references)


@lru_cache(maxsize=2)
def phantoms(size: int) -> tuple[Tensor, Tensor]:
    """Drawn chests in health and others with findings, for a choice: no training draws these."""
    health = draw_batch(_PHANTOM_SEED, range(_PHANTOMS), size, diseases=())
    ill = draw_batch(_PHANTOM_SEED, range(_PHANTOMS, 2 * _PHANTOMS), size, normal_share=0.0)
    return torch.from_numpy(health.images), torch.from_numpy(ill.images)


def _draw(images: Tensor, config: LesionConfig, seed: int, kind: int, indices: list[int]) -> Tensor:
    return synthesize_keyed(images, seed=_LESION_SEED + seed, epoch=kind, indices=indices, config=config)[0]


def _collect(into: dict[str, list[NDArray[np.float64]]], detector: AnomalyDetector, images: Tensor) -> None:
    for name, values in detector.score(images, all_scores=True, restore=False).scores.items():
        into.setdefault(name, []).append(values)


def _join(scores: Mapping[str, list[NDArray[np.float64]]]) -> dict[str, NDArray[np.float64]]:
    return {name: np.concatenate(values) for name, values in scores.items()}


def calibrate_here(
    detector: AnomalyDetector,
    folder: Path,
    films: Films,
    out: Path,
    *,
    source: str = "",
    false_alarms: float | None = None,
) -> list[str]:
    """Calibrate the detector of ``folder`` on local normal ``films`` and write it to ``out``; returns notes to show.

    The films are remembered, as those of a fit are: a test on them is refused.
    """
    if (out / SETTINGS).exists():
        raise UserError(f"{out} already holds a detector; choose another --out.")
    require_own(out, FILMS, (CONFIG, MODEL))
    size = detector.config.image.size
    if films.size != size:
        raise UserError(
            f"the films are {films.size} px, but the detector takes {size} px; pack them with --size {size}."
        )
    rows, notes = local_normals(detector, films)
    known = films_seen(folder, films, rows).seen
    if known:
        notes.append(
            f"{known} of these {len(rows)} films have made this detector before; where they trained it, more of other "
            "normal films are flagged than it says: calibrate on films that it does not know"
        )
    rate = detector.false_alarms if false_alarms is None else false_alarms
    lowest_rate = 1 / (1 + len(rows))
    if not 0 < rate < 1:
        raise UserError(f"--false-alarms {rate:g} is not a rate between 0 and 1, such as 0.05.")
    if rate < lowest_rate:
        raise UserError(
            f"{len(rows)} normal films can vouch for no false-alarm rate below {lowest_rate:.3f}; give more."
        )
    detector.settings = detector.settings.model_copy(update={"false_alarms": rate})
    recalibrate(detector, films, rows)
    detector.atlas = make_atlas(films, rows, detector.grid[0]) or detector.atlas
    calibration_set = {"name": source, "hash": data_content_hash(films), "films": len(rows)}
    detector.origin = {
        **detector.origin,
        "calibrated_on": calibration_set,
        "notes": [*detector.origin.get("notes", []), *notes],
    }
    remember_films(out, films, rows)
    remember_behind(out, folder)
    detector.save(out)
    return notes


def local_normals(detector: AnomalyDetector, films: Films) -> tuple[Rows, list[str]]:
    """Rows of the films to calibrate on, and notes about those that are left out."""
    normal = films.manifest.table["normal"].to_numpy().astype(float)
    rows = np.arange(len(films)) if np.isnan(normal).all() else np.flatnonzero(normal == 1)
    local_rows, notes = [], []
    start = 0
    for images in film_batches(films, rows, "reading normal films"):
        objections = detector.domain.objections(images)
        local_rows += [int(rows[start + place]) for place, messages in enumerate(objections) if not messages]
        start += len(images)
    if len(local_rows) < len(rows):
        notes.append(
            f"{len(rows) - len(local_rows)} of {len(rows)} films were left out: turned, blank or no frontal chest"
        )
    if len(local_rows) < FEWEST_LOCAL:
        raise UserError(
            f"{len(local_rows)} normal frontal chest films are too few to calibrate on; give at least {FEWEST_LOCAL}."
        )
    return np.array(local_rows, np.int64), notes


def recalibrate(detector: AnomalyDetector, films: Films, rows: Rows) -> None:
    """Reset threshold, standards, scale of heatmaps and domain from local normal films; nothing is trained.

    A film's score for the threshold comes from standards of the other half of the films, split by patient: by
    standards that include the film itself it would look too normal. The final standards come from all films.
    """
    standards = {module: (module.mean, module.sd) for module in detector.modules() if isinstance(module, Standard)}
    patients = films.manifest.table["patient"].to_numpy()[rows].astype(str)
    even = np.unique(patients, return_inverse=True)[1] % 2 == 0
    scores, heats = [], []
    for half, other_half in ((rows[even], rows[~even]), (rows[~even], rows[even])):
        _measure_by(detector, films, other_half, standards)
        for images in film_batches(films, half, "calibration"):
            scored = detector.score(images, restore=False)
            scores.append(scored.score)
            heats.append(scored.heat)
    _measure_by(detector, films, rows, standards)
    detector.calibration.fit(np.concatenate(scores))
    detector.scale = HeatScale.of(heats)
    detector.domain.fit(NormalFilms(films, rows).rank_pictures())


def _measure_by(
    detector: AnomalyDetector, films: Films, rows: Rows, standards: Mapping[Standard, tuple[Tensor, Tensor]]
) -> None:
    """Set what is usual at each place and in each score from the films ``rows``.

    A spread combines that of the local films with the previous one in ``standards``, which counts as a few films more.
    """
    maps: dict[Standard, list[Tensor]] = {standard: [] for standard in standards}
    hooks = [
        standard.register_forward_hook(lambda module, inputs, _: maps[module].append(inputs[0].detach().cpu()))
        for standard in standards
    ]
    try:
        for images in film_batches(films, rows, "what is normal here"):
            detector.score(images, all_scores=True, restore=False)
    finally:
        for hook in hooks:
            hook.remove()
    for standard, (_, sd) in standards.items():
        if maps[standard]:
            local = torch.cat(maps[standard]).double()
            count = len(local)
            variance = (count * local.var(dim=0, correction=0) + _WORTH * sd.cpu().double().square()) / (count + _WORTH)
            standard.mean = local.mean(dim=0).to(standard.mean)
            standard.sd = variance.sqrt().to(standard.sd)
    scores: dict[str, list[NDArray[np.float64]]] = {}
    for images in film_batches(films, rows, "scores of normal films"):
        _collect(scores, detector, images)
    usual = _join(scores)
    detector.choice = replace(
        detector.choice,
        components=tuple(
            replace(choosing.component_of(usual, component.name), weight=component.weight)
            for component in detector.choice.components
        ),
    )

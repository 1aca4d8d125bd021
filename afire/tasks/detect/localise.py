"""Whether heat lies where the finding is: heatmaps against boxes and masks.

Only films with a box or a mask of a finding count, so the easy pixels of normal films do not flatter.
Shapes: N films, r x c positions, S pixels a side.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.ndimage import label as connected_pieces

from afire.data.dataset import Films
from afire.errors import UserError
from afire.task_config import MaskConfig
from afire.tasks.gradcam import find_cases
from afire.tasks.masks import load_masks, mask_cells
from afire.tasks.metrics import ranking_values

Floats = NDArray[np.float64]
Heat = NDArray[np.float32]
Rows = NDArray[np.int64]
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
    found = np.array([row for row in rows[abnormal].tolist() if cells[row]], np.int64)
    if len(found) == 0:
        return None
    try:
        return Places(found, load_masks(films, found, cells, config).read(found), "masks")
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
    found = np.r_[0.0, np.cumsum(gain.ravel()[order])[ends] / places]
    outside = ~inside_NSS.ravel()[order]
    false = np.r_[0.0, np.cumsum(outside)[ends] / outside.sum()]
    at_limit = float(np.interp(limit, false, found))
    within = false < limit
    rates, overlaps = np.r_[false[within], limit], np.r_[found[within], at_limit]
    return float(((overlaps[1:] + overlaps[:-1]) / 2 * np.diff(rates)).sum() / limit)

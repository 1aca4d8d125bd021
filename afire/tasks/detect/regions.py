"""Where a film deviates most, in words: the patient's side and the zone of the chest.

Sides are the patient's, for a frontal film that hangs as usual: the patient's right lung is on the left of the film.
Zones are thirds of the height of the lung field (:func:`afire.lesions.lung_field`, a rough one), or of the film where
none is found.

Shapes: B films of S x S pixels, heat of R x C cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import adaptive_avg_pool2d

from afire.lesions import lung_field

SIDES = "Sides are the patient's: the right lung is on the left of the film."
_FIELD_SIDE = 56  # what the lung field is found on anyway
_IN_LUNG = 0.25  # share of a cell that must be lung
_WHOLE_FILM = 0.9  # a lung field this large is none
_SMALLEST_LUNG = 0.02  # of the film, on either side of its middle
_ZONES = ("upper", "middle", "lower")

Heat = NDArray[np.float32]


@dataclass(frozen=True)
class Region:
    """The most deviating place of a film: ``x`` and ``y`` in fractions of the square film, ``sd`` of its heat there."""

    words: str
    x: float
    y: float
    sd: float


@dataclass(frozen=True)
class _Lungs:
    """The lung field (S, S) of a film, with its edges in fractions of the film; nothing where none was found."""

    field: NDArray[np.bool_] | None
    top: float = 0.0
    bottom: float = 1.0
    inner: tuple[float, float] = (0.42, 0.58)  # between these lies the mediastinum
    outer: tuple[float, float] = (0.0, 1.0)


def regions(films_BSS: NDArray[np.float32], heat_BRC: Heat) -> list[Region]:
    """The most deviating region of each film."""
    small = adaptive_avg_pool2d(torch.from_numpy(np.ascontiguousarray(films_BSS))[:, None], _FIELD_SIDE)[:, 0]
    fields = lung_field(small).numpy()
    return [_region(lungs, heat) for lungs, heat in zip(_lungs(fields), heat_BRC, strict=True)]


def sentence(region: Region, low: float) -> str:
    """``right lower zone, 4.2 sd above normal films there``; below ``low``, the foot of the scale, nothing does."""
    if region.sd < low:
        return f"nothing stands out (highest: {region.words}, {region.sd:.1f} sd)"
    return f"{region.words}, {region.sd:.1f} sd above normal films there"


def _region(lungs: _Lungs, heat_RC: Heat) -> Region:
    rows, columns = heat_RC.shape
    row, column = divmod(int(heat_RC.argmax()), columns)
    x, y = (column + 0.5) / columns, (row + 0.5) / rows
    return Region(_words(lungs, x, y, 1 / columns, 1 / rows), x, y, float(heat_RC[row, column]))


def _words(lungs: _Lungs, x: float, y: float, width: float, height: float) -> str:
    """The place (x, y), the centre of a cell of the given width and height."""
    left, right = lungs.inner
    side = "right" if x < (left + right) / 2 else "left"
    if lungs.field is None:
        return "central" if left <= x <= right else f"{side} {_zone(lungs, y)} zone of the film"
    if _share(lungs.field, x, y, width, height) >= _IN_LUNG:
        return f"{side} {_zone(lungs, y)} zone"
    if y < lungs.top:
        return f"above the lungs, {side}"
    if y > lungs.bottom:
        return f"below the lungs, {side}"
    if left <= x <= right:
        return f"central (mediastinum), {_zone(lungs, y)} third"
    if lungs.outer[0] <= x <= lungs.outer[1]:  # heart, diaphragm, or a lung too bright to be seen as one
        return f"{side} {_zone(lungs, y)} zone, dense part"
    return f"outside the lungs, {side}"


def _zone(lungs: _Lungs, y: float) -> str:
    third = int(3 * (y - lungs.top) / max(lungs.bottom - lungs.top, 1e-6))
    return _ZONES[min(max(third, 0), 2)]


def _share(field: NDArray[np.bool_], x: float, y: float, width: float, height: float) -> float:
    rows, columns = field.shape
    cell = field[
        round((y - height / 2) * rows) : round((y + height / 2) * rows),
        round((x - width / 2) * columns) : round((x + width / 2) * columns),
    ]
    return float(cell.mean()) if cell.size else 0.0


def _lungs(fields_BSS: NDArray[np.bool_]) -> Iterator[_Lungs]:
    """Edges of the two lungs of each film; no field where either side of the film has too little of one."""
    _, height, width = fields_BSS.shape
    across_BS, down_BS = fields_BSS.sum(axis=2), fields_BSS.sum(axis=1)  # of all films at once
    for field, across, down in zip(fields_BSS, across_BS, down_BS, strict=True):
        halves = down[: width // 2], down[width // 2 :]
        rows = np.flatnonzero(across > 0.02 * width)
        columns = [np.flatnonzero(half > 0.1 * len(rows)) for half in halves]
        whole = across.sum() > _WHOLE_FILM * field.size
        small = min(half.sum() for half in halves) < _SMALLEST_LUNG * field.size
        if whole or small or not (len(rows) and len(columns[0]) and len(columns[1])):
            yield _Lungs(None)
            continue
        inner = (float(columns[0][-1] + 1) / width, float(columns[1][0] + width // 2) / width)
        outer = (float(columns[0][0]) / width, float(columns[1][-1] + 1 + width // 2) / width)
        yield _Lungs(field, float(rows[0]) / height, float(rows[-1] + 1) / height, inner, outer)

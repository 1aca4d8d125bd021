"""Masks of films at the size of the films: read from images or run-length codes, kept as bits, made from probabilities.

:class:`Masks` holds one bit a pixel. :func:`choose` finds on validation films which threshold turns probabilities into
a mask, and how small a connected component of it may be.

Shapes: N films of the manifest, K films with a mask, B films of a batch, S pixels a side, T thresholds, A areas.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import label
from torch import Tensor

from afire.data.decode import film_shape, fit_mask, read_mask
from afire.data.manifest import META_PREFIX, Manifest, inside_root
from afire.data.pack import Films
from afire.data.rle import decode_rle
from afire.errors import UserError
from afire.progress import track
from afire.tasks.settings import MaskConfig

Floats = NDArray[np.float64]
By = Literal["all", "both"]
AUTO = ("mask", "rle")
_PROPORTIONS = 0.02  # by which those of film and mask may differ: sides are rounded when films are resized
_ONES_IN_BYTE = np.array([byte.bit_count() for byte in range(256)], np.uint8)

logger = logging.getLogger("afire")


class Masks:
    """The masks of some films: packed bits (K, ceil(S*S/8)), and where in them each row of the manifest is."""

    def __init__(self, bits: NDArray[np.uint8], place: NDArray[np.int64], size: int) -> None:
        self.bits, self.place, self.size = bits, place, size

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Masks (B, S, S) of rows that have one."""
        return unpack(self.bits[self.place[rows]], self.size)

    def batch(self, rows: NDArray[np.int64]) -> Tensor:
        """Masks (B, 1, S, S) as float32 zeros and ones."""
        return torch.from_numpy(self.read(rows)).unsqueeze(1).float()

    def share(self, rows: NDArray[np.int64]) -> float:
        """Share of pixels of these films that lie inside."""
        inside = int(_ONES_IN_BYTE[self.bits[self.place[rows]]].sum(dtype=np.int64))
        return inside / (len(rows) * self.size**2)


def pack(masks: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Masks (B, S, S) -> (B, ceil(S*S/8)), eight pixels a byte."""
    return np.packbits(masks.reshape(len(masks), -1), axis=1)


def unpack(bits: NDArray[np.uint8], size: int) -> NDArray[np.bool_]:
    """The inverse of :func:`pack`."""
    pixels = np.unpackbits(bits, axis=1, count=size * size)
    return pixels.reshape(len(bits), size, size).astype(np.bool_)


def mask_cells(manifest: Manifest, config: MaskConfig) -> tuple[str, list[str | None]]:
    """What the masks are of, and each film's path or run-length code; empty for an empty mask, None for no mask."""
    table = manifest.table
    if config.column == "auto":
        cells = table["mask"].where(table["mask"] != "", table["rle"])
    else:
        cells = table[_find_column(manifest, config.column)].astype(str)
    # A NaN in a column of numbers has become "nan" by now, and means nothing.
    masks: list[str | None] = [cell if cell not in ("", "nan") else None for cell in cells]
    if config.normal_is_empty:
        normal = (table["normal"] == 1).tolist()
        masks = ["" if mask is None and is_normal else mask for mask, is_normal in zip(masks, normal, strict=True)]
    if all(mask is None for mask in masks):
        raise UserError(
            f"no film has a mask in column {config.column if config.column != 'auto' else ' or '.join(AUTO)}; "
            "choose the column with --mask-column."
        )
    is_default = config.column in ("auto", *AUTO)
    return str(manifest.info.get("mask", "mask")) if is_default else config.column.removeprefix(META_PREFIX), masks


def _find_column(manifest: Manifest, name: str) -> str:
    for column in (name, f"{META_PREFIX}{name}"):
        if column in manifest.table:
            return column
    known = [*AUTO, *(column for column in manifest.table.columns if column.startswith(META_PREFIX))]
    raise UserError(f"the manifest has no column {name} for masks; it has {', '.join(known)}.")


def load_masks(films: Films, rows: NDArray[np.int64], cells: list[str | None], config: MaskConfig) -> Masks:
    """Read the masks of ``rows``, which all have one, and bring them to the shape of the films."""
    manifest, size = films.manifest, films.size
    bits = np.zeros((len(rows), -(-size * size // 8)), np.uint8)
    unchecked = 0
    for number, row in enumerate(track(rows.tolist(), "reading masks", unit="masks")):
        cell = cells[row]
        if not cell:
            continue
        mask = _read_cell(manifest, cell, row)
        shape = film_shape(manifest.path(row))
        unchecked += shape is None
        if shape is not None:
            _check_size(mask.shape, shape, str(manifest.table["image"].iloc[row]), config)
        bits[number] = pack(fit_mask(mask, size, films.fit)[None])
    if unchecked:
        logger.warning(
            "%d films are not where they were packed from: the size of their masks is not checked", unchecked
        )
    place = np.full(len(manifest), -1, np.int64)
    place[rows] = np.arange(len(rows))
    return Masks(bits, place, size)


def _read_cell(manifest: Manifest, cell: str, row: int) -> NDArray[np.bool_]:
    if not cell.startswith("{"):
        return read_mask(inside_root(manifest.root, cell, "mask"))
    try:
        return decode_rle(cell)
    except UserError as error:
        raise UserError(f"film {manifest.table['image'].iloc[row]}: {error}") from None


def _check_size(mask: tuple[int, ...], film: tuple[int, int], image: str, config: MaskConfig) -> None:
    if mask == film:
        return
    sizes = f"the mask of {image} is {mask[0]} x {mask[1]} pixels, but the film is {film[0]} x {film[1]}"
    if config.size == "same":
        raise UserError(f"{sizes}; if it was drawn on another size of the same film, add --set masks.size=scaled.")
    if abs(mask[0] * film[1] / (mask[1] * film[0]) - 1) > _PROPORTIONS:
        raise UserError(f"{sizes}, which are other proportions: it is not a mask of this film.")


@dataclass(frozen=True)
class Choice:
    """What validation films decided, and the value that it gave."""

    threshold: float
    min_area: float
    value: float


def choose(
    areas_BTA: Floats,
    overlaps_BTA: Floats,
    truth_B: Floats,
    thresholds: Sequence[float],
    min_areas: Sequence[float],
    by: By,
) -> Choice:
    """The pair with the best mean Dice; of equals the threshold nearest to a half, then the smallest area, wins.

    ``all``: Dice over all films. ``both``: the mean of that and of Dice over films with a mask. Where most films have
    none, a network that has learnt little is best when it says nothing at all, and only ``both`` sees it learn.
    """
    total = areas_BTA + truth_B[:, None, None]
    dice_BTA = np.divide(2 * overlaps_BTA, total, out=np.ones(total.shape), where=total > 0)
    value_TA, positive = dice_BTA.mean(axis=0), truth_B > 0
    if by == "both" and positive.any():
        value_TA = (value_TA + dice_BTA[positive].mean(axis=0)) / 2
    pairs = [(t, a) for t in range(len(thresholds)) for a in range(len(min_areas))]
    t, a = min(pairs, key=lambda pair: (-value_TA[pair], abs(thresholds[pair[0]] - 0.5), min_areas[pair[1]]))
    return Choice(round(thresholds[t], 6), min_areas[a], float(value_TA[t, a]))


def component_sizes(inside: NDArray[np.bool_], truth: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Pixels of each connected component of ``inside`` (S, S), and how many of them lie in ``truth``."""
    components, _ = label(inside)
    areas = np.bincount(components.ravel())[1:].astype(np.float64)
    return areas, np.bincount(components.ravel(), truth.ravel())[1:].astype(np.float64)


def without_small_components(masks: NDArray[np.bool_], min_pixels: float) -> NDArray[np.bool_]:
    """Masks (B, S, S) without connected components of fewer than ``min_pixels`` pixels."""
    if min_pixels <= 0:
        return masks
    result = np.zeros_like(masks)
    for number, mask in enumerate(masks):
        components, _ = label(mask)
        large = np.bincount(components.ravel()) >= min_pixels
        large[0] = False  # what lies outside
        result[number] = large[components]
    return result

"""Masks as runs: the coding of SIIM-ACR, and the one of the manifest's ``rle`` column.

SIIM-ACR   text of pairs "gap length": the gap since the *end of the last run*, down the columns; ``-1`` = nothing
manifest   JSON {size: [height, width], runs: [[start, length], ...]}: absolute starts, along the rows

H, W are the mask's height and width, R the number of runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afire.errors import UserError

Mask = NDArray[np.bool_]
Runs = NDArray[np.int64]
_NOTHING = "-1"
# A cell of a table must not be able to ask for all the memory there is; large detectors have some 20 million pixels.
_MAX_PIXELS = 120_000_000


def decode_siim(text: str, height: int = 1024, width: int = 1024) -> Mask:
    """SIIM-ACR's text to a mask, bool (H, W). ``-1`` and an empty text are a mask of nothing."""
    pixels = _check_size(height, width)
    if text.strip() in ("", _NOTHING):
        return np.zeros((height, width), np.bool_)
    numbers = _siim_numbers(text, pixels)
    # The numbers alternate "outside for so long, inside for so long"; what is left of the film is outside.
    inside = np.arange(len(numbers) + 1) % 2 == 1
    down_columns = np.repeat(inside, [*numbers, pixels - int(numbers.sum())])
    return np.ascontiguousarray(down_columns.reshape(width, height).T)


def _siim_numbers(text: str, pixels: int) -> Runs:
    shown = text if len(text) <= 40 else text[:40] + "..."
    try:
        numbers: Runs = np.array(text.split(), dtype=np.int64)
    except (ValueError, OverflowError):
        raise UserError(f"the RLE mask {shown!r} holds something that is not a whole number.") from None
    if len(numbers) % 2:
        raise UserError(f"the RLE mask {shown!r} has {len(numbers)} numbers; they come in pairs, gap and length.")
    if (numbers < 0).any():
        raise UserError(f"the RLE mask {shown!r} holds the negative number {int(numbers.min())}.")
    if (numbers > pixels).any() or numbers.sum() > pixels:
        raise UserError(f"the RLE mask {shown!r} runs past the end of a film of {pixels:,} pixels; check its size.")
    return numbers


def encode_siim(mask: Mask) -> str:
    """A mask (H, W) as SIIM-ACR's text; the inverse of :func:`decode_siim`."""
    runs = mask_to_runs(mask.T)
    if not len(runs):
        return _NOTHING
    ends = runs.sum(axis=1)
    gaps = runs[:, 0] - np.concatenate([[0], ends[:-1]])
    return " ".join(map(str, np.column_stack([gaps, runs[:, 1]]).ravel()))


def mask_to_runs(mask: Mask) -> Runs:
    """A mask (H, W) to its runs along the rows, int64 (R, 2): start and length. A run may go on in the next row."""
    flat = np.ascontiguousarray(mask, dtype=np.bool_).ravel()
    edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    if flat.size and flat[0]:
        edges = np.concatenate([[0], edges])
    if flat.size and flat[-1]:
        edges = np.concatenate([edges, [flat.size]])
    runs: Runs = edges.reshape(-1, 2).astype(np.int64)
    runs[:, 1] -= runs[:, 0]
    return runs


def runs_to_mask(runs: Sequence[Sequence[int]] | Runs, size: tuple[int, int]) -> Mask:
    """Runs along the rows to a mask, bool (H, W); ``size`` is (H, W). Runs may overlap and come in any order."""
    height, width = size
    pixels = _check_size(height, width)
    pairs = _as_runs(runs)
    if (pairs < 0).any() or (pairs > pixels).any() or (pairs.sum(axis=1) > pixels).any():
        raise UserError(f"the runs of a mask of {height} x {width} pixels run past its end.")
    flat = np.zeros(pixels, np.bool_)
    # A few hundred slices: ten times faster than a cumulative sum over a million pixels.
    for start, length in pairs.tolist():
        flat[start : start + length] = True
    return flat.reshape(height, width)


def encode_rle(mask: Mask) -> str:
    """A mask (H, W) as a cell of the manifest's ``rle`` column."""
    height, width = mask.shape
    return encode_runs(mask_to_runs(mask).tolist(), (height, width))


def encode_runs(runs: Sequence[Sequence[int]], size: tuple[int, int]) -> str:
    """Runs along the rows as a cell of the manifest's ``rle`` column; ``size`` is (H, W)."""
    return json.dumps({"size": list(size), "runs": runs}, separators=(",", ":"))


def decode_rle(cell: str) -> Mask:
    """A cell of the manifest's ``rle`` column to a mask, bool (H, W); the inverse of :func:`encode_rle`."""
    try:
        value = json.loads(cell)
        height, width = value["size"]
        runs = value["runs"]
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        raise UserError(f"{cell[:60]!r} is not a mask; expected JSON with size [height, width] and runs.") from None
    return runs_to_mask(runs, (height, width))


def _as_runs(runs: Any) -> Runs:
    try:
        pairs = np.asarray(runs)
        if pairs.size == 0:
            return np.zeros((0, 2), np.int64)
        if pairs.ndim != 2 or pairs.shape[1] != 2 or not np.issubdtype(pairs.dtype, np.integer):
            raise ValueError
        return pairs.astype(np.int64)
    except (ValueError, OverflowError):
        raise UserError("the runs of a mask are not pairs of whole numbers, start and length.") from None


def _check_size(height: Any, width: Any) -> int:
    whole = all(isinstance(side, int | np.integer) and not isinstance(side, bool) for side in (height, width))
    if not whole or height < 1 or width < 1 or height * width > _MAX_PIXELS:
        raise UserError(f"a mask of {height} x {width} pixels is not possible; expected two whole numbers.")
    return int(height) * int(width)

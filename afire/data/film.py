"""What every reader returns, and the grey rules they share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afire.errors import ImageError

Film = NDArray[np.float32]

# A coloured film: more than this share of pixels whose channels differ by more than this many of 255 levels. JPEG
# rounding moves the channels of a grey film by a level or two; a coloured marker in a corner does not make a photo.
_COLOUR_SHARE, _COLOUR_SPREAD = 0.01, 12


@dataclass(frozen=True)
class FilmInfo:
    """What is worth knowing about a film besides its pixels; nothing in it identifies a person."""

    width: int
    """Width as stored."""
    height: int
    """Height as stored."""
    bits: int
    """Bits of one grey value as read: 1, 8, 10, 12, 16, 32."""
    kind: str
    """``png``, ``jpeg``, ``tiff``, ``bmp``, ``gif`` or ``dicom``."""
    view: str = ""
    """``PA``, ``AP``, ``LATERAL`` or empty."""
    patient: str = ""
    """Salted hash of the DICOM patient id, or empty."""
    file_bytes: int = 0
    """Size of the file."""
    inverted: bool = False
    """Stored with white as zero (MONOCHROME1, TIFF WhiteIsZero); the film that is returned has black as zero."""
    constant: bool = False
    """All pixels of the film are equal: it can be read, and shows nothing."""
    colour: bool = False
    """Truly coloured, not grey in three channels: a photo or a screenshot rather than a film."""


def check_range(film: Film, path: Path) -> bool:
    """Hold every reader to its promise of [0,1]; return whether all pixels are equal."""
    low, high = float(film.min()), float(film.max())
    if not (low >= 0.0 and high <= 1.0):  # also when either is NaN
        raise ImageError(f"{path} has a grey-scale that leads to no finite picture; repair it or leave it out.")
    return low == high


def grey_from_rgb(rgb: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], bool]:
    """Grey (H, W) of an image (H, W, 3), and whether it is truly coloured.

    Equal channels are taken as they are; otherwise the luminance of ITU-R BT.601, as pillow and JPEG have it.
    """
    red, green, blue = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    if np.array_equal(red, green) and np.array_equal(green, blue):
        return np.ascontiguousarray(red), False
    spread = np.maximum(np.maximum(red, green), blue) - np.minimum(np.minimum(red, green), blue)
    coloured = bool(np.count_nonzero(spread > _COLOUR_SPREAD) > _COLOUR_SHARE * spread.size)
    luminance = rgb.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
    return np.rint(luminance).astype(np.uint8), coloured


def require_finite(values: NDArray[Any], path: Path) -> None:
    """Refuse NaN and infinity: they would spread through every mean that is taken later."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ImageError(f"{path} holds NaN or infinite pixels; repair it or leave it out.")


def stretch(values: NDArray[Any], low: float, high: float) -> Film:
    """Map low..high to 0..1 and clip; all zero when the range is empty."""
    if not high > low:
        return np.zeros(values.shape, np.float32)
    # In double: 32-bit integers and large floats lose their low digits in single precision before the shift.
    scaled = (values.astype(np.float64) - low) / (high - low)
    return np.clip(scaled, 0.0, 1.0).astype(np.float32)


def check_size(path: Path, width: int, height: int, max_pixels: int) -> None:
    """Refuse a film without pixels, or with more than ``max_pixels``, before anything is decoded."""
    if width < 1 or height < 1:
        raise ImageError(f"{path} has no pixels (its header says {width} x {height}).")
    if width * height > max_pixels:
        raise ImageError(
            f"{path} says it has {width} x {height} pixels, more than max_pixels = {max_pixels:,}; "
            "it is not a film, or the limit must be raised."
        )

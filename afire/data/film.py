"""A film: what readers return, the grey rules they share, how it becomes square, and silence while it is read.

A film of any shape becomes square in one of three ways (``image.fit``), and masks and boxes follow it:

    squash      the whole film, sides scaled separately; nothing is lost, proportions are
    letterbox   the whole film, proportions kept, centred on black
    crop        the central square; proportions kept, the ends of the long side are lost

pydicom and pillow are kept silent while they read: their warnings and log lines quote tag values, some of them names.

H, W are the film's height and width, S the side of the square.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from afire.errors import ImageError, UserError

Film = NDArray[np.float32]
FitMode = Literal["squash", "letterbox", "crop"]
FIT_MODES: tuple[FitMode, ...] = ("squash", "letterbox", "crop")
Box = tuple[float, float, float, float]
MaskType = TypeVar("MaskType", np.bool_, np.uint8)

# A coloured film: more than this share of pixels whose channels differ by more than this many of 255 levels. JPEG
# rounding moves the channels of a grey film by a level or two; a coloured marker in a corner does not make a photo.
_COLOUR_SHARE, _COLOUR_SPREAD = 0.01, 12

_LOGGERS = (
    "pydicom",
    "pydicom.pixels.decoders.base",
    "pydicom.pixels.utils",
    "PIL.ImageFile",
    "PIL.PngImagePlugin",
    "PIL.TiffImagePlugin",
)
# Attributed by stack level, so a warning of pydicom may carry our module's name.
_MODULES = r"(pydicom|PIL|pylibjpeg|libjpeg|openjpeg|afire\.data)\b"

_here = threading.local()
_lock = threading.Lock()
_readers = 0
_restore: warnings.catch_warnings[None] | None = None


@dataclass(frozen=True)
class FilmInfo:
    """What is worth knowing about a film besides its pixels; nothing in it identifies a person."""

    width: int
    """Width of the film as it is shown, upright."""
    height: int
    """Height of the film as it is shown, upright."""
    bits: int
    """Bits of one grey value as read: 1, 8, 10, 12, 14, 16, 32."""
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
    unused_bits: int = 0
    """Bits of the file that no pixel uses and ``bits`` does not count, such as 4 of a 12-bit film in a 16-bit PNG."""


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


class _Placement(NamedTuple):
    """Which rectangle of the film is shown, and which rectangle of the square shows it; both in whole pixels."""

    left: int
    top: int
    width: int
    height: int
    to_left: int
    to_top: int
    to_width: int
    to_height: int


def fit_square(film: NDArray[np.float32], size: int, mode: FitMode = "squash") -> NDArray[np.float32]:
    """Resize a film (H, W) in [0,1] to (size, size), antialiased, still in [0,1].

    The filter is bicubic, widened by the factor of reduction (so nothing aliases); its overshoot at sharp edges is
    clipped. No shortcut by block averages first: it is faster on large films, but it would filter them differently
    from small ones, by up to five grey levels of 255 at edges.
    """
    place = _place(film.shape, size, mode)
    source = (place.left, place.top, place.left + place.width, place.top + place.height)
    image = Image.fromarray(np.ascontiguousarray(film, dtype=np.float32))
    resized = np.asarray(image.resize((place.to_width, place.to_height), Image.Resampling.BICUBIC, source))
    square = np.zeros((size, size), np.float32)
    np.clip(resized, 0.0, 1.0, out=_target(square, place))
    return square


def fit_mask(mask: NDArray[MaskType], size: int, mode: FitMode = "squash") -> NDArray[MaskType]:
    """Resize a mask (H, W) to (size, size): a pixel is inside when more than half of the area it covers is.

    A ``bool`` mask stays ``bool``. In a ``uint8`` mask every bit is a mask of its own (so 0/1, 0/255 and bit flags
    all keep their values). What ``letterbox`` adds is outside.
    """
    place = _place(mask.shape, size, mode)
    shown = mask[place.top : place.top + place.height, place.left : place.left + place.width]
    square = np.zeros((size, size), mask.dtype)
    target = _target(square, place)
    if mask.dtype == np.bool_:
        target[...] = _area_share(shown != 0, place.to_height, place.to_width) > 0.5
        return square
    for bit in range(8):
        inside = (shown & np.uint8(1 << bit)) != 0
        if inside.any():
            majority = _area_share(inside, place.to_height, place.to_width) > 0.5
            target |= majority.astype(np.uint8) << np.uint8(bit)
    return square


def fit_box(box: Box, height: int, width: int, mode: FitMode = "squash") -> Box | None:
    """Where a box (x, y, w, h), in fractions of a film of ``height`` x ``width``, lies in the square film.

    Fractions again, clipped to the square; ``None`` when nothing of it is left. With ``letterbox`` the answer is off by
    less than a pixel of the square, because the film is placed on whole pixels.
    """
    _check(height, width, 1, mode)
    x, y, w, h = box
    side_x, side_y, start_x, start_y = float(width), float(height), 0.0, 0.0  # of the square, in film pixels
    if mode == "letterbox":
        side_x = side_y = float(max(height, width))
        start_x, start_y = (width - side_x) / 2, (height - side_y) / 2
    elif mode == "crop":
        place = _place((height, width), 1, mode)
        side_x, side_y, start_x, start_y = place.width, place.height, place.left, place.top
    left, right = (_clip01((edge * width - start_x) / side_x) for edge in (x, x + w))
    top, bottom = (_clip01((edge * height - start_y) / side_y) for edge in (y, y + h))
    if right <= left or bottom <= top:
        return None
    return left, top, right - left, bottom - top


def _clip01(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _place(shape: tuple[int, ...], size: int, mode: FitMode) -> _Placement:
    if len(shape) != 2:
        raise ValueError(f"a film is (H, W); this array has shape {shape}")
    height, width = shape
    _check(height, width, size, mode)
    if mode == "squash":
        return _Placement(0, 0, width, height, 0, 0, size, size)
    if mode == "crop":
        side = min(height, width)
        return _Placement((width - side) // 2, (height - side) // 2, side, side, 0, 0, size, size)
    scale = size / max(height, width)
    to_width, to_height = max(1, round(width * scale)), max(1, round(height * scale))
    to_left, to_top = (size - to_width) // 2, (size - to_height) // 2
    return _Placement(0, 0, width, height, to_left, to_top, to_width, to_height)


def _check(height: int, width: int, size: int, mode: str) -> None:
    if mode not in FIT_MODES:
        raise UserError(f"image.fit {mode!r} is not one of {', '.join(FIT_MODES)}.")
    if height < 1 or width < 1 or size < 1:
        raise ValueError(f"cannot fit a film of {width} x {height} pixels into a square of side {size}")


def _target(square: NDArray[MaskType] | NDArray[np.float32], place: _Placement):  # type: ignore[no-untyped-def]
    return square[place.to_top : place.to_top + place.to_height, place.to_left : place.to_left + place.to_width]


def _area_share(inside: NDArray[np.bool_], height: int, width: int) -> NDArray[np.float32]:
    """Share (height, width) of each new pixel's area that is inside; exact for any ratio of sizes."""
    rows, columns = _overlaps(inside.shape[0], height), _overlaps(inside.shape[1], width)
    share: NDArray[np.float32] = rows @ inside.astype(np.float32) @ columns.T
    return share


def _overlaps(old: int, new: int) -> NDArray[np.float32]:
    """Matrix (new, old): which share of each new cell each old cell covers; rows sum to one."""
    step = old / new
    start = np.arange(new)[:, None] * step
    cell = np.arange(old)[None, :]
    overlap = np.minimum(start + step, cell + 1) - np.maximum(start, cell)
    share: NDArray[np.float32] = (np.clip(overlap, 0.0, None) / step).astype(np.float32)
    return share


def _not_reading(_record: logging.LogRecord) -> bool:
    return not getattr(_here, "reading", False)


@contextmanager
def quiet_readers() -> Iterator[None]:
    """Drop what pydicom and pillow would say about a file, in this thread, until the body is done.

    ``warnings`` has one state for all threads. The first reader in changes it and the last one out restores it;
    nested ``catch_warnings`` of several threads would restore each other's state.
    """
    before = getattr(_here, "reading", False)
    _here.reading = True
    _enter()
    try:
        yield
    finally:
        _leave()
        _here.reading = before


def _enter() -> None:
    global _readers, _restore
    with _lock:
        if _readers == 0:
            for name in _LOGGERS:
                logging.getLogger(name).addFilter(_not_reading)  # adding it twice does nothing
            _restore = warnings.catch_warnings()
            _restore.__enter__()
            warnings.filterwarnings("ignore", module=_MODULES)
        _readers += 1


def _leave() -> None:
    global _readers, _restore
    with _lock:
        _readers -= 1
        if _readers == 0 and _restore is not None:
            _restore.__exit__(None, None, None)
            _restore = None

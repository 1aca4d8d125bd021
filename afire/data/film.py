"""A film: what readers return, the grey rules they share, silence while it is read, and no name of a patient.

Patient ids become keyed one-way hashes and views come from a fixed list, so that nothing a header says about a person
gets into a manifest. pydicom and pillow are kept silent while they read: their warnings and log lines quote tag values,
some of them names.

A JPEG file can be reduced to its picture, which a report may then show without encoding it again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.errors import ImageError

SALT_VARIABLE = "AFIRE_PATIENT_SALT"
DEFAULT_SALT = "afire"
OTHER_VIEW = "OTHER"
_HASH = r"[0-9a-f]{16}"
_VIEWS = {
    "PA": "PA", "POSTEROANTERIOR": "PA", "AP": "AP", "ANTEROPOSTERIOR": "AP", "FRONTAL": "FRONTAL",
    "LL": "LATERAL", "RL": "LATERAL", "LAT": "LATERAL", "LATERAL": "LATERAL",
    "LEFTLATERAL": "LATERAL", "RIGHTLATERAL": "LATERAL",
}  # fmt: skip
Film = NDArray[np.float32]
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
_START, _END, _SCAN, _MAY_TURN = 0xD8, 0xD9, 0xDA, 0xE1
_FRAMES = (0xC0, 0xC2)  # baseline and progressive, which every browser shows
_NEEDED = (*_FRAMES, 0xC4, 0xDB, 0xDD, _SCAN)  # with tables and the interval of restarts
_LEFT_OUT = (*range(0xE0, 0xF0), 0xFE)  # what programs write beside the picture, and comments
_JFIF = b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # within a scan, 0xFF is followed by a zero or a restart
_EIGHT_BITS_ONE_CHANNEL = (8, 1)


def hash_patient(patient_id: str, salt: str | None = None) -> str:
    """16 hex digits that stand for a patient: equal in every run and on every machine with the same ``salt``.

    Without ``salt``, the environment variable AFIRE_PATIENT_SALT is used, else "afire". The default keeps ids out of
    sight; only a salt that you keep to yourself keeps others from trying out ids until one fits. An empty id stays
    empty.
    """
    patient_id = patient_id.strip(" \0\t\r\n")
    if not patient_id:
        return ""
    salt = os.environ.get(SALT_VARIABLE, DEFAULT_SALT) if salt is None else salt
    key = hashlib.blake2b(salt.encode("utf-8"), digest_size=32).digest()
    return hashlib.blake2b(patient_id.encode("utf-8", "surrogatepass"), key=key, digest_size=8).hexdigest()


def hash_patients(ids: pd.Series) -> pd.Series:
    """Each id of a column hashed; those that are hashes already stay, so that a table can be read and written again."""
    hashes = {name: name if re.fullmatch(_HASH, name) else hash_patient(name) for name in ids.unique()}
    return ids.map(hashes)


def view_of(text: str) -> str:
    """PA, AP, LATERAL or FRONTAL in one spelling; empty for any other text, which may be anything."""
    return _VIEWS.get(re.sub(r"[^A-Z]", "", text.upper()), "")


def view_names(texts: pd.Series) -> pd.Series:
    """A column of :func:`view_of`; what is there and is none of them is ``OTHER``."""
    views = {text: view_of(text) or (OTHER_VIEW if text.strip() else "") for text in texts.unique()}
    return texts.map(views)


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


def picture_alone(data: bytes) -> bytes | None:
    """The same picture, bit by bit, without names, dates, thumbnails and whatever follows it in the file.

    None for what is not a grey JPEG of 8 bits, and where the file may ask for the picture to be turned.
    """
    if not data.startswith(bytes((0xFF, _START))):
        return None
    segments, at = [data[:2], _JFIF], 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == _MAY_TURN or marker not in (*_NEEDED, *_LEFT_OUT) or end > len(data):
            return None
        if marker in _FRAMES and (data[at + 4], data[at + 9]) != _EIGHT_BITS_ONE_CHANNEL:
            return None
        if marker == _SCAN:
            after = _AFTER_SCAN.search(data, end)
            if after is None:
                return None
            end = after.start()
        if marker in _NEEDED:
            segments.append(data[at:end])
        if marker == _SCAN and data[end + 1] == _END:
            return b"".join([*segments, data[end : end + 2]])
        at = end
    return None

"""One function reads a film, whatever its format, into one float channel in [0,1]: :func:`read_film`.

The content of a file decides what it is, not its name. Everything that is wrong with a file is an :class:`ImageError`
of one sentence that names the path and quotes nothing from inside the file, so that no identifying tag gets into a log.

H, W are the film's height and width.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from afire.data.dicom_grey import Voi
from afire.data.film import Film, FilmInfo
from afire.data.identity import hash_patient
from afire.data.quiet import quiet_readers
from afire.data.raster import looks_like_raster, read_raster, read_raster_mask
from afire.errors import ImageError

__all__ = [
    "IMAGE_SUFFIXES",
    "MAX_PIXELS",
    "MODALITIES",
    "Film",
    "FilmInfo",
    "Voi",
    "hash_patient",
    "is_image_file",
    "read_film",
    "read_mask",
    "read_mask_raw",
]

MAX_PIXELS = 120_000_000
"""Films of more pixels are refused before they are decoded; large digital detectors have some 20 million."""

MODALITIES = ("CR", "DX", "DR", "RG", "XR", "OT", "")
"""DICOM modalities that can be a radiograph. OT is what scanned films carry; de-identified files often have none."""

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".dcm", ".dicom", ".dic"})
"""Suffixes, in lower case, that a search through a folder takes."""

_PREAMBLE = 128
_HEAD_BYTES = _PREAMBLE + 4
# The most that a film can need: three 16-bit channels, and room for a long header.
_BYTES_PER_PIXEL, _HEADER_BYTES = 6, 64 << 20


def read_film(
    path: Path,
    voi: Voi = "auto",
    max_pixels: int = MAX_PIXELS,
    salt: str | None = None,
    modalities: Collection[str] = MODALITIES,
) -> tuple[Film, FilmInfo]:
    """Read a film, float32 (H, W) in [0,1] with black = 0, and what is known about it.

    ``voi`` chooses the DICOM grey-scale, ``salt`` goes into the hash of the DICOM patient id
    (:func:`hash_patient`), ``modalities`` are the DICOM modalities to accept.
    """
    path = Path(path)
    data = _read_bytes(path, max_pixels)
    with quiet_readers():
        if _looks_like_dicom(data):
            from afire.data.dicom import read_dicom  # pydicom takes half a second to import; few datasets need it

            return read_dicom(path, data, voi=voi, max_pixels=max_pixels, salt=salt, modalities=modalities)
        return read_raster(path, data, max_pixels)


def read_mask(path: Path, max_pixels: int = MAX_PIXELS) -> NDArray[np.bool_]:
    """Read a mask image, bool (H, W): non-zero is inside (in a JPEG, at least half of white is)."""
    inside: NDArray[np.bool_] = read_mask_raw(path, max_pixels) != 0
    return inside


def read_mask_raw(path: Path, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Read the stored numbers of a mask image, uint8 (H, W): grey values or palette indices, for bit flags."""
    path = Path(path)
    data = _read_bytes(path, max_pixels)
    if _looks_like_dicom(data):
        raise ImageError(f"{path} is a DICOM file, and masks are read from PNG, TIFF, BMP, GIF or JPEG.")
    with quiet_readers():
        return read_raster_mask(path, data, max_pixels)


def is_image_file(path: Path) -> bool:
    """Whether a search through a folder should take ``path``: by suffix, or by content if the name has no real suffix.

    DICOM exports are often named after a UID, so ``1.2.840.17`` is looked into. Nothing is decoded.
    """
    if path.name.startswith("._"):  # resource forks that macOS leaves beside every file it copies
        return False
    suffix = path.suffix.lower()
    named = suffix in IMAGE_SUFFIXES
    if not named and suffix and not suffix[1:].isdigit():
        return False
    try:
        if not path.is_file():
            return False
        if named:
            return True
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError:
        return False
    return _looks_like_dicom(head) or looks_like_raster(head)


def _looks_like_dicom(head: bytes) -> bool:
    """Whether a file that starts with ``head`` (132 bytes or more) is DICOM, with or without the usual preamble."""
    if head[_PREAMBLE:_HEAD_BYTES] == b"DICM":
        return True
    # Old files start with the first element: group 2 or 8, a small element number, then a VR or a small length.
    if len(head) < 8 or head[:2] not in (b"\x02\x00", b"\x08\x00") or head[3] != 0:
        return False
    return (head[4:6].isalpha() and head[4:6].isupper()) or head[6:8] == b"\0\0"


def _read_bytes(path: Path, max_pixels: int) -> bytes:
    """The whole file in one read: cheap on network disks, and every later step sees the same bytes."""
    try:
        if path.is_dir():
            raise ImageError(f"{path} is a folder, not a film.")
        if not path.is_file():  # a pipe or a device would block or never end
            raise ImageError(f"{path} does not exist or is not a regular file; check the path.")
        size = path.stat().st_size
        if size == 0:
            raise ImageError(f"{path} is empty (0 bytes); copy it again or leave it out.")
        if size > _BYTES_PER_PIXEL * max_pixels + _HEADER_BYTES:
            raise ImageError(f"{path} is {size:,} bytes, too large for a film of max_pixels = {max_pixels:,}.")
        return path.read_bytes()
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {error.strerror or type(error).__name__}.") from None

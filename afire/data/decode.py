"""Reading films and masks: any format into one float channel in [0,1], :func:`read_film` first of all.

PNG, JPEG, TIFF, BMP and GIF are read here with pillow, DICOM in :mod:`afire.data.dicom`. The content of a file decides
what it is, not its name. Everything that is wrong with a file is an :class:`~afire.errors.ImageError` of one message
that names the path and quotes nothing from inside the file, so that no identifying tag gets into a log.

A film of any shape becomes square in one of three ways (``image.fit``), and masks and boxes follow it:

    squash      the whole film, sides scaled separately; nothing is lost, proportions are
    letterbox   the whole film, proportions kept, centred on black
    crop        the central square; proportions kept, the ends of the long side are lost

H, W are the film's height and width, S the side of the square.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from afire.data.dicom_grey import Voi
from afire.data.film import (
    Film,
    FilmInfo,
    check_size,
    grey_from_rgb,
    quiet_readers,
    require_finite,
    stretch,
)
from afire.errors import ImageError, UserError

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

MAX_PIXELS = 120_000_000
"""Films of more pixels are refused before they are decoded; large digital detectors have some 20 million."""

MODALITIES = ("CR", "DX", "DR", "RG", "XR", "OT", "")
"""DICOM modalities that can be a radiograph. OT is what scanned films carry; de-identified files often have none."""

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".dcm", ".dicom", ".dic"})
"""Suffixes, in lower case, that a search through a folder takes."""

# The most that a film can need: three 16-bit channels, and room for a long header.
_BYTES_PER_PIXEL, _HEADER_BYTES = 6, 64 << 20
_PREAMBLE = 128
_HEAD_BYTES = _PREAMBLE + 4

# Only these decoders ever see a byte of a user's file; pillow has some forty more.
_FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF")
_MAGIC = {b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"GIF8": "GIF", b"BM": "BMP"}
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # EXIF tag, and its values in which width and height change places
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
_WHITE_IS_ZERO, _UNSIGNED = 0, 1
# How a film becomes square
FitMode = Literal["squash", "letterbox", "crop"]
FIT_MODES: tuple[FitMode, ...] = ("squash", "letterbox", "crop")
Box = tuple[float, float, float, float]
MaskType = TypeVar("MaskType", np.bool_, np.uint8)

_DEPTHS = (8, 10, 12, 14)  # bits of the films that come in 16-bit files


def read_film(
    path: Path,
    voi: Voi = "auto",
    max_pixels: int = MAX_PIXELS,
    salt: str | None = None,
    modalities: Collection[str] = MODALITIES,
) -> tuple[Film, FilmInfo]:
    """Read a film, float32 (H, W) in [0,1] with black = 0, and what is known about it.

    ``voi`` chooses the DICOM grey-scale, ``salt`` goes into the hash of the DICOM patient id
    (:func:`~afire.data.film.hash_patient`), ``modalities`` are the DICOM modalities to accept.
    """
    path = Path(path)
    return decode_film(path, read_file(path, max_pixels), voi, max_pixels, salt, modalities)


def decode_film(
    path: Path,
    data: bytes,
    voi: Voi = "auto",
    max_pixels: int = MAX_PIXELS,
    salt: str | None = None,
    modalities: Collection[str] = MODALITIES,
) -> tuple[Film, FilmInfo]:
    """:func:`read_film` of the bytes of a file; ``path`` is only for messages."""
    with quiet_readers():
        if looks_like_dicom(data):
            from afire.data.dicom import read_dicom  # pydicom takes half a second to import; few datasets need it

            film, info = read_dicom(path, data, voi=voi, max_pixels=max_pixels, salt=salt, modalities=modalities)
        else:
            film, info = read_raster(path, data, max_pixels)
    return film, replace(info, constant=_check_range(film, path))


def film_from_tags(path: Path, tags: Dataset, file_bytes: int, voi: Voi = "auto") -> tuple[Film, FilmInfo]:
    """:func:`read_film` of a DICOM file that was parsed before (:func:`~afire.data.dicom.parse_film`)."""
    from afire.data.dicom import film_of_tags

    with quiet_readers():
        film, info = film_of_tags(
            path, tags, file_bytes, voi=voi, max_pixels=MAX_PIXELS, salt=None, modalities=MODALITIES
        )
    return film, replace(info, constant=_check_range(film, path))


def _check_range(film: Film, path: Path) -> bool:
    """Hold every reader to its promise of [0,1]; return whether all pixels are equal."""
    low, high = float(film.min()), float(film.max())
    if not (low >= 0.0 and high <= 1.0):  # also when either is NaN
        raise ImageError(f"{path} has a grey-scale that leads to no finite picture; repair it or leave it out.")
    return low == high


def read_mask(path: Path, max_pixels: int = MAX_PIXELS) -> NDArray[np.bool_]:
    """Read a mask image, bool (H, W): non-zero is inside (in a JPEG, at least half of white is)."""
    inside: NDArray[np.bool_] = read_mask_raw(path, max_pixels) != 0
    return inside


def read_mask_raw(path: Path, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Read the stored numbers of a mask image, uint8 (H, W): grey values or palette indices, for bit flags."""
    path = Path(path)
    data = read_file(path, max_pixels)
    if looks_like_dicom(data):
        raise ImageError(f"{path} is a DICOM file, and masks are read from PNG, TIFF, BMP, GIF or JPEG.")
    with quiet_readers():
        return read_raster_mask(path, data, max_pixels)


def read_file(path: Path, max_pixels: int = MAX_PIXELS) -> bytes:
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
    return looks_like_dicom(head) or looks_like_raster(head)


def is_dicom(path: Path) -> bool:
    """Whether the content of a file is DICOM, with or without the usual preamble; False where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return looks_like_dicom(stream.read(_HEAD_BYTES))
    except OSError:
        return False


def looks_like_dicom(head: bytes) -> bool:
    """Whether a file that starts with ``head`` (132 bytes or more) is DICOM, with or without the usual preamble."""
    if head[_PREAMBLE:_HEAD_BYTES] == b"DICM":
        return True
    # Old files start with the first element: group 2 or 8, a small element number, then a VR or a small length.
    if len(head) < 8 or head[:2] not in (b"\x02\x00", b"\x08\x00") or head[3] != 0:
        return False
    return (head[4:6].isalpha() and head[4:6].isupper()) or head[6:8] == b"\0\0"


def looks_like_raster(head: bytes) -> bool:
    """Whether a file that starts with ``head`` is an image of ours."""
    return head.startswith(tuple(_MAGIC))


def film_shape(path: Path) -> tuple[int, int] | None:
    """Height and width of an upright film from its header; None where there is no file or no header that says it."""
    try:
        with quiet_readers(), Image.open(path, formats=_FORMATS) as image:
            turned = image.getexif().get(_ORIENTATION) in _TURNED
            return (image.width, image.height) if turned else (image.height, image.width)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
        return _dicom_shape(path) if is_dicom(path) else None


def _dicom_shape(path: Path) -> tuple[int, int] | None:
    from afire.data.dicom import read_shape

    try:
        with quiet_readers():
            return read_shape(path)
    except ImageError:
        return None


def read_raster(path: Path, data: bytes, max_pixels: int) -> tuple[Film, FilmInfo]:
    """Read the bytes of an image file; ``path`` is only for messages."""
    with _opened(path, data, max_pixels) as image:
        kind, tags = _kind(image), _tiff_tags(image)
        _load_upright(image)
        (width, height), pixels, mode = image.size, _pixels(image), image.mode
    film, bits, unused, colour = _to_film(pixels, mode, tags, path)
    white_is_zero = tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
    if white_is_zero and mode in ("I;16", "I;16B", "I", "F"):  # pillow inverts up to 8 bits, and leaves the others
        film = 1.0 - film
    info = FilmInfo(
        width=width,
        height=height,
        bits=bits,
        kind=kind,
        file_bytes=len(data),
        inverted=white_is_zero,
        colour=colour,
        unused_bits=unused,
    )
    return film, info


def read_raster_mask(path: Path, data: bytes, max_pixels: int) -> NDArray[np.uint8]:
    """The stored numbers (H, W) of a mask image: grey values, or palette indices."""
    with _opened(path, data, max_pixels) as image:
        kind = _kind(image)
        _load_upright(image)
        pixels = np.array(image) if image.mode in ("1", "P") else _pixels(image)
    if pixels.ndim == 3:
        channels = pixels[..., :3]
        if not (channels == channels[..., :1]).all():
            raise ImageError(f"{path} is coloured, so its mask values are not clear; save it as grey values.")
        pixels = channels[..., 0]
    if pixels.dtype != np.bool_ and ((pixels < 0) | (pixels > 255) | (pixels != np.rint(pixels))).any():
        raise ImageError(f"{path} holds mask values outside 0..255; save it with 8 bits.")
    values = pixels.astype(np.uint8)
    # JPEG smears the edge of a mask into faint values on both sides; half of the range is where the edge was.
    return np.where(values >= 128, np.uint8(255), np.uint8(0)) if kind == "jpeg" else values


@contextmanager
def _opened(path: Path, data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """The image in ``data``, its size checked. The body may only call pillow: what it raises is the file's fault."""
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            check_size(path, width, height, max_pixels)
            frames = int(getattr(image, "n_frames", 1))
            if frames != 1:
                raise ImageError(f"{path} holds {frames} images; a film is one: save the one that is meant by itself.")
            yield image
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(_unknown(path, data)) from None
    except Image.DecompressionBombError:
        limit = f"{2 * (Image.MAX_IMAGE_PIXELS or 0):,}"
        raise ImageError(f"{path} says it has more than {limit} pixels, which pillow refuses to decode.") from None
    except Exception:  # pillow raises a dozen types for damaged files, and their texts may quote the file
        raise ImageError(f"{path} is truncated or damaged; copy it again or leave it out.") from None


def _unknown(path: Path, data: bytes) -> str:
    for magic, name in _MAGIC.items():
        if data.startswith(magic):
            return f"{path} starts like a {name} file but is damaged, or of a kind of {name} that pillow cannot read."
    return f"{path} is not an image that can be read; films are PNG, JPEG, TIFF, BMP, GIF or DICOM."


def _kind(image: Image.Image) -> str:
    name = (image.format or "").lower()
    return "jpeg" if name == "mpo" else name  # a JPEG with an appendix


def _tiff_tags(image: Image.Image) -> dict[int, Any]:
    """The three TIFF tags that change the meaning of a number; empty for other formats."""
    tags = getattr(image, "tag_v2", None)
    if tags is None:
        return {}
    values = {}
    for tag in (_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT):
        value = tags.get(tag)
        values[tag] = value[0] if isinstance(value, tuple) and value else value
    return values


def _load_upright(image: Image.Image) -> None:
    """Decode, and turn the film as its EXIF orientation says, in place."""
    image.load()
    ImageOps.exif_transpose(image, in_place=True)


def _pixels(image: Image.Image) -> NDArray[Any]:
    """Numbers (H, W), or (H, W, 3) where there is colour to look at. Alpha is dropped: it hides nothing in a film."""
    if image.mode in ("1", "LA", "La"):
        image = image.convert("L")
    elif image.mode not in ("L", "I;16", "I;16B", "I;16L", "I;16N", "I", "F", "RGB"):
        image = image.convert("RGB")  # palettes, RGBA, CMYK, YCbCr, ...
    return np.asarray(image)


def _to_film(pixels: NDArray[Any], mode: str, tags: dict[int, Any], path: Path) -> tuple[Film, int, int, bool]:
    """Film in [0,1], bits of a grey value, bits that the file has beside them, and whether it is truly coloured."""
    if pixels.ndim == 3:
        grey, colour = grey_from_rgb(pixels)
        return _divide(grey, 255), 8, 0, colour
    if pixels.dtype == np.uint8:
        return _divide(pixels, 255), 1 if mode == "1" else 8, 0, False
    bits = int(tags.get(_BITS_PER_SAMPLE) or 16)
    if pixels.dtype.kind == "u" or (not tags and pixels.dtype.kind == "i"):  # the latter: 16-bit PNG in older pillow
        used = _used_bits(pixels, bits)
        return np.clip(_divide(pixels, 2**used - 1), 0.0, 1.0), used, bits - used, False
    if tags.get(_SAMPLE_FORMAT) in (None, _UNSIGNED) and pixels.dtype == np.int32 and bits == 32:
        pixels = pixels.view(np.uint32)  # pillow has no unsigned 32-bit mode
    return _own_range(pixels, path), bits, 0, False


def _used_bits(pixels: NDArray[Any], bits: int) -> int:
    """The smallest depth in use that holds every value.

    Detectors have 10, 12 or 14 bits and files 16. Divided by 65535, a 12-bit film is nearly black, and has 17 grey
    levels left in 8 bits. A film that truly has 16 bits and stays below a quarter of them is rarer than such files.
    """
    brightest = int(pixels.max())
    return next((depth for depth in _DEPTHS if 0 < brightest < 2**depth and depth < bits), bits)


def _own_range(pixels: NDArray[Any], path: Path) -> Film:
    """Float and signed or 32-bit integer TIFF: no format says what is white, so the film's own range decides.

    Floats that already lie in [0,1] stay as they are.
    """
    require_finite(pixels, path)
    low, high = float(pixels.min()), float(pixels.max())
    if pixels.dtype.kind == "f" and low >= 0.0 and high <= 1.0:
        return pixels.astype(np.float32)
    return stretch(pixels, low, high)


def _divide(pixels: NDArray[Any], white: int) -> Film:
    film: Film = np.divide(pixels, np.float32(white), dtype=np.float32)
    return film


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

"""DICOM films, read with pydicom; the grey-scale is in :mod:`afire.data.dicom_grey`.

Only the tags in ``_TAGS`` are ever kept of a film. A name, a birth date or an address is not among them, so it cannot
reach a manifest, a pack, a log or a picture; the patient id leaves this module only as a hash. For the same reason no
text of a pydicom exception is passed on: those quote values. Who makes a DICOM file for the same study asks for more
tags (:func:`read_tags`).
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.pixels import apply_color_lut, get_decoder, pixel_array
from pydicom.uid import UID, ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian, JPEGExtended12Bit

from afire.data.dicom_grey import GreyScale, Lut, Voi, Window, to_film
from afire.data.film import Film, FilmInfo, check_size, grey_from_rgb, hash_patient, require_finite, view_of
from afire.errors import ImageError, UserError

_VIEW_TAGS = ["ViewPosition", "ViewCodeSequence", "PatientPosition"]
_TAGS = [
    "Modality", "PatientID", *_VIEW_TAGS,
    "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns",
    "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation",
    "PixelPaddingValue", "PixelPaddingRangeLimit",
    "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence",
    "WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence",
    "RedPaletteColorLookupTableDescriptor", "RedPaletteColorLookupTableData",
    "GreenPaletteColorLookupTableDescriptor", "GreenPaletteColorLookupTableData",
    "BluePaletteColorLookupTableDescriptor", "BluePaletteColorLookupTableData",
    "ExtendedOffsetTable", "ExtendedOffsetTableLengths",
    "PixelData", "FloatPixelData", "DoubleFloatPixelData",
]  # fmt: skip
_PIXEL_KEYWORDS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
_PREAMBLE = 128
_META_BYTES = 1 << 16  # more than any file meta group has
_MOST_BYTES = 1 << 30  # of a file that only its tags are wanted of, when inflated
_DEFLATED = b"1.2.840.10008.1.2.1.99"
# The most that a film can need when inflated: three 16-bit channels, and room for a long header.
_BYTES_PER_PIXEL, _HEADER_BYTES = 6, 64 << 20
_LONG_LENGTH = (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"UC", b"UN", b"UR", b"UT")


@dataclass(frozen=True)
class _Header:
    """What was needed from the tags, as plain numbers and codes."""

    modality: str
    patient_id: str
    view: str
    frames: int
    width: int
    height: int
    photometric: str
    pixels: str
    """Keyword of the pixel element, or empty."""
    scale: GreyScale


def read_dicom(
    path: Path, data: bytes, *, voi: Voi, max_pixels: int, salt: str | None, modalities: Collection[str]
) -> tuple[Film, FilmInfo]:
    """Read the bytes of a DICOM file; ``path`` is only for messages."""
    with _file_at_fault(path):
        dataset = _parse(path, data, _BYTES_PER_PIXEL * max_pixels + _HEADER_BYTES)
    return film_of_tags(path, dataset, len(data), voi=voi, max_pixels=max_pixels, salt=salt, modalities=modalities)


def parse_film(data: bytes, more: list[str]) -> pydicom.Dataset:
    """The tags that :func:`film_of_tags` needs of a DICOM file, and ``more``, which may identify the patient: for who
    makes a DICOM file for the same study. Raises whatever pydicom does."""
    return pydicom.dcmread(io.BytesIO(data), specific_tags=[*_TAGS, *more])


def film_of_tags(
    path: Path,
    dataset: pydicom.Dataset,
    file_bytes: int,
    *,
    voi: Voi,
    max_pixels: int,
    salt: str | None,
    modalities: Collection[str],
) -> tuple[Film, FilmInfo]:
    """The film in the tags of a DICOM file of ``file_bytes`` bytes; ``path`` is only for messages."""
    if voi not in get_args(Voi):
        raise UserError(f"image.voi {voi!r} is not one of {', '.join(get_args(Voi))}.")
    with _file_at_fault(path):
        header = _header(dataset)
        syntax = UID(dataset.file_meta.TransferSyntaxUID)
    _check(path, header, max_pixels, modalities)
    _check_decoder(path, syntax, header.scale.bits_stored)
    with _file_at_fault(path, syntax):
        pixels = pixel_array(dataset)
        if header.photometric == "PALETTE COLOR":
            pixels = apply_color_lut(pixels, dataset)
    film, colour = _to_grey(path, pixels, header, voi)
    info = FilmInfo(
        width=header.width,
        height=header.height,
        bits=header.scale.bits_stored,
        kind="dicom",
        view=header.view,
        patient=hash_patient(header.patient_id, salt),
        file_bytes=file_bytes,
        inverted=header.scale.monochrome1,
        colour=colour,
    )
    return film, info


@contextmanager
def _file_at_fault(path: Path, syntax: UID | None = None) -> Iterator[None]:
    """The body may only call pydicom and look at its values: whatever it raises, the file is to blame.

    With the ``syntax`` of compressed pixels, a decoder that knows too little may be to blame too.
    """
    try:
        yield
    except ImageError:
        raise
    except Exception:
        if syntax is not None and syntax.is_compressed:
            raise ImageError(
                f"{path} holds {syntax.name} pixels that cannot be decoded: it is damaged, "
                'or needs a decoder that pip install "afire[dicom]" brings.'
            ) from None
        raise ImageError(f"{path} is a truncated or damaged DICOM file; export it again or leave it out.") from None


def read_tags(path: Path, tags: list[str]) -> pydicom.Dataset:
    """The named tags of a DICOM file, of those before its pixels, for one that is derived from it. They identify the
    patient: nothing else may get them."""
    with _file_at_fault(path):
        return _parse_header(path, tags)


def read_header(path: Path) -> tuple[str, str]:
    """Patient (as a hash) and view of a DICOM file, without its pixels: what :func:`read_dicom` says about them."""
    with _file_at_fault(path):
        dataset = _parse_header(path, ["PatientID", *_VIEW_TAGS])
        return hash_patient(str(dataset.get("PatientID") or "")), _view(dataset)


def read_shape(path: Path) -> tuple[int, int]:
    """Height and width of a DICOM film, without its pixels."""
    with _file_at_fault(path):
        dataset = _parse_header(path, ["Rows", "Columns"])
        return int(dataset.Rows), int(dataset.Columns)


def _parse_header(path: Path, tags: list[str]) -> pydicom.Dataset:
    """The given tags of a file, which come before its pixels, so that those are not read."""
    with path.open("rb") as stream:
        start = stream.read(_META_BYTES)
        if _DEFLATED in start[: _dataset_start(start)]:  # read whole: it cannot be inflated in part
            return _parse(path, start + stream.read(), _MOST_BYTES, tags)
        stream.seek(0)
        return pydicom.dcmread(stream, force=True, stop_before_pixels=True, specific_tags=tags)


def _parse(path: Path, data: bytes, max_bytes: int, tags: list[str] = _TAGS) -> pydicom.Dataset:
    """The given tags, with a transfer syntax even where the file forgot it."""
    start = _dataset_start(data)
    if _DEFLATED in data[:start]:
        data, start = _inflate(path, data[start:], max_bytes), 0
    dataset = pydicom.dcmread(io.BytesIO(data), force=True, specific_tags=tags)
    if not hasattr(dataset, "file_meta"):
        dataset.file_meta = pydicom.dataset.FileMetaDataset()
    if not dataset.file_meta.get("TransferSyntaxUID"):
        implicit, little = dataset.original_encoding
        native = ImplicitVRLittleEndian if implicit else ExplicitVRLittleEndian if little else ExplicitVRBigEndian
        dataset.file_meta.TransferSyntaxUID = native
    return dataset


def _dataset_start(data: bytes) -> int:
    """Where the file meta group (0002,xxxx) ends."""
    at = _PREAMBLE + 4 if data[_PREAMBLE : _PREAMBLE + 4] == b"DICM" else 0
    while data[at : at + 2] == b"\x02\x00":
        is_long = data[at + 4 : at + 6] in _LONG_LENGTH
        length = data[at + 8 : at + 12] if is_long else data[at + 6 : at + 8]
        at += (12 if is_long else 8) + int.from_bytes(length, "little")
    return at


def _inflate(path: Path, deflated: bytes, max_bytes: int) -> bytes:
    """Inflate a deflated data set here, because pydicom would inflate a bomb to any size."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    inflated = inflater.decompress(deflated, max_bytes + 1)
    if len(inflated) > max_bytes:
        raise ImageError(f"{path} inflates to more than {max_bytes:,} bytes, too much for a film.")
    if not inflater.eof:
        raise ImageError(f"{path} is a truncated DICOM file; export it again or leave it out.")
    return inflated


def _header(dataset: pydicom.Dataset) -> _Header:
    photometric = str(dataset.get("PhotometricInterpretation") or "").strip().upper()
    return _Header(
        modality=_code(dataset.get("Modality")),
        patient_id=str(dataset.get("PatientID") or ""),
        view=_view(dataset),
        frames=int(_number(dataset.get("NumberOfFrames")) or 1),
        width=int(_number(dataset.get("Columns")) or 0),
        height=int(_number(dataset.get("Rows")) or 0),
        photometric=photometric,
        pixels=next((name for name in _PIXEL_KEYWORDS if name in dataset), ""),
        scale=_grey_scale(dataset, photometric),
    )


def _grey_scale(dataset: pydicom.Dataset, photometric: str) -> GreyScale:
    bits = int(_number(dataset.get("BitsStored")) or _number(dataset.get("BitsAllocated")) or 0)
    signed = _number(dataset.get("PixelRepresentation")) == 1
    slope, intercept = (_required_number(dataset.get(name)) for name in ("RescaleSlope", "RescaleIntercept"))
    centre, width = _number(dataset.get("WindowCenter")), _number(dataset.get("WindowWidth"))
    function = _code(dataset.get("VOILUTFunction")) or "LINEAR"
    return GreyScale(
        bits_stored=bits,
        signed=signed,
        slope=slope if slope else 1.0,  # a slope of 0 would say that the film is blank
        intercept=intercept if intercept is not None else 0.0,
        modality_lut=_lut(dataset, "ModalityLUTSequence"),
        voi_lut=_lut(dataset, "VOILUTSequence"),
        window=Window(centre, width, function) if centre is not None and width is not None else None,
        padding=_padding(dataset, bits, signed),
        monochrome1=photometric == "MONOCHROME1",
    )


def _number(value: Any) -> float | None:
    """The first value, if it is a finite number; several windows are alternatives, and the first is the default."""
    if isinstance(value, (list, tuple)) or type(value).__name__ == "MultiValue":
        value = value[0] if len(value) else None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None


def _required_number(value: Any) -> float | None:
    """Like ``_number``, but what is there and cannot be read is an error, because no guess would be right."""
    number = _number(value)
    if number is None and value is not None and str(value).strip():
        raise ValueError("not a number")
    return number


def _code(value: Any) -> str:
    """A code string, cleaned so that it can be quoted in a message; anything else that is not empty is UNKNOWN."""
    text = str(value if value is not None else "").strip(" \0").upper()
    return text if re.fullmatch(r"[A-Z0-9_]{0,16}", text) else "UNKNOWN"


def _lut(dataset: pydicom.Dataset, keyword: str) -> Lut | None:
    """The first table of a sequence; ``None`` when there is none or it is empty."""
    sequence = dataset.get(keyword)
    if not sequence or "LUTDescriptor" not in sequence[0] or "LUTData" not in sequence[0]:
        return None
    count, first, bits = (int(value) for value in sequence[0].LUTDescriptor)
    count = count % 2**16 or 2**16  # 0 means 65,536, and signed writers make large counts negative
    raw = sequence[0].LUTData
    if isinstance(raw, bytes):
        packed = bits <= 8 and len(raw) < 2 * count  # 8-bit entries, two in a word
        kind = "u1" if packed else "<u2" if dataset.original_encoding[1] is not False else ">u2"
        entries = np.frombuffer(raw[: len(raw) // np.dtype(kind).itemsize * np.dtype(kind).itemsize], kind)
    else:
        entries = np.atleast_1d(np.asarray(raw))
    entries = entries[:count].astype(np.uint16)
    if len(entries) < count:
        raise ValueError(f"a table of {count} entries holds {len(entries)}")
    return Lut(first, entries, bits)


def _padding(dataset: pydicom.Dataset, bits: int, signed: bool) -> tuple[int, int] | None:
    value = _number(dataset.get("PixelPaddingValue"))
    if value is None:
        return None
    limit = _number(dataset.get("PixelPaddingRangeLimit"))
    ends = [int(value), int(value if limit is None else limit)]
    if signed:  # some writers store a negative padding value as an unsigned one
        ends = [end - 2**16 if end >= 2 ** (bits - 1) else end for end in ends]
    return min(ends), max(ends)


def _view(dataset: pydicom.Dataset) -> str:
    """PA, AP, LATERAL or empty: from the view position, the meaning of the view code, or the patient position.

    The last is meant for head or feet first, but some converters (of NIH films, for one) write PA or AP into it.
    """
    texts = [str(dataset.get("ViewPosition") or "")]
    texts += [str(item.get("CodeMeaning") or "") for item in dataset.get("ViewCodeSequence") or []]
    texts.append(str(dataset.get("PatientPosition") or ""))
    return next((view for view in map(view_of, texts) if view), "")


def _check(path: Path, header: _Header, max_pixels: int, modalities: Collection[str]) -> None:
    """Refuse what is not one radiograph, before any pixel is decoded."""
    if header.modality not in modalities:
        raise ImageError(
            f"{path}: modality {header.modality or '(none)'} is not a radiograph "
            f"(accepted: {', '.join(name or '(none)' for name in modalities)})."
        )
    if header.frames > 1:
        raise ImageError(f"{path} holds {header.frames} frames; a film is one: export the frame that is meant.")
    if not header.pixels and not (header.width and header.height):
        raise ImageError(f"{path} is a DICOM file without an image (a report, a structure set or the like).")
    check_size(path, header.width, header.height, max_pixels)
    if not header.pixels:
        raise ImageError(f"{path} describes a film but its pixels are missing; export it again or leave it out.")


def _check_decoder(path: Path, syntax: UID, bits: int) -> None:
    """Refuse a compression that nothing installed can undo, and say what can."""
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise ImageError(f"{path} uses a DICOM transfer syntax that pydicom cannot decode.") from None
    plugins = {plugin for plugin in decoder.available_plugins if plugin != "pillow"}
    pillow_can_not = syntax == JPEGExtended12Bit and bits > 8
    if not decoder.is_available or (pillow_can_not and not plugins):
        raise ImageError(
            f"{path} is compressed with {syntax.name}, for which no decoder is installed; "
            'run pip install "afire[dicom]".'
        )


def _to_grey(path: Path, pixels: NDArray[Any], header: _Header, voi: Voi) -> tuple[Film, bool]:
    """The film, and whether it is truly coloured. VOI is for grey films only, as in the standard."""
    if pixels.ndim == 3 and pixels.shape[-1] == 3:
        depth = 16 if header.photometric == "PALETTE COLOR" and pixels.dtype == np.uint16 else header.scale.bits_stored
        grey, colour = grey_from_rgb((pixels >> max(depth - 8, 0)).astype(np.uint8))
        return np.divide(grey, np.float32(255), dtype=np.float32), colour
    if pixels.ndim != 2 or header.photometric not in ("MONOCHROME1", "MONOCHROME2"):
        raise ImageError(f"{path} is not a grey film: its photometric interpretation is neither grey nor colour.")
    require_finite(pixels, path)
    return to_film(pixels, header.scale, voi), False

"""Good films in every format that is read, to be mixed with bad ones and to be mutated."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    DigitalXRayImageStorageForPresentation,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    RLELossless,
    generate_uid,
)

from afire.data.phantom.film import draw_film

SECRET = "SECRET^PATIENT"
"""Stands in the identifying tags of every DICOM film; nothing that a command says or writes may repeat it."""
SIDE = 160
Grey = NDArray[np.float32]


@cache
def phantom(number: int, side: int = SIDE) -> Grey:
    """A phantom film (S, S) in [0,1]."""
    return draw_film(7, number, side).image


def bytes_of(film: Grey) -> NDArray[np.uint8]:
    return np.rint(film * 255).astype(np.uint8)


def words_of(film: Grey, bits: int = 16) -> NDArray[np.uint16]:
    words: NDArray[np.uint16] = np.rint(film * (2**bits - 1)).astype(np.uint16)
    return words


def raster(film: Grey, kind: str, deep: bool = False, **options: Any) -> bytes:
    """A film as a file of pillow's; ``deep`` is 16 bits."""
    stream = io.BytesIO()
    Image.fromarray(words_of(film) if deep else bytes_of(film)).save(stream, kind, **options)
    return stream.getvalue()


def dataset(film: Grey, *, bits: int = 12, monochrome: int = 2) -> Dataset:
    """A DICOM film with native pixels of 8 bits, or of up to 16."""
    shown = film if monochrome == 2 else 1 - film
    pixels: NDArray[Any] = bytes_of(shown) if bits == 8 else words_of(shown, bits)
    found = Dataset()
    found.PatientName = found.PatientID = found.AccessionNumber = found.StudyDescription = SECRET
    found.SOPClassUID = DigitalXRayImageStorageForPresentation
    found.StudyInstanceUID, found.SeriesInstanceUID = generate_uid(entropy_srcs=["1"]), generate_uid(entropy_srcs=["2"])
    found.SOPInstanceUID = generate_uid(entropy_srcs=[pixels.tobytes().hex()])
    found.Modality, found.ViewPosition, found.StudyDate = "DX", "PA", "20240131"
    found.Rows, found.Columns = pixels.shape
    found.SamplesPerPixel, found.PhotometricInterpretation = 1, f"MONOCHROME{monochrome}"
    found.BitsAllocated, found.BitsStored, found.HighBit = (8, 8, 7) if bits == 8 else (16, bits, bits - 1)
    found.PixelRepresentation = 0
    found.WindowCenter, found.WindowWidth = 2 ** (bits - 1), 2**bits
    found.PixelData = pixels.tobytes()
    found.file_meta = FileMetaDataset()
    found.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    return found


def dicom_bytes(found: Dataset) -> bytes:
    """The file of a dataset, also of one that breaks the standard."""
    stream = io.BytesIO()
    pydicom.dcmwrite(stream, found, enforce_file_format=True)
    return stream.getvalue()


def with_syntax(film: Grey, uid: pydicom.uid.UID) -> bytes:
    """A DICOM film in one of the transfer syntaxes that are read without further packages."""
    found = dataset(film, bits=8 if uid in (JPEGBaseline8Bit, JPEG2000Lossless) else 12)
    if uid == RLELossless:
        found.compress(RLELossless)
    elif uid == JPEGBaseline8Bit:
        found.PixelData = encapsulate([raster(film, "JPEG", quality=95)])
    elif uid == JPEG2000Lossless:
        found.PixelData = encapsulate([raster(film, "JPEG2000", no_jp2=True, irreversible=False)])
    found.file_meta.TransferSyntaxUID = uid
    if uid.is_encapsulated:
        found["PixelData"].VR = "OB"
        found["PixelData"].is_undefined_length = True
    return dicom_bytes(found)


FORMATS: dict[str, tuple[str, Callable[[Grey], bytes]]] = {
    "PNG 8 bits": (".png", lambda film: raster(film, "PNG")),
    "PNG 16 bits": (".png", lambda film: raster(film, "PNG", deep=True)),
    "JPEG": (".jpg", lambda film: raster(film, "JPEG", quality=92)),
    "TIFF": (".tif", lambda film: raster(film, "TIFF")),
    "TIFF deflated": (".tif", lambda film: raster(film, "TIFF", deep=True, compression="tiff_adobe_deflate")),
    "BMP": (".bmp", lambda film: raster(film, "BMP")),
    "DICOM 8 bits": (".dcm", lambda film: dicom_bytes(dataset(film, bits=8))),
    "DICOM MONOCHROME1": (".dcm", lambda film: dicom_bytes(dataset(film, monochrome=1))),
    "DICOM 16 bits": (".dcm", lambda film: dicom_bytes(dataset(film, bits=16))),
    "DICOM implicit": (".dcm", lambda film: with_syntax(film, ImplicitVRLittleEndian)),
    "DICOM deflated": (".dcm", lambda film: with_syntax(film, DeflatedExplicitVRLittleEndian)),
    "DICOM RLE": (".dcm", lambda film: with_syntax(film, RLELossless)),
    "DICOM JPEG": (".dcm", lambda film: with_syntax(film, JPEGBaseline8Bit)),
    "DICOM JPEG 2000": (".dcm", lambda film: with_syntax(film, JPEG2000Lossless)),
}
"""Ending and writer of each format."""

"""DICOM films for tests: made, written, read, refused."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    UID,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    RLELossless,
)

from afire.data.decode import read_film
from afire.data.film import FilmInfo
from afire.errors import ImageError

RNG = np.random.default_rng(9)
GREY8 = RNG.integers(0, 256, (16, 24), dtype=np.uint8)
GREY12 = RNG.integers(0, 4096, (16, 24), dtype=np.uint16)
GREY8[0, :2], GREY12[0, :2] = (0, 255), (0, 4095)
PERSON = {
    "PatientName": "Doe^Joan",
    "PatientID": "MRN-4711-X",
    "PatientBirthDate": "19530217",
    "OtherPatientIDs": "SSN-99887",
    "PatientAddress": "Elm Street 12",
    "ReferringPhysicianName": "Grey^Meredith",
    "InstitutionName": "County General",
    "AccessionNumber": "ACC31337",
    "StudyDescription": "chest of Joan Doe",
}


def make(pixels: np.ndarray, stored: int | None = None, **tags: Any) -> Dataset:
    """A CR film around ``pixels``; tags by keyword, ``None`` removes one."""
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = UID("1.2.840.10008.5.1.4.1.1.1")
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = UID("1.2.3.4")
    dataset.Modality = "CR"
    dataset.PatientID = "P1"
    dataset.Rows, dataset.Columns = pixels.shape[:2]
    dataset.SamplesPerPixel = 1 if pixels.ndim == 2 else 3
    dataset.PhotometricInterpretation = "MONOCHROME2" if pixels.ndim == 2 else "RGB"
    if pixels.ndim == 3:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = pixels.dtype.itemsize * 8
    if pixels.dtype.kind == "f":
        dataset.FloatPixelData = pixels.tobytes()
    else:
        dataset.BitsStored = stored or dataset.BitsAllocated
        dataset.HighBit = dataset.BitsStored - 1
        dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
        dataset.PixelData = pixels.tobytes()
        dataset["PixelData"].VR = "OB" if dataset.BitsAllocated == 8 else "OW"
    for keyword, value in tags.items():
        if value is None:
            delattr(dataset, keyword)
        else:
            setattr(dataset, keyword, value)
    return dataset


def lut(first: int, entries: np.ndarray, bits: int, count: int | None = None) -> list[Dataset]:
    item = Dataset()
    item.add_new("LUTDescriptor", "US" if first >= 0 else "SS", [len(entries) if count is None else count, first, bits])
    item.add_new("LUTData", "OW", entries.tobytes())
    return [item]


def to_bytes(dataset: Dataset) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def write(folder: Path, what: Dataset | bytes, name: str = "film.dcm") -> Path:
    path = folder / name
    path.write_bytes(what if isinstance(what, bytes) else to_bytes(what))
    return path


def read(folder: Path, what: Dataset | bytes, **options: Any) -> tuple[np.ndarray, FilmInfo]:
    film, info = read_film(write(folder, what), **options)
    assert film.dtype == np.float32 and film.ndim == 2 and film.min() >= 0.0 and film.max() <= 1.0
    return film, info


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ImageError) as caught:
        read_film(path, **options)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and message.endswith(".")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


def in_syntax(pixels: np.ndarray, stored: int, syntax: UID) -> Dataset:
    dataset = make(pixels, stored, WindowCenter=2000, WindowWidth=3000)
    if syntax == RLELossless:
        dataset.compress(RLELossless)
    elif syntax in (JPEG2000Lossless, JPEGBaseline8Bit):
        stream = io.BytesIO()
        image = Image.fromarray(pixels)
        image.save(stream, "JPEG" if syntax == JPEGBaseline8Bit else "JPEG2000", no_jp2=True, irreversible=False)
        dataset.PixelData = encapsulate([stream.getvalue()])
        dataset["PixelData"].VR = "OB"
        dataset["PixelData"].is_undefined_length = True
    elif syntax == ExplicitVRBigEndian:
        dataset.PixelData = pixels.astype(">u2").tobytes()
    dataset.file_meta.TransferSyntaxUID = syntax
    return dataset

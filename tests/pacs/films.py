"""DICOM films of a known person for tests: conformant, drawn like the films that the tests' detector was fitted on."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pydicom
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ComputedRadiographyImageStorage, ExplicitVRLittleEndian

ROOT = "1.2.826.0.1.3680043.8.498.77"
STUDY, SERIES = f"{ROOT}.1", f"{ROOT}.2"
NAME, PATIENT, ACCESSION, BIRTH, REFERRER = "Müller^Anna", "ID-7741", "ACC-5512", "19530217", "Grey^Meredith"
IDENTIFYING = (NAME.split("^")[0], PATIENT, ACCESSION, BIRTH, REFERRER.split("^")[0], STUDY, SERIES)
SIDE = 48


def instance(number: int) -> str:
    return f"{ROOT}.3.{number + 1}"


def pixels(number: int, side: int = SIDE) -> np.ndarray:
    """Smooth and bright in the middle, 12 bit, every one its own."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.random((5, 5), np.float32)).resize((side, side), Image.Resampling.BICUBIC)
    return (np.clip(np.asarray(coarse), 0, 1) * 4095).astype(np.uint16)


def dataset(number: int = 0, **tags: object) -> Dataset:
    """The film ``number``; tags by keyword, ``None`` removes one."""
    made = Dataset()
    made.SpecificCharacterSet = "ISO_IR 192"
    made.PatientName, made.PatientID, made.PatientBirthDate, made.PatientSex = NAME, PATIENT, BIRTH, "F"
    made.AccessionNumber, made.StudyID, made.ReferringPhysicianName = ACCESSION, "1", REFERRER
    made.StudyInstanceUID, made.SeriesInstanceUID, made.SOPInstanceUID = STUDY, SERIES, instance(number)
    made.SOPClassUID = ComputedRadiographyImageStorage
    made.Modality, made.StudyDate, made.StudyTime = "CR", "20240131", "101500"
    made.SeriesNumber, made.InstanceNumber, made.Manufacturer = 1, number + 1, "X-ray works"
    made.BodyPartExamined, made.ViewPosition = "CHEST", "PA"
    image = pixels(number)
    made.Rows, made.Columns = image.shape
    made.SamplesPerPixel, made.PhotometricInterpretation = 1, "MONOCHROME2"
    made.BitsAllocated, made.BitsStored, made.HighBit, made.PixelRepresentation = 16, 12, 11, 0
    made.PixelData = image.tobytes()
    for name, value in tags.items():
        if value is None:
            delattr(made, name)
        else:
            setattr(made, name, value)
    made["PixelData"].VR = "OW"
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    return made


def film(path: Path, number: int = 0, **tags: object) -> Path:
    """The film ``number`` as a file."""
    path.write_bytes(encoded(dataset(number, **tags)))
    return path


def encoded(made: Dataset) -> bytes:
    stream = io.BytesIO()
    pydicom.dcmwrite(stream, made, enforce_file_format=True)
    return stream.getvalue()

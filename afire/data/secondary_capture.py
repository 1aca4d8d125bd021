"""A picture drawn from a DICOM film, as a DICOM Secondary Capture in the study of the film, for a viewer.

The study's and the patient's tags go from the film into this one file and nowhere else; series and instance get ids of
their own, which follow from the film and the maker, so that the same run gives the same ids.
"""

from __future__ import annotations

import io
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

from afire._version import __version__
from afire.data.dicom import read_tags
from afire.data.film import quiet_readers
from afire.errors import ImageError
from afire.files import sha256_file, write_atomic

# Required in a Secondary Capture, even if empty.
_REQUIRED = (
    "PatientName", "PatientID", "PatientBirthDate", "PatientSex",
    "StudyDate", "StudyTime", "ReferringPhysicianName", "StudyID", "AccessionNumber",
)  # fmt: skip
_OPTIONAL = (
    "SpecificCharacterSet", "StudyDescription", "PatientAge", "InstitutionName", "OtherPatientIDs", "IssuerOfPatientID",
    "PatientOrientation", "BodyPartExamined", "ViewPosition",
)  # fmt: skip
_REFERENCES = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "SOPClassUID", "FrameOfReferenceUID")
_SERIES_NUMBER = 9001  # behind the series of the machine
_MOST_TEXT = 1024  # of a DICOM short text, in which the derivation is told


def write_secondary_capture(
    film: Path, picture: NDArray[np.uint8], out: Path, *, derivation: str, maker: str, series: str
) -> None:
    """Write ``picture`` (H, W, 3) as a derived image of ``film``.

    ``derivation`` says what it shows, ``maker`` identifies what drew it (a model's hash), ``series`` is the name of the
    series. The picture must carry its own warnings: a viewer shows little else.
    """
    with quiet_readers():
        source = read_tags(film, [*_REQUIRED, *_OPTIONAL, *_REFERENCES])
        encoded = io.BytesIO()
        try:
            origin = str(source.get("SOPInstanceUID") or sha256_file(film))
            capture = _capture(source, origin, picture, derivation, maker, series)
            pydicom.dcmwrite(encoded, capture, enforce_file_format=True)
        except Exception:  # pydicom parses a tag when it is looked at; its errors quote what is in it
            raise ImageError(f"{film} has tags that cannot be copied into a derived image.") from None
    write_atomic(out, lambda path: _write(path, encoded.getvalue()))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _capture(
    source: Dataset, origin: str, picture: NDArray[np.uint8], derivation: str, maker: str, series: str
) -> Dataset:
    study = str(source.get("StudyInstanceUID") or generate_uid(entropy_srcs=["study", origin]))
    capture = Dataset()
    for name in (*_REQUIRED, *_OPTIONAL):
        if name in source:
            capture[name] = source[name]
        elif name in _REQUIRED:
            setattr(capture, name, "")
    capture.StudyInstanceUID = study
    capture.SeriesInstanceUID = generate_uid(entropy_srcs=["series", study, maker])
    capture.SOPInstanceUID = generate_uid(entropy_srcs=["instance", study, origin, maker])
    capture.SOPClassUID = SecondaryCaptureImageStorage
    capture.Modality = "OT"
    capture.ConversionType = "WSD"
    capture.ImageType = ["DERIVED", "SECONDARY"]
    capture.SeriesDescription = series[:64]
    capture.SeriesNumber = _SERIES_NUMBER
    capture.InstanceNumber = 1
    capture.DerivationDescription = derivation[:_MOST_TEXT]
    capture.BurnedInAnnotation = "YES"
    capture.Manufacturer = "afire"
    capture.ManufacturerModelName = "afire detect"
    capture.SoftwareVersions = __version__
    capture.SecondaryCaptureDeviceManufacturer = "afire"
    capture.SecondaryCaptureDeviceSoftwareVersions = __version__
    now = datetime.now()
    capture.ContentDate, capture.ContentTime = now.strftime("%Y%m%d"), now.strftime("%H%M%S")
    capture.DateOfSecondaryCapture, capture.TimeOfSecondaryCapture = capture.ContentDate, capture.ContentTime
    _refer_to(capture, source)
    _put_pixels(capture, picture)
    return capture


def _refer_to(capture: Dataset, source: Dataset) -> None:
    if not (source.get("SOPInstanceUID") and source.get("SOPClassUID")):
        return
    reference = Dataset()
    reference.ReferencedSOPClassUID = source.SOPClassUID
    reference.ReferencedSOPInstanceUID = source.SOPInstanceUID
    capture.SourceImageSequence = [reference]


def _put_pixels(capture: Any, picture: NDArray[np.uint8]) -> None:
    """``picture`` (H, W, 3), interleaved, 8 bit."""
    capture.Rows, capture.Columns = picture.shape[:2]
    capture.SamplesPerPixel, capture.PhotometricInterpretation, capture.PlanarConfiguration = 3, "RGB", 0
    capture.BitsAllocated, capture.BitsStored, capture.HighBit, capture.PixelRepresentation = 8, 8, 7, 0
    pixels = np.ascontiguousarray(picture).tobytes()
    capture.PixelData = pixels + b"\0" * (len(pixels) % 2)
    capture["PixelData"].VR = "OB"
    capture.file_meta = FileMetaDataset()
    capture.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    capture.file_meta.MediaStorageSOPClassUID = capture.SOPClassUID
    capture.file_meta.MediaStorageSOPInstanceUID = capture.SOPInstanceUID

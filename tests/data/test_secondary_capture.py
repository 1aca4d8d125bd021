"""A derived image in the study of its film: ids kept, marked as derived, readable by any reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import DigitalXRayImageStorageForPresentation, ExplicitVRLittleEndian, SecondaryCaptureImageStorage

from afire.data.decode import read_film
from afire.data.secondary_capture import write_secondary_capture
from afire.errors import ImageError

STUDY, SERIES, INSTANCE = "1.2.3.4", "1.2.3.4.5", "1.2.3.4.5.6"


def film(path: Path, **tags: object) -> Path:
    dataset = Dataset()
    dataset.PatientName, dataset.PatientID, dataset.AccessionNumber = "Müller^Anna", "ID-7", "A77"
    dataset.SpecificCharacterSet = "ISO_IR 192"
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID, dataset.SOPInstanceUID = STUDY, SERIES, INSTANCE
    dataset.SOPClassUID = DigitalXRayImageStorageForPresentation
    dataset.Modality, dataset.StudyDate = "DX", "20240131"
    dataset.Rows = dataset.Columns = 8
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated = dataset.BitsStored = 8
    dataset.HighBit, dataset.PixelRepresentation = 7, 0
    dataset.PixelData = bytes(range(64))
    for name, value in tags.items():
        if value is None:
            delattr(dataset, name)
        else:
            setattr(dataset, name, value)
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    pydicom.dcmwrite(path, dataset, enforce_file_format=True)
    return path


def picture() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)  # an odd number of bytes


def write(source: Path, out: Path, maker: str = "model") -> Dataset:
    write_secondary_capture(source, picture(), out, derivation="Heatmap. Not a device.", maker=maker, series="heat")
    return pydicom.dcmread(out)


def test_keeps_the_study_and_is_marked_as_derived(tmp_path: Path) -> None:
    made = write(film(tmp_path / "film.dcm"), tmp_path / "out" / "capture.dcm")
    assert (made.PatientName, made.PatientID, made.AccessionNumber) == ("Müller^Anna", "ID-7", "A77")
    assert made.StudyInstanceUID == STUDY and made.StudyDate == "20240131"
    assert made.SeriesInstanceUID not in (SERIES, "") and made.SOPInstanceUID not in (INSTANCE, "")
    assert made.SOPClassUID == SecondaryCaptureImageStorage == made.file_meta.MediaStorageSOPClassUID
    assert list(made.ImageType) == ["DERIVED", "SECONDARY"]
    assert (made.Modality, made.ConversionType, made.BurnedInAnnotation) == ("OT", "WSD", "YES")
    assert "Not a device" in made.DerivationDescription
    assert made.SourceImageSequence[0].ReferencedSOPInstanceUID == INSTANCE
    np.testing.assert_array_equal(made.pixel_array, picture())
    assert made.PatientBirthDate == "", "required, and not in the film"


def test_our_reader_sees_a_coloured_picture(tmp_path: Path) -> None:
    write(film(tmp_path / "film.dcm"), tmp_path / "capture.dcm")
    grey, info = read_film(tmp_path / "capture.dcm")
    assert grey.shape == (9, 7) and info.colour and info.kind == "dicom"


def test_ids_follow_from_the_film_and_the_maker(tmp_path: Path) -> None:
    source, other = film(tmp_path / "film.dcm"), film(tmp_path / "other.dcm", SOPInstanceUID="1.2.3.4.5.7")
    first = write(source, tmp_path / "a.dcm")
    again, by_other_model, second_film = (
        write(source, tmp_path / "b.dcm"),
        write(source, tmp_path / "c.dcm", "other model"),
        write(other, tmp_path / "d.dcm"),
    )
    assert first.SOPInstanceUID == again.SOPInstanceUID
    assert first.SOPInstanceUID != by_other_model.SOPInstanceUID
    assert first.SeriesInstanceUID != by_other_model.SeriesInstanceUID
    assert first.SeriesInstanceUID == second_film.SeriesInstanceUID
    assert first.SOPInstanceUID != second_film.SOPInstanceUID


def test_a_film_without_ids_gets_its_own(tmp_path: Path) -> None:
    nameless = film(tmp_path / "film.dcm", StudyInstanceUID=None, PatientName=None, AccessionNumber=None)
    made = write(nameless, tmp_path / "a.dcm")
    assert made.StudyInstanceUID and made.PatientName == "" and made.AccessionNumber == ""


def test_a_damaged_file_is_one_message(tmp_path: Path) -> None:
    broken_sequence = b"\x08\x00\x20\x00SQ\0\0\xff\xff\0\0"  # where the date of the study should be
    (tmp_path / "film.dcm").write_bytes(bytes(128) + b"DICM" + broken_sequence + b"abc")
    with pytest.raises(ImageError):
        write(tmp_path / "film.dcm", tmp_path / "a.dcm")
    assert not (tmp_path / "a.dcm").exists()

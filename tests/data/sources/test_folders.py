"""A flat folder: every film, no invented labels."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from afire.data.film import hash_patient
from afire.data.sources import build
from afire.data.sources.folders import build_folder
from afire.errors import UserError


def test_every_film_is_a_row(tmp_path: Path, touch) -> None:
    touch(tmp_path, "x/a.png", "b.dcm", "notes.txt")
    manifest = build_folder(tmp_path)
    assert manifest.table["image"].tolist() == ["b.dcm", "x/a.png"]
    assert manifest.table["patient"].tolist() == ["b.dcm", "x/a.png"]
    assert manifest.table["normal"].isna().all() and manifest.labels == []
    assert (manifest.table["split"] == "").all()
    assert build_folder(tmp_path, all_normal=True).table["normal"].tolist() == [1.0, 1.0]


def test_patients_from_a_pattern(tmp_path: Path, touch, caplog: pytest.LogCaptureFixture) -> None:
    touch(tmp_path, "p1/a.png", "p1/b.png", "p22/c.png", "odd.png")
    with caplog.at_level(logging.WARNING, "afire"):
        manifest = build_folder(tmp_path, patient_pattern=r"^(p\d+)/")
    assert manifest.table["patient"].tolist() == ["odd.png", *map(hash_patient, ("p1", "p1", "p22"))]
    assert "1 of 4 films do not fit --patient-pattern" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "not a regular expression"),
        ("p[0-9]+", "has no group"),
        ("(q)", "fits none of the 1 paths, such as p1/a.png"),
    ],
)
def test_wrong_patterns(tmp_path: Path, touch, pattern: str, message: str) -> None:
    touch(tmp_path, "p1/a.png")
    with pytest.raises(UserError, match=message):
        build_folder(tmp_path, patient_pattern=pattern)


def test_patient_and_view_from_dicom_headers(tmp_path: Path, touch) -> None:
    import pydicom
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian

    for name, patient in (("1.dcm", "MRN-0042"), ("2.dcm", "MRN-0042"), ("3.dcm", "MRN-0043")):
        meta = FileMetaDataset()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        data = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
        data.PatientName, data.PatientID, data.ViewPosition = "Doe^Jane", patient, "PA"
        pydicom.dcmwrite(tmp_path / name, data)
    touch(tmp_path, "4.png")
    (tmp_path / "5.dcm").write_bytes((tmp_path / "3.dcm").read_bytes()[:150])
    manifest = build_folder(tmp_path, headers=True)
    patients = manifest.table["patient"].tolist()
    assert patients[0] == patients[1] != patients[2] and patients[3:] == ["4.png", "5.dcm"]
    assert manifest.table["view"].tolist() == ["PA", "PA", "PA", "", ""]
    stored = manifest.table.to_csv()
    assert "MRN" not in stored and "Doe" not in stored
    with pytest.raises(UserError, match="both say who the patient is"):
        build_folder(tmp_path, headers=True, patient_pattern="(.)")


def test_an_empty_or_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are no films in"):
        build_folder(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        build_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no dataset kind 'chexprt'; did you mean chexpert\?"):
        build("chexprt", tmp_path)

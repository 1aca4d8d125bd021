"""The RSNA pneumonia challenge: three classes, boxes as fractions, patients of NIH ChestX-ray14."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import FileMetaDataset
from pydicom.uid import ComputedRadiographyImageStorage, ExplicitVRLittleEndian, generate_uid

from afire.data.manifest import Box, parse_boxes
from afire.data.sources.nih import OPACITY, build_rsna
from afire.errors import UserError

CLASSES = """patientId,class
aaa,Normal
bbb,Lung Opacity
bbb,Lung Opacity
ccc,No Lung Opacity / Not Normal
ddd,Lung Opacity
"""
LABELS = """patientId,x,y,width,height,Target
aaa,,,,,0
bbb,256.0,512.0,128.0,64.0,1
bbb,900.0,0.0,200.0,1024.0,1
ccc,,,,,0
ddd,0,0,512,512,1
"""
MAPPINGS = [
    {"subset_img_id": "aaa", "img_id": "00000013_026.png"},
    {"subset_img_id": "bbb", "img_id": "00000013_027.png"},
    {"subset_img_id": "ccc", "img_id": "00000100_000.png"},
]


@pytest.fixture
def rsna(tmp_path: Path, touch) -> Path:
    (tmp_path / "stage_2_detailed_class_info.csv").write_text(CLASSES)
    (tmp_path / "stage_2_train_labels.csv").write_text(LABELS)
    (tmp_path / "pneumonia-challenge-dataset-mappings_2018.json").write_text(json.dumps(MAPPINGS))
    touch(tmp_path, "stage_2_train_images/aaa.png", "stage_2_train_images/bbb.png", "stage_2_train_images/ccc.png")
    return tmp_path


def test_the_whole_table(rsna: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "afire"):
        manifest = build_rsna(rsna)
    table = manifest.table
    assert manifest.labels == [OPACITY] and table["image"].str.rpartition("/")[2].tolist() == [
        "aaa.png",
        "bbb.png",
        "ccc.png",
    ]
    assert table["normal"].tolist() == [1, 0, 0] and table[f"label:{OPACITY}"].tolist() == [0, 1, 0]
    assert table["patient"].tolist() == ["13", "13", "100"], "two films of one patient stay together"
    assert table["split"].tolist() == ["", "", ""] and "3 of 4 listed films are in" in caplog.text


def test_boxes_are_fractions_inside_the_film(rsna: Path) -> None:
    first, second = parse_boxes(build_rsna(rsna).table["boxes"].iloc[1])
    assert first == Box(OPACITY, 0.25, 0.5, 0.125, 0.0625)
    assert second.x + second.w == pytest.approx(1.0) and build_rsna(rsna).table["boxes"].tolist()[::2] == ["", ""]


def test_without_mappings_patients_are_unknown_and_that_is_said(rsna: Path, caplog: pytest.LogCaptureFixture) -> None:
    (rsna / "pneumonia-challenge-dataset-mappings_2018.json").unlink()
    with caplog.at_level(logging.WARNING, "afire"):
        manifest = build_rsna(rsna)
    assert not manifest.patient_known.any() and "films of one patient may come apart in a split" in caplog.text


def test_views_come_from_the_headers(rsna: Path) -> None:
    from pydicom import Dataset

    for name in ("aaa", "bbb", "ccc"):
        (rsna / "stage_2_train_images" / f"{name}.png").unlink()
        film = Dataset()
        film.file_meta = FileMetaDataset()
        film.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        film.file_meta.MediaStorageSOPClassUID = film.SOPClassUID = ComputedRadiographyImageStorage
        film.file_meta.MediaStorageSOPInstanceUID = film.SOPInstanceUID = generate_uid()
        film.PatientID, film.ViewPosition, film.Modality = name, "AP" if name == "bbb" else "PA", "CR"
        film.Rows = film.Columns = 4
        film.PixelData = np.zeros((4, 4), np.uint8).tobytes()
        film["PixelData"].VR = "OB"
        film.save_as(rsna / "stage_2_train_images" / f"{name}.dcm", enforce_file_format=True)
    table = build_rsna(rsna, headers=True).table
    assert table["view"].tolist() == ["PA", "AP", "PA"] and table["patient"].tolist() == ["13", "13", "100"]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("stage_2_detailed_class_info.csv", "aaa,Normal", "aaa,Fine", "names the class 'Fine'; expected Normal"),
        ("stage_2_detailed_class_info.csv", "ccc,No Lung", "aaa,No Lung", "puts the film aaa into two classes"),
        ("stage_2_train_labels.csv", "0,0,512,512,1", "0,x,512,512,1", "a box that is not four numbers, in row 5"),
        ("pneumonia-challenge-dataset-mappings_2018.json", "img_id", "id", "does not list subset_img_id and img_id"),
    ],
)
def test_tables_that_are_not_as_published(rsna: Path, file: str, old: str, new: str, message: str) -> None:
    (rsna / file).write_text((rsna / file).read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        build_rsna(rsna)


def test_a_folder_without_the_tables(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the table of boxes of the RSNA pneumonia challenge"):
        build_rsna(tmp_path)

"""MIMIC-CXR-JPG, in a miniature with the real names and headers: the paper's rule for normal films."""

from __future__ import annotations

import gzip
import logging
import math
from pathlib import Path

import pytest

from afire.data.sources.chexpert import MIMIC_LABELS, build_mimic
from afire.errors import UserError

CHEXPERT = (
    "subject_id,study_id,Atelectasis,Cardiomegaly,Consolidation,Edema,Enlarged Cardiomediastinum,Fracture,Lung Lesion,"
    "Lung Opacity,No Finding,Pleural Effusion,Pleural Other,Pneumonia,Pneumothorax,Support Devices\n"
)
METADATA = (
    "dicom_id,subject_id,study_id,PerformedProcedureStepDescription,ViewPosition,Rows,Columns,StudyDate,StudyTime,"
    "ProcedureCodeSequence_CodeMeaning,ViewCodeSequence_CodeMeaning,PatientOrientationCodeSequence_CodeMeaning\n"
)
FILMS = [  # dicom, subject, study, split, view
    ("d1", "10000032", "50414267", "train", "PA"),
    ("d2", "10000032", "50414267", "train", "LATERAL"),
    ("d3", "10000032", "53189527", "train", "AP"),
    ("d4", "11000011", "50000004", "validate", "AP"),
    ("d5", "19999999", "50000005", "test", "PA"),
    ("d6", "19999999", "50000006", "test", "LL"),
    ("d7", "19999998", "50000007", "train", "PA"),
]


def row(subject: str, study: str, **labels: float) -> str:
    return ",".join([subject, study, *(str(labels.get(name.replace(" ", "_"), "")) for name in MIMIC_LABELS)]) + "\n"


@pytest.fixture
def mimic(tmp_path: Path, touch) -> Path:
    studies = [
        row("10000032", "50414267", No_Finding=1.0),
        row("10000032", "53189527", No_Finding=1.0, Support_Devices=1.0),
        row("11000011", "50000004", Edema=-1.0, Pneumonia=0.0),
        row("19999999", "50000005", Edema=1.0, Atelectasis=-1.0),
        row("19999999", "50000006"),
    ]
    split = "".join(f"{dicom},{study},{subject},{part}\n" for dicom, subject, study, part, _ in FILMS)
    views = "".join(
        f"{dicom},{subject},{study},,{view},2544,3056,2180,1,,,\n" for dicom, subject, study, _, view in FILMS
    )
    write(tmp_path, "chexpert", CHEXPERT + "".join(studies))
    write(tmp_path, "split", "dicom_id,study_id,subject_id,split\n" + split)
    write(tmp_path, "metadata", METADATA + views)
    touch(tmp_path, [f"files/p{subject[:2]}/p{subject}/s{study}/{dicom}.jpg" for dicom, subject, study, _, _ in FILMS])
    return tmp_path


def write(root: Path, kind: str, text: str) -> None:
    (root / f"mimic-cxr-2.0.0-{kind}.csv.gz").write_bytes(gzip.compress(text.encode()))


def test_frontal_films_with_the_official_split(mimic: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "afire"):
        manifest = build_mimic(mimic)
    table = manifest.table
    assert manifest.labels == list(MIMIC_LABELS)
    assert table["image"].tolist()[0] == "files/p10/p10000032/s50414267/d1.jpg"
    assert [Path(image).stem for image in table["image"]] == ["d1", "d3", "d4", "d5", "d7"]
    assert table["split"].tolist() == ["train", "train", "val", "test", "train"]
    assert table["patient"].tolist() == ["10000032", "10000032", "11000011", "19999999", "19999998"]
    assert table["view"].tolist() == ["PA", "AP", "AP", "PA", "PA"]
    assert "5 of 7 films are PA or AP" in caplog.text and "5 of 5 listed films" in caplog.text


def test_normal_is_no_finding_and_no_disease(mimic: Path) -> None:
    normal = build_mimic(mimic).table["normal"].tolist()
    assert normal[0] == 1 and normal[1] == 1, "rows 1 and 2 of the paper's table: with or without Support Devices"
    assert math.isnan(normal[2]), "an uncertain disease alone"
    assert normal[3] == 0
    assert math.isnan(normal[4]), "a study without labels"


def test_labels_follow_the_study(mimic: Path) -> None:
    table = build_mimic(mimic).table
    assert table["label:Edema"].tolist()[3] == 1 and math.isnan(table["label:Atelectasis"].iloc[3])
    assert table["label:Support Devices"].tolist()[:2] == [0, 1]
    assert table["label:Pneumonia"].iloc[0] == 0, "not mentioned counts as absent by default"
    assert table[[f"label:{name}" for name in MIMIC_LABELS]].iloc[4].isna().all(), "never seen by the labeller"
    ones = build_mimic(mimic, uncertain="ones", blank="ignore").table
    assert ones["label:Atelectasis"].iloc[3] == 1 and math.isnan(ones["label:Pneumonia"].iloc[0])
    assert ones["normal"].equals(table["normal"]), "the rule for normal looks at the raw labels"


def test_all_views(mimic: Path) -> None:
    table = build_mimic(mimic, all_views=True).table
    assert table["view"].tolist() == ["PA", "LATERAL", "AP", "AP", "PA", "LATERAL", "PA"]


def test_without_metadata_it_says_so(mimic: Path, caplog: pytest.LogCaptureFixture) -> None:
    (mimic / "mimic-cxr-2.0.0-metadata.csv.gz").unlink()
    with caplog.at_level(logging.WARNING, "afire"):
        table = build_mimic(mimic).table
    assert len(table) == 7 and (table["view"] == "").all()
    assert "no mimic-cxr-2.0.0-metadata.csv.gz" in caplog.text and "lateral films are taken" in caplog.text


def test_unpacked_tables(mimic: Path) -> None:
    expected = build_mimic(mimic).hash
    for path in mimic.glob("*.csv.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert build_mimic(mimic).hash == expected


@pytest.mark.parametrize("kind", ["chexpert", "split"])
def test_missing_tables(mimic: Path, kind: str) -> None:
    (mimic / f"mimic-cxr-2.0.0-{kind}.csv.gz").unlink()
    with pytest.raises(
        UserError, match=f"the {kind} table of MIMIC-CXR-JPG is missing: looked for mimic-cxr-2.0.0-{kind}"
    ):
        build_mimic(mimic)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (
            "split",
            "dicom_id,study_id,subject_id,split\nd1,1,2,dev\n",
            "names the split 'dev'; expected train, validate, test",
        ),
        ("split", "dicom_id,study_id,split\nd1,1,train\n", "has no column 'subject_id'"),
        ("chexpert", CHEXPERT + row("1", "2", Edema=7), "column 'Edema' holds '7' in row 1"),
        ("chexpert", CHEXPERT + row("1", "2") * 2, "lists study 2 more than once"),
    ],
)
def test_wrong_tables(mimic: Path, kind: str, text: str, message: str) -> None:
    write(mimic, kind, text)
    with pytest.raises(UserError, match=message):
        build_mimic(mimic, all_views=True)


def test_no_films(mimic: Path) -> None:
    (mimic / "files").rename(mimic / "elsewhere")
    with pytest.raises(UserError, match=r"none of the 5 films .* looked for is files/p10/p10000032/s50414267/d1.jpg"):
        build_mimic(mimic)

"""NIH ChestX-ray14: official lists, 14 labels, boxes as fractions, other endings."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from afire.data.manifest import Box, parse_boxes
from afire.data.sources.nih import NIH_LABELS, build_nih
from afire.errors import UserError

HEADER = (
    "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position,"
    "OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y]\n"
)
ROWS = [
    "00000001_000.png,Cardiomegaly,0,1,57,M,PA,2682,2749,0.143,0.143",
    "00000001_001.png,Cardiomegaly|Emphysema,1,1,58,M,PA,2894,2729,0.143,0.143",
    "00000002_000.png,No Finding,0,2,411,F,AP,2500,2048,0.171,0.171",
    "00000003_000.png,Pleural_Thickening|Infiltration,0,3,81,F,PA,2582,2991,0.143,0.143",
]


@pytest.fixture
def nih(tmp_path: Path, touch) -> Path:
    (tmp_path / "Data_Entry_2017_v2020.csv").write_text(HEADER + "\n".join(ROWS) + "\n")
    (tmp_path / "train_val_list.txt").write_text("00000001_000.png\n00000001_001.png\n00000002_000.png\n")
    (tmp_path / "test_list.txt").write_text("00000003_000.png\n")
    (tmp_path / "BBox_List_2017.csv").write_text(
        "Image Index,Finding Label,Bbox [x,y,w,h],,,\n"
        "00000003_000.png,Infiltrate,256.0,512.0,128.0,64.0,,,\n"
        "00000003_000.png,Atelectasis,900.0,0.0,200.0,1024.0,,,\n"
    )
    touch(tmp_path, "images_001/images/00000001_000.png", "images_001/images/00000001_001.png")
    touch(tmp_path, "images_002/images/00000002_000.png", "images_002/images/00000003_000.png")
    return tmp_path


def test_the_whole_table(nih: Path) -> None:
    manifest = build_nih(nih)
    table = manifest.table
    assert manifest.labels == list(NIH_LABELS) and len(NIH_LABELS) == 14
    assert table["image"].tolist()[0] == "images_001/images/00000001_000.png"
    assert table["split"].tolist() == ["train", "train", "train", "test"]
    assert table["patient"].tolist() == ["1", "1", "2", "3"]
    assert table["view"].tolist() == ["PA", "PA", "AP", "PA"]
    assert table["normal"].tolist() == [0, 0, 1, 0]
    assert table["label:Cardiomegaly"].tolist() == [1, 1, 0, 0]
    assert table["label:Emphysema"].tolist() == [0, 1, 0, 0]
    assert table["label:Pleural_Thickening"].tolist() == [0, 0, 0, 1]
    assert table[[f"label:{name}" for name in NIH_LABELS]].to_numpy().sum() == 5
    assert table["meta:orig_width"].tolist() == [2682, 2894, 2500, 2582]
    assert table["meta:orig_height"].tolist() == [2749, 2729, 2048, 2991]
    assert table["meta:sex"].tolist() == ["M", "M", "F", "F"]
    assert table["meta:age"].tolist()[:2] == [57, 58] and table["meta:age"].isna().tolist()[2], "411 years is a typo"


def test_boxes_are_fractions_with_the_label_names(nih: Path) -> None:
    table = build_nih(nih).table
    assert table["boxes"].tolist()[:3] == ["", "", ""]
    infiltration, clipped = parse_boxes(table["boxes"].iloc[3])
    assert infiltration == Box("Infiltration", 0.25, 0.5, 0.125, 0.0625)
    assert clipped.x + clipped.w == pytest.approx(1.0), "a box that passes the edge is cut there"


def test_jpg_copies_of_a_part(nih: Path, touch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for film in nih.rglob("*.png"):
        film.unlink()
    touch(nih, "images/00000001_001.jpg", "images/00000003_000.jpeg", "images/unlisted.jpg")
    with caplog.at_level(logging.INFO, "afire"):
        table = build_nih(nih).table
    assert table["image"].tolist() == ["images/00000001_001.jpg", "images/00000003_000.jpeg"]
    assert "2 of 4 listed films are in" in caplog.text


def test_two_copies_need_a_choice(nih: Path, touch) -> None:
    touch(nih, "small/00000001_000.jpg")
    with pytest.raises(UserError, match=r"holds 00000001_000 twice, as .*--images"):
        build_nih(nih)
    assert build_nih(nih, images="small").table["image"].tolist() == ["small/00000001_000.jpg"]


def test_older_table_and_no_boxes(nih: Path, caplog: pytest.LogCaptureFixture) -> None:
    (nih / "Data_Entry_2017_v2020.csv").rename(nih / "Data_Entry_2017.csv")
    (nih / "BBox_List_2017.csv").unlink()
    with caplog.at_level(logging.INFO, "afire"):
        assert (build_nih(nih).table["boxes"] == "").all()
    assert "no BBox_List_2017.csv" in caplog.text


def test_films_in_no_list(nih: Path, caplog: pytest.LogCaptureFixture) -> None:
    (nih / "test_list.txt").write_text("")
    with caplog.at_level(logging.WARNING, "afire"):
        assert build_nih(nih).table["split"].tolist()[-1] == ""
    assert "1 films are in neither official list" in caplog.text


@pytest.mark.parametrize("name", ["Data_Entry_2017_v2020.csv", "train_val_list.txt", "test_list.txt"])
def test_missing_files(nih: Path, name: str) -> None:
    (nih / name).unlink()
    with pytest.raises(UserError, match=f"is missing: looked for {name}"):
        build_nih(nih)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("Data_Entry_2017_v2020.csv", HEADER.replace("Patient ID", "Subject") + ROWS[0], "has no column 'Patient ID'"),
        ("Data_Entry_2017_v2020.csv", HEADER + ROWS[0].replace("Cardiomegaly", "Gout"), "names the finding 'Gout'"),
        ("test_list.txt", "00000001_000.png\n", "00000001_000 is in both official lists"),
        ("BBox_List_2017.csv", "Image Index,Finding Label\na,b\n", "has 2 columns; expected film, finding, x"),
        ("BBox_List_2017.csv", "Image Index,Finding Label,x,y,w,h\na,b,1,2,3,four\n", "not four numbers, in row 1"),
    ],
)
def test_wrong_files(nih: Path, file: str, text: str, message: str) -> None:
    (nih / file).write_text(text)
    with pytest.raises(UserError, match=message):
        build_nih(nih)


def test_no_film_at_all(nih: Path) -> None:
    for film in nih.rglob("*.png"):
        film.unlink()
    with pytest.raises(UserError, match=r"none of the 4 films .* the first looked for is 00000001_000.png"):
        build_nih(nih)


@pytest.mark.realdata
def test_the_real_part(real_data: Path) -> None:
    manifest = build_nih(real_data / "nih")
    table = manifest.table
    test = table["split"] == "test"
    assert (len(table), int((~test).sum()), int(test.sum())) == (4999, 4032, 967)
    assert (table["patient"][~test].nunique(), table["patient"][test].nunique()) == (1273, 62)
    assert not set(table["patient"][~test]) & set(table["patient"][test])
    assert table["view"].value_counts().to_dict() == {"PA": 3290, "AP": 1709}
    assert (int(table["normal"].sum()), int(table["normal"][test].sum())) == (2754, 329)
    published = {
        "Infiltration": (830, 216), "Effusion": (487, 150), "Atelectasis": (460, 125), "Nodule": (214, 35),
        "Consolidation": (205, 62), "Pneumothorax": (199, 116), "Cardiomegaly": (196, 94), "Fibrosis": (172, 30),
        "Pleural_Thickening": (165, 58), "Mass": (161, 42), "Emphysema": (125, 42), "Edema": (90, 35),
        "Pneumonia": (65, 18), "Hernia": (27, 15),
    }  # fmt: skip
    found = {name: table[f"label:{name}"] for name in manifest.labels}
    assert {name: (int(has.sum()), int(has[test].sum())) for name, has in found.items()} == published
    boxed = [manifest.boxes(row) for row in range(len(manifest)) if table["boxes"].iloc[row]]
    assert (len(boxed), sum(map(len, boxed))) == (37, 39)
    assert (table["split"][table["boxes"] != ""] == "test").all()
    assert {box.label for boxes in boxed for box in boxes} <= set(manifest.labels)
    # A box's finding is one of its film's labels.
    for row in range(len(manifest)):
        for box in manifest.boxes(row):
            assert table[f"label:{box.label}"].iloc[row] == 1

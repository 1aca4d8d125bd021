"""CheXpert, in a miniature with the real header: policies, views, both places of the root."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from afire.data.sources.chexpert import CHEXPERT_LABELS, COMPETITION_LABELS, build_chexpert
from afire.errors import UserError

HEADER = (
    "Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Enlarged Cardiomediastinum,Cardiomegaly,Lung Opacity,Lung Lesion,"
    "Edema,Consolidation,Pneumonia,Atelectasis,Pneumothorax,Pleural Effusion,Pleural Other,Fracture,Support Devices\n"
)
SET = "CheXpert-v1.0-small"
TRAIN = [  # path, sex, age, view, position, 14 labels in the order of the header
    f"{SET}/train/patient00001/study1/view1_frontal.jpg,Female,68,Frontal,AP,1.0,,,,,,,,,0.0,,,,1.0",
    f"{SET}/train/patient00002/study2/view1_frontal.jpg,Female,87,Frontal,PA,,,-1.0,1.0,,-1.0,-1.0,,-1.0,,-1.0,,1.0,",
    f"{SET}/train/patient00002/study1/view2_lateral.jpg,Female,83,Lateral,,,,,1.0,,,-1.0,,,,,,1.0,",
    f"{SET}/train/patient00003/study1/view1_frontal.jpg,Unknown,0,Frontal,LL,,,,,,,,,,,,,,",
]
VALID = [f"{SET}/valid/patient64541/study1/view1_frontal.jpg,Male,73,Frontal,AP" + ",0.0" * 2 + ",1.0" + ",0.0" * 11]


def make(folder: Path) -> None:
    (folder / "train.csv").write_text(HEADER + "\n".join(TRAIN) + "\n")
    (folder / "valid.csv").write_text(HEADER + "\n".join(VALID) + "\n")


@pytest.fixture
def chexpert(tmp_path: Path, touch) -> Path:
    """The folder above the set's own."""
    touch(tmp_path, [row.split(",")[0] for row in TRAIN + VALID])
    make(tmp_path / SET)
    return tmp_path


def test_the_five_labels(chexpert: Path) -> None:
    manifest = build_chexpert(chexpert / SET)
    table = manifest.table
    assert manifest.labels == list(COMPETITION_LABELS)
    assert table["image"].tolist()[0] == "train/patient00001/study1/view1_frontal.jpg"
    assert table["split"].tolist() == ["train", "train", "train", "test"], "valid.csv is the test set"
    assert table["patient"].tolist() == ["patient00001", "patient00002", "patient00003", "patient64541"]
    assert table["view"].tolist() == ["AP", "PA", "FRONTAL", "AP"]
    assert table["label:Cardiomegaly"].tolist() == [0, 1, 0, 1], "uncertain counts as one by default"
    assert table["normal"].tolist()[:2] == [1, 0] and table["normal"].isna().tolist() == [False, False, True, False]
    assert table["meta:sex"].tolist() == ["F", "F", "", "M"]
    assert table["meta:age"].tolist()[:2] == [68, 87] and math.isnan(table["meta:age"].iloc[2])
    assert manifest.path(3).exists()


def test_the_root_may_be_above(chexpert: Path) -> None:
    inner, above = build_chexpert(chexpert / SET), build_chexpert(chexpert)
    assert above.table["image"].tolist() == [f"{SET}/{image}" for image in inner.table["image"]]
    assert above.path(0).exists()
    renamed = (chexpert / SET).rename(chexpert / "renamed")
    assert build_chexpert(renamed).table.equals(inner.table), "Path's first folder is not looked at"


def test_two_copies_need_a_choice(chexpert: Path) -> None:
    (chexpert / "CheXpert-v1.0").mkdir()
    make(chexpert / "CheXpert-v1.0")
    with pytest.raises(UserError, match=r"several copies of CheXpert \(CheXpert-v1.0, CheXpert-v1.0-small\)"):
        build_chexpert(chexpert)


@pytest.mark.parametrize(("uncertain", "value"), [("ones", 1.0), ("zeros", 0.0), ("ignore", math.nan)])
def test_uncertainty(chexpert: Path, uncertain, value: float) -> None:
    table = build_chexpert(chexpert, labels=14, uncertain=uncertain, blank="ignore").table
    found = table["label:Edema"].iloc[1]
    assert found == value or (math.isnan(found) and math.isnan(value))
    assert math.isnan(table["label:Edema"].iloc[0]), "not mentioned"
    assert table["label:Edema"].iloc[3] == 0, "said to be absent"


def test_fourteen_labels_and_all_views(chexpert: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "afire"):
        build_chexpert(chexpert)
    assert "4 of 5 films are frontal; lateral ones are left out" in caplog.text
    manifest = build_chexpert(chexpert, labels=14, all_views=True)
    assert manifest.labels == list(CHEXPERT_LABELS)
    assert manifest.table["view"].tolist() == ["AP", "PA", "LATERAL", "FRONTAL", "AP"]


def test_png_copies(chexpert: Path) -> None:
    for film in chexpert.rglob("*.jpg"):
        film.rename(film.with_suffix(".png"))
    assert build_chexpert(chexpert).table["image"].str.endswith(".png").all()


def test_a_part_of_the_set(chexpert: Path, caplog: pytest.LogCaptureFixture) -> None:
    next((chexpert / SET / "train" / "patient00002" / "study2").iterdir()).unlink()
    with caplog.at_level(logging.INFO, "afire"):
        assert len(build_chexpert(chexpert)) == 3
    assert "3 of 4 listed films are in" in caplog.text


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("train.csv", None, r"looked for train.csv in "),
        ("valid.csv", None, r"looked for valid.csv in "),
        ("valid.csv", HEADER.replace("Edema", "Oedema"), r"valid.csv has no column 'Edema'"),
        (
            "valid.csv",
            HEADER + VALID[0].replace("1.0", "3.0"),
            r"valid.csv: column 'Cardiomegaly' holds '3.0' in row 1",
        ),
        ("valid.csv", HEADER + VALID[0].replace("/valid/", "/dev/"), "names neither train/ nor valid/"),
    ],
)
def test_wrong_files(chexpert: Path, file: str, text: str | None, message: str) -> None:
    path = chexpert / SET / file
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(UserError, match=message):
        build_chexpert(chexpert)


def test_a_path_out_of_the_set_is_refused(chexpert: Path) -> None:
    (chexpert / SET / "valid.csv").write_text(HEADER + VALID[0].replace("study1", "../../../../etc"))
    manifest = build_chexpert(chexpert)
    assert not manifest.table["image"].str.contains("..", regex=False).any()

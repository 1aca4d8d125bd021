"""What radiologists said of NIH films, in miniatures of the two public tables."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from afire.data.sources.nih import build_nih
from afire.errors import UserError
from tests.data.sources.test_nih import HEADER

# Film, report, list, and whether the report calls it normal.
FILMS = [
    ("1_000", "No Finding", "train"),
    ("1_001", "No Finding", "train"),
    ("2_000", "Effusion", "train"),
    ("3_000", "No Finding", "test"),
    ("3_001", "No Finding", "test"),
    ("3_002", "Effusion", "test"),
    ("4_000", "No Finding", "test"),
]
FOUR = HEADER.strip() + ",Fracture,Pneumothorax,Airspace opacity,Nodule or mass,Set Id\n"


@pytest.fixture
def nih(tmp_path: Path, touch) -> Path:
    rows = [f"{name}.png,{report},0,{name[0]},50,M,PA,2500,2048,0.1,0.1" for name, report, _ in FILMS]
    (tmp_path / "Data_Entry_2017_v2020.csv").write_text(HEADER + "\n".join(rows) + "\n")
    for split, file in (("train", "train_val_list.txt"), ("test", "test_list.txt")):
        (tmp_path / file).write_text("".join(f"{name}.png\n" for name, _, where in FILMS if where == split))
    touch(tmp_path, [f"images/{name}.png" for name, *_ in FILMS])
    return tmp_path


def four(path: Path, **cells: str) -> Path:
    """A table of four findings; its columns in front of them are those of the official one."""
    about = "No Finding,0,1,50,M,PA,2500,2048,0.1,0.1"
    path.write_text(FOUR + "".join(f"{name[1:]}.png,{about},{said},test\n" for name, said in cells.items()))
    return path


def test_the_four_findings_stand_beside_the_others(nih: Path, caplog: pytest.LogCaptureFixture) -> None:
    readers = four(
        nih / "four.csv", _1_000="NO,NO,YES,NO", _3_000="NO,NO,NO,NO", _3_001="YES,NO,NO,NO", _3_002="NO,NO,NO,NO"
    )
    with caplog.at_level(logging.INFO, "afire"):
        manifest = build_nih(nih, readers=readers)
    table = manifest.table.set_index(manifest.table["image"].map(lambda image: Path(image).stem))
    assert "radiologists read 4 of the 7 films" in caplog.text and len(manifest.labels) == 18
    assert table["normal"]["1_000"] == 0, "the report overlooked an opacity: nothing to learn normal films from"
    assert table["normal"]["1_001"] == 1 and table["normal"]["2_000"] == 0, "training films nobody read: the report"
    assert table["normal"]["3_000"] == 1 and table["normal"]["3_001"] == 0
    assert math.isnan(table["normal"]["3_002"]), "nobody was asked about the effusion that the report names"
    assert math.isnan(table["normal"]["4_000"]), "a test film that nobody read"
    assert table["label:Airspace opacity (read)"]["1_000"] == 1 and table["label:Fracture (read)"]["3_001"] == 1
    assert math.isnan(table["label:Fracture (read)"]["1_001"]) and table["label:Effusion"]["3_002"] == 1
    assert manifest.info["options"]["readers"] == "four.csv" and "as radiologists read them" in manifest.info["normal"]


def test_all_findings_say_abnormal_of_the_whole_film(nih: Path) -> None:
    (nih / "all.csv").write_text(
        "Image ID,Patient ID,Effusion,Pleural Thickening,Abnormal\n"
        "3_000.png,3,NO,YES,1\n3_002.png,3,NO,NO,0\n4_000.png,4,NO,NO,1\n"
    )
    manifest = build_nih(nih, readers=nih / "all.csv")
    table = manifest.table.set_index(manifest.table["image"].map(lambda image: Path(image).stem))
    assert table["normal"][["3_000", "3_002", "4_000"]].tolist() == [0, 1, 0] and math.isnan(table["normal"]["3_001"])
    assert table["label:Pleural Thickening (read)"]["3_000"] == 1 and "Abnormal (read)" not in manifest.labels
    assert table["label:Effusion"]["3_002"] == 1 and table["label:Effusion (read)"]["3_002"] == 0


def test_tables_that_are_none_are_refused(nih: Path) -> None:
    readers = nih / "readers.csv"
    for text, message in (
        ("film,Fracture\n3_000.png,NO\n", "has no column 'Image Index' or 'Image ID'"),
        ("Image Index,Fracture\n3_000.png,NO\n", "has neither a column 'Abnormal' nor all of Fracture"),
        ("Image ID,Abnormal\n3_000.png,maybe\n", "'Abnormal' holds 'maybe'; expected YES, NO, 1, 0"),
        ("Image ID,Abnormal\n3_000.png,1\n3_000.png,0\n", "has 3_000 twice; give adjudicated labels"),
    ):
        readers.write_text(text)
        with pytest.raises(UserError, match=message):
            build_nih(nih, readers=readers)
    with pytest.raises(UserError, match=r"nowhere\.csv"):
        build_nih(nih, readers=nih / "nowhere.csv")


@pytest.mark.realdata
def test_the_real_table(real_data: Path) -> None:
    table = build_nih(real_data / "nih", readers=real_data / "nih" / "google2019_nih-chest-xray-labels.csv").table
    test = table[(table["split"] == "test") & table["normal"].notna()]
    assert test["normal"].value_counts().to_dict() == {0.0: 30, 1.0: 10}

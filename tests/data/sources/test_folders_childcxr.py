"""ChildCXR: the official split, Kaggle's val folder undone, patients and causes from names."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pandas as pd
import pytest

from afire.data.sources.folders import build_childcxr
from afire.errors import UserError

FILMS = [
    "train/NORMAL/IM-0115-0001.jpeg",
    "train/NORMAL/NORMAL2-IM-1427-0001-0002.jpeg",
    "train/PNEUMONIA/person12_virus_34.jpeg",
    "train/PNEUMONIA/person12_bacteria_35.jpeg",
    "val/NORMAL/NORMAL2-IM-1427-0001.jpeg",
    "val/PNEUMONIA/person1946_bacteria_4874.jpeg",
    "test/NORMAL/IM-0001-0001.jpeg",
    "test/PNEUMONIA/person1_virus_6.jpeg",
]


@pytest.mark.parametrize("above", ["", "chest_xray/"])
def test_layout_labels_and_patients(tmp_path: Path, touch, above: str) -> None:
    touch(tmp_path, [above + film for film in FILMS], above + "train/NORMAL/.DS_Store", "__MACOSX/x.jpeg")
    manifest = build_childcxr(tmp_path)
    table = manifest.table.set_index(manifest.table["image"].str.removeprefix(above)).loc[FILMS]
    assert table["split"].tolist() == ["train"] * 6 + ["test"] * 2
    assert table["normal"].tolist() == [1, 1, 0, 0, 1, 0, 1, 0]
    assert table["label:Pneumonia"].tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    assert table["label:Bacteria"].tolist() == [0, 0, 0, 1, 0, 1, 0, 0]
    assert table["label:Virus"].tolist() == [0, 0, 1, 0, 0, 0, 0, 1]
    assert table["patient"].tolist() == [
        "IM-0115", "NORMAL2-IM-1427", "person12_virus", "person12_bacteria",
        "NORMAL2-IM-1427", "person1946_bacteria", "IM-0001", "person1_virus",
    ]  # fmt: skip
    assert table["meta:kaggle_val"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert "meta:orig_width" not in table
    assert manifest.path(0).exists()


def test_original_sizes_are_used_when_there(tmp_path: Path, touch, caplog: pytest.LogCaptureFixture) -> None:
    touch(tmp_path, [film for film in FILMS if not film.startswith("val")])
    (tmp_path / "manifest.csv").write_text(
        "split,class,file,subtype,name_group,kaggle_val,orig_w,orig_h,orig_mode,w,h,orig_md5\n"
        "train,NORMAL,IM-0115-0001.jpeg,normal,IM-0115,1,2090,1858,L,288,256,x\n"
        "test,NORMAL,IM-0001-0001.jpeg,normal,IM-0001,0,1857,1317,L,361,256,y\n"
    )
    with caplog.at_level(logging.WARNING, "afire"):
        table = build_childcxr(tmp_path).table.set_index("image")
    first = table.loc["train/NORMAL/IM-0115-0001.jpeg"]
    assert (first["meta:orig_width"], first["meta:orig_height"], first["meta:kaggle_val"]) == (2090, 1858, 1)
    assert math.isnan(table.loc["test/PNEUMONIA/person1_virus_6.jpeg"]["meta:orig_width"])
    assert "4 films are not in" in caplog.text


def test_our_own_manifest_is_not_taken_for_the_sizes(tmp_path: Path, touch) -> None:
    touch(tmp_path, FILMS)
    (tmp_path / "manifest.csv").write_text("# afire manifest {}\nimage\nx.png\n")
    assert "meta:orig_width" not in build_childcxr(tmp_path).table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,width\nx,1\n", r"manifest.csv has no column 'split'"),
        ("split,class,file,orig_w,orig_h\n" + "test,NORMAL,a.jpeg,1,1\n" * 2, "test/NORMAL/a.jpeg more than once"),
    ],
)
def test_a_wrong_manifest_csv(tmp_path: Path, touch, text: str, message: str) -> None:
    touch(tmp_path, FILMS)
    (tmp_path / "manifest.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        build_childcxr(tmp_path)


def test_strange_names_are_kept_and_said(tmp_path: Path, touch, caplog: pytest.LogCaptureFixture) -> None:
    touch(tmp_path, FILMS, "train/PNEUMONIA/extra (1).png")
    with caplog.at_level(logging.WARNING, "afire"):
        table = build_childcxr(tmp_path).table.set_index("image")
    row = table.loc["train/PNEUMONIA/extra (1).png"]
    assert row["label:Pneumonia"] == 1 and math.isnan(row["label:Virus"]) and math.isnan(row["label:Bacteria"])
    assert row["patient"] == "train/PNEUMONIA/extra (1).png"
    assert "do not follow the naming" in caplog.text


def test_another_layout_is_refused(tmp_path: Path, touch) -> None:
    touch(tmp_path, "train/NORMAL/IM-0115-0001.jpeg")
    with pytest.raises(UserError, match="does not look like ChildCXR: looked for train/NORMAL"):
        build_childcxr(tmp_path)
    touch(tmp_path, FILMS, "train/other/x.jpeg")
    with pytest.raises(UserError, match=r"train/other/x.jpeg is not in a folder NORMAL or PNEUMONIA"):
        build_childcxr(tmp_path)


@pytest.mark.realdata
def test_the_real_set(real_data: Path) -> None:
    table = build_childcxr(real_data / "childcxr").table
    counts = table.groupby(["split", "normal"]).size().to_dict()
    assert counts == {("train", 1.0): 1349, ("train", 0.0): 3883, ("test", 1.0): 234, ("test", 0.0): 390}
    causes = table.groupby("split")[["label:Bacteria", "label:Virus"]].sum()
    assert causes.loc["train"].tolist() == [2538, 1345] and causes.loc["test"].tolist() == [242, 148]
    assert table["meta:kaggle_val"].sum() == 16
    assert table["meta:orig_width"].notna().all() and table["meta:orig_height"].notna().all()
    theirs = pd.read_csv(real_data / "childcxr" / "manifest.csv")
    groups = dict(
        zip(theirs["split"] + "/" + theirs["class"] + "/" + theirs["file"], theirs["name_group"], strict=True)
    )
    assert table["patient"].tolist() == table["image"].map(groups).tolist()
    assert table.groupby("patient")["split"].nunique().max() == 1

"""A user's own table: every column by name, every mistake in words."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from afire.data.film import hash_patient
from afire.data.sources.table import Columns, build_table
from afire.errors import UserError


@pytest.fixture
def films(tmp_path: Path, touch) -> Path:
    touch(tmp_path, "images/a.png", "images/b.png", "images/c.png", "masks/a.png")
    return tmp_path


def write(root: Path, text: str, name: str = "list.csv") -> Path:
    (root / name).write_text(text, encoding="utf-8")
    return root / name


def test_all_columns(films: Path) -> None:
    csv = write(
        films,
        "file,pid,part,pos,tb,mass,ok,m,age\n"
        "a,007,Training,pa,1,0,0,a.png,57\n"
        "b,008,validation,Lateral,0,,1,,58\n"
        "c,008,TEST,AP,,1.0,,,\n",
    )
    columns = Columns(
        image="file",
        patient="pid",
        split="part",
        view="pos",
        labels=["tb", "mass"],
        normal="ok",
        mask="m",
        meta=["age"],
    )
    manifest = build_table(films, csv, columns, prefix="images/", suffix=".png", mask_prefix="masks/")
    table = manifest.table
    assert table["image"].tolist() == ["images/a.png", "images/b.png", "images/c.png"]
    assert table["patient"].tolist() == [hash_patient("007"), hash_patient("008"), hash_patient("008")]
    assert table["split"].tolist() == ["train", "val", "test"]
    assert table["view"].tolist() == ["PA", "LATERAL", "AP"]
    assert table["label:tb"].tolist()[:2] == [1, 0] and math.isnan(table["label:tb"].iloc[2])
    assert math.isnan(table["label:mass"].iloc[1]) and table["label:mass"].iloc[2] == 1
    assert table["normal"].tolist()[:2] == [0, 1] and math.isnan(table["normal"].iloc[2])
    assert table["mask"].tolist() == ["masks/a.png", "", ""]
    assert table["meta:age"].tolist()[:2] == [57, 58]
    assert manifest.info["options"]["image"] == "file"


def test_only_images(films: Path) -> None:
    table = build_table(films, write(films, "image\nimages/a.png\n./images/b.png\nimages\\c.png\n")).table
    assert table["image"].tolist() == ["images/a.png", "images/b.png", "images/c.png"]
    assert table["normal"].isna().all()


def test_findings_in_one_cell(films: Path) -> None:
    text = "image;finding\n"
    csv = write(films, text.replace(";", ",") + "images/a.png,Mass; Nodule\nimages/b.png,No Finding\nimages/c.png,\n")
    columns = Columns(findings="finding", separator=";", normal_finding="No Finding")
    table = build_table(films, csv, columns).table
    assert table["label:Mass"].tolist()[:2] == [1, 0] and math.isnan(table["label:Mass"].iloc[2])
    assert table["label:Nodule"].tolist()[:2] == [1, 0]
    assert table["normal"].tolist()[:2] == [0, 1] and math.isnan(table["normal"].iloc[2])
    assert "label:No Finding" not in table
    as_label = build_table(films, csv, Columns(findings="finding", separator=";"))
    assert as_label.labels == ["Mass", "No Finding", "Nodule"] and as_label.table["normal"].isna().all()


def test_no_label_is_normal(films: Path) -> None:
    csv = write(films, "image,tb,mass\nimages/a.png,0,0\nimages/b.png,,1\nimages/c.png,,0\n")
    columns = Columns(labels=["tb", "mass"])
    normal = build_table(films, csv, columns, no_label_is_normal=True).table["normal"].tolist()
    assert normal[:2] == [1, 0] and math.isnan(normal[2]), "tb of the third film is unknown"
    assert build_table(films, csv, columns).table["normal"].isna().all(), "nothing is assumed unless asked for"
    with pytest.raises(UserError, match="needs labels"):
        build_table(films, csv, no_label_is_normal=True)
    with pytest.raises(UserError, match="both say what is normal"):
        build_table(films, csv, Columns(labels=["tb"], normal="mass"), no_label_is_normal=True)


def test_tabs(films: Path) -> None:
    csv = write(films, "image\ttb\nimages/a.png\t1\n", "list.tsv")
    assert build_table(films, csv, Columns(labels=["tb"])).table["label:tb"].tolist() == [1]


def test_absolute_paths_inside_the_root(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csv = write(films, f"image\n{films}/images/a.png\nimages/b.png\n")
    assert build_table(films, csv).table["image"].tolist() == ["images/a.png", "images/b.png"]
    monkeypatch.chdir(films.parent)
    assert build_table(Path(films.name), csv).table["image"].tolist() == ["images/a.png", "images/b.png"]


@pytest.mark.parametrize("path", ["/etc/passwd.png", "../a.png", "images/../../a.png", "C:\\films\\a.png"])
def test_paths_that_leave_the_root(films: Path, path: str) -> None:
    with pytest.raises(UserError, match=r"image path .* leaves the manifest's root"):
        build_table(films, write(films, f"image\nimages/a.png\n{path}\n"))
    with pytest.raises(UserError, match=r"mask path .* leaves the manifest's root"):
        build_table(films, write(films, f"image,m\nimages/a.png,{path}\n"), Columns(mask="m"))


def test_missing_films_and_masks(films: Path, caplog: pytest.LogCaptureFixture) -> None:
    csv = write(films, "image,m\nimages/a.png,masks/a.png\nimages/b.png,masks/b.png\nimages/none.png,\n,\n")
    with caplog.at_level(logging.INFO, "afire"):
        table = build_table(films, csv, Columns(mask="m")).table
    assert table["mask"].tolist() == ["masks/a.png", ""]
    assert "2 of 4 listed films are in" in caplog.text
    assert "1 masks, such as masks/b.png, are not in" in caplog.text
    with pytest.raises(UserError, match=r"none of the 1 films listed in .*list.csv is in"):
        build_table(films, write(films, "image\nimages/none.png\n"))


def test_uncertain_labels_need_a_decision(films: Path) -> None:
    csv = write(films, "image,tb\nimages/a.png,-1\nimages/b.png,1\n")
    with pytest.raises(UserError, match="holds -1 as a label; say with --uncertain"):
        build_table(films, csv, Columns(labels=["tb"]))
    assert build_table(films, csv, Columns(labels=["tb"]), uncertain="ones").table["label:tb"].tolist() == [1, 1]
    with pytest.raises(UserError, match="column 'tb' holds -1"):
        build_table(films, csv, Columns(normal="tb"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (Columns(image="path"), r"list.csv has no column 'path'; its columns are image, tb, part, f"),
        (Columns(labels=["part"]), r"list.csv: column 'part' holds 'fold1' in row 1"),
        (Columns(split="part"), r"list.csv names the split 'fold1'"),
        (
            Columns(findings="f", normal_finding="Normal"),
            r"no film has the finding 'Normal' in column f; it holds Mass",
        ),
        (Columns(normal_finding="x"), "give that too"),
        (Columns(findings="f", normal_finding="Mass", normal="tb"), "both say what is normal"),
    ],
)
def test_mistakes(films: Path, columns: Columns, message: str) -> None:
    csv = write(films, "image,tb,part,f\nimages/a.png,1,fold1,Mass\n")
    with pytest.raises(UserError, match=message):
        build_table(films, csv, columns)


def test_a_table_without_films(films: Path) -> None:
    with pytest.raises(UserError, match=r"list.csv lists no films"):
        build_table(films, write(films, "image\n"))


def test_a_film_listed_twice(films: Path) -> None:
    with pytest.raises(UserError, match=r"images/a.png more than once \(1 repeated row\); keep one row for each film"):
        build_table(films, write(films, "image\nimages/a.png\n./images/a.png\n"))

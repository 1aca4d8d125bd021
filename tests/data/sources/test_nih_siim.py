"""SIIM-ACR, in a miniature with its header: rows merged per film, masks turned into our coding."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from afire.data.decode import read_mask
from afire.data.rle import decode_rle, encode_siim
from afire.data.sources.nih import build_siim
from afire.errors import UserError

UID = "1.2.276.0.7230010.3.1.4.8323329.{}.1517875201.850819"
ONE, TWO, NONE, ABSENT = (UID.format(n) for n in (6904, 13666, 11028, 1))


def blob(row: int, column: int) -> np.ndarray:
    mask = np.zeros((16, 16), bool)
    mask[row : row + 3, column : column + 5] = True
    return mask


@pytest.fixture
def siim(tmp_path: Path, touch) -> Path:
    rows = [
        (ONE, encode_siim(blob(2, 3))),
        (TWO, encode_siim(blob(1, 1))),
        (NONE, "-1"),
        (TWO, encode_siim(blob(10, 8))),
    ]
    rows.append((ABSENT, "-1"))
    text = "ImageId, EncodedPixels\n" + "".join(f"{uid}, {rle}\n" for uid, rle in rows)
    (tmp_path / "train-rle.csv").write_text(text)
    for uid in (ONE, TWO, NONE):
        touch(tmp_path, f"dicom-images-train/1.2.3.{uid[-1]}/4.5.6/{uid}.dcm")
    touch(tmp_path, f"dicom-images-test/1.2/3.4/{UID.format(99)}.dcm")
    return tmp_path


def test_one_row_per_film_with_all_its_masks(siim: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "afire"):
        manifest = build_siim(siim, size=16)
    table = manifest.table.set_index(manifest.table["image"].map(lambda image: Path(image).stem))
    assert sorted(table.index) == sorted([ONE, TWO, NONE])
    assert table["label:Pneumothorax"].loc[[ONE, TWO, NONE]].tolist() == [1, 1, 0]
    assert np.array_equal(decode_rle(table["rle"][ONE]), blob(2, 3))
    assert np.array_equal(decode_rle(table["rle"][TWO]), blob(1, 1) | blob(10, 8))
    assert decode_rle(table["rle"][NONE]).shape == (16, 16) and not decode_rle(table["rle"][NONE]).any()
    assert table["normal"].loc[[ONE, TWO]].tolist() == [0, 0]
    assert math.isnan(table["normal"][NONE]), "no pneumothorax is not the same as normal"
    assert (table["split"] == "").all()
    assert table["patient"].tolist() == table["image"].tolist()
    assert manifest.info["mask"] == "Pneumothorax"
    assert "5 rows are of 4 films" in caplog.text and "3 of 4 listed films" in caplog.text


def test_stage_two_and_png_copies(siim: Path, touch) -> None:
    expected = build_siim(siim, size=16).table["rle"].tolist()
    (siim / "stage_2_train.csv").write_text((siim / "train-rle.csv").read_text().replace(", ", ","))
    (siim / "train-rle.csv").unlink()
    touch(siim, [f"png/{uid}.png" for uid in (ONE, TWO, NONE)])
    with pytest.raises(UserError, match=r"twice, as .*--images"):
        build_siim(siim, size=16)
    table = build_siim(siim, size=16, images="png").table
    assert table["image"].str.startswith("png/").all() and table["rle"].tolist() == expected


def test_a_table_elsewhere(siim: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other") / "my.csv"
    (siim / "train-rle.csv").rename(other)
    with pytest.raises(UserError, match=r"looked for train-rle.csv \(or stage_2_train.csv\)"):
        build_siim(siim, size=16)
    assert len(build_siim(siim, csv=other, size=16)) == 3


@pytest.mark.parametrize("rle", ["1 2 3", "1 x", "0 300", "5"])
def test_malformed_masks_name_the_film(siim: Path, rle: str) -> None:
    (siim / "train-rle.csv").write_text(f"ImageId, EncodedPixels\n{ONE}, {rle}\n")
    with pytest.raises(UserError, match=rf"train-rle.csv, film .*{ONE}.dcm: the RLE mask"):
        build_siim(siim, size=16)


def test_a_wrong_header(siim: Path) -> None:
    (siim / "train-rle.csv").write_text(f"ImageId,Pixels\n{ONE},-1\n")
    with pytest.raises(UserError, match="has no column 'EncodedPixels'; its columns are ImageId, Pixels"):
        build_siim(siim)


@pytest.mark.realdata
def test_a_real_film_with_its_header(real_data: Path, tmp_path: Path) -> None:
    uid = UID.format(6904)
    (tmp_path / "films").mkdir()
    film = next((real_data / "dicom").glob(f"*{uid}.dcm"))
    (tmp_path / "films" / f"{uid}.dcm").write_bytes(film.read_bytes())
    (tmp_path / "train-rle.csv").write_text(f"ImageId, EncodedPixels\n{uid}, -1\n")
    row = build_siim(tmp_path, headers=True).table.iloc[0]
    assert row["view"] == "PA" and row["label:Pneumothorax"] == 0
    assert len(row["patient"]) == 16 and row["patient"].isalnum() and not row["patient"].startswith("16d7f894")


# The copy in PNG


@pytest.fixture
def png(tmp_path: Path) -> Path:
    films = {"train": [("0_train_1_", 1), ("1_train_0_", 0), ("2_train_0_", 0)], "test": [("0_test_1_", 1)]}
    for split, listed in films.items():
        rows = "".join(f"{name}.png,1.2.{number},{sick}\n" for number, (name, sick) in enumerate(listed))
        (tmp_path / f"stage_1_{split}_images.csv").write_text("new_filename,ImageId,has_pneumo\n" + rows)
        for name, sick in listed:
            for folder, pixels in (("png_images", blob(0, 0)), ("png_masks", blob(2, 3) & bool(sick))):
                (tmp_path / folder).mkdir(exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8) * 255).save(tmp_path / folder / f"{name}.png")
    return tmp_path


def test_the_copy_in_png_has_a_test_list_and_masks(png: Path) -> None:
    manifest = build_siim(png)
    table = manifest.table.set_index(manifest.table["image"].map(lambda image: Path(image).stem))
    assert table["split"].to_dict() == {
        **dict.fromkeys(["0_train_1_", "1_train_0_", "2_train_0_"], "train"),
        "0_test_1_": "test",
    }
    assert (
        table["image"].str.startswith("png_images/").all() and table["mask"]["0_test_1_"] == "png_masks/0_test_1_.png"
    )
    assert table["label:Pneumothorax"].to_dict()["0_train_1_"] == 1 and table["normal"]["0_test_1_"] == 0
    assert math.isnan(table["normal"]["1_train_0_"]) and manifest.info["mask"] == "Pneumothorax"
    assert np.array_equal(read_mask(png / table["mask"]["0_train_1_"]), blob(2, 3))


def test_detectors_may_call_films_without_pneumothorax_normal(png: Path, siim: Path) -> None:
    manifest = build_siim(png, no_label_is_normal=True)
    assert (
        manifest.table["normal"].tolist().count(1) == 2 and "other diseases are not labelled" in manifest.info["normal"]
    )
    # Both layouts in one folder: the table that is named counts.
    published = build_siim(
        siim, csv=siim / "train-rle.csv", size=16, images="dicom-images-train", no_label_is_normal=True
    )
    assert sorted(published.table["normal"]) == [0, 0, 1] and published.info["options"]["no_label_is_normal"]


def test_lists_in_png_that_are_wrong(png: Path, caplog: pytest.LogCaptureFixture) -> None:
    (png / "png_masks" / "0_train_1_.png").unlink()
    with caplog.at_level(logging.WARNING, "afire"):
        build_siim(png)
    assert "1 films with a pneumothorax have no mask" in caplog.text
    train = png / "stage_1_train_images.csv"
    for text, message in (("0_train_1_.png,1.2,yes\n", "'yes' in has_pneumo"), ("0_test_1_.png,1.2,1\n", "twice")):
        train.write_text("new_filename,ImageId,has_pneumo\n" + text)
        with pytest.raises(UserError, match=message):
            build_siim(png)
    train.unlink()
    with pytest.raises(UserError, match=r"looked for stage_1_train_images\.csv"):
        build_siim(png)

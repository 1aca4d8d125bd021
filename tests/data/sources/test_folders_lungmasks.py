"""Lung-mask sets: the three layouts, left and right masks united, labels from names or a table."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from afire.data.rle import decode_rle
from afire.data.sources import build
from afire.data.sources.folders import build_lungmasks
from afire.errors import UserError


def test_images_and_masks(tmp_path: Path, touch) -> None:
    touch(tmp_path, "images/CHNCXR_0001_0.jpg", "images/CHNCXR_0327_1.jpg")
    touch(tmp_path, "masks/lungs/CHNCXR_0001_0.png", "masks/lungs/CHNCXR_0327_1.png", "masks/heart/CHNCXR_0001_0.png")
    manifest = build("shenzhen", tmp_path)
    table = manifest.table
    assert table["image"].tolist() == ["images/CHNCXR_0001_0.jpg", "images/CHNCXR_0327_1.jpg"]
    assert table["mask"].tolist() == ["masks/lungs/CHNCXR_0001_0.png", "masks/lungs/CHNCXR_0327_1.png"]
    assert table["label:Tuberculosis"].tolist() == [0, 1] and table["normal"].tolist() == [1, 0]
    assert (table["rle"] == "").all() and (table["split"] == "").all()
    assert table["patient"].nunique() == 2
    assert manifest.info["mask"] == "lungs"


def test_official_shenzhen(tmp_path: Path, touch, caplog: pytest.LogCaptureFixture) -> None:
    touch(tmp_path, "CXR_png/CHNCXR_0001_0.png", "CXR_png/CHNCXR_0336_1.png", "mask/CHNCXR_0001_0_mask.png")
    with caplog.at_level(logging.WARNING, "afire"):
        table = build_lungmasks(tmp_path).table
    assert table["mask"].tolist() == ["mask/CHNCXR_0001_0_mask.png", ""]
    assert "1 of 2 films have no lung mask" in caplog.text


def test_montgomery_left_and_right(tmp_path: Path, touch) -> None:
    touch(tmp_path, "CXR_png/MCUCXR_0001_0.png")
    left, right = np.zeros((6, 8), np.uint8), np.zeros((6, 8), np.uint8)
    left[1:4, 5:7] = 255
    right[2:5, 1:3] = 255
    for side, mask in (("leftMask", left), ("rightMask", right)):
        folder = tmp_path / "ManualMask" / side
        folder.mkdir(parents=True)
        Image.fromarray(mask).save(folder / "MCUCXR_0001_0.png")
    row = build_lungmasks(tmp_path).table.iloc[0]
    assert row["mask"] == ""
    assert np.array_equal(decode_rle(row["rle"]), (left | right) > 0)
    Image.fromarray(np.zeros((3, 3), np.uint8)).save(tmp_path / "ManualMask/leftMask/MCUCXR_0001_0.png")
    with pytest.raises(UserError, match="differ in size"):
        build_lungmasks(tmp_path)


def test_the_index_overrules_the_name(tmp_path: Path, touch) -> None:
    touch(tmp_path, "images/a.jpg", "images/b_0.jpg", "images/c.jpg", "masks/a.png", "masks/b_0.png", "masks/c.png")
    (tmp_path / "index.csv").write_text("name,tb,lungs_area\na,1,0.2\nb_0,1,0.2\n")
    labels = build_lungmasks(tmp_path).table["label:Tuberculosis"].tolist()
    assert labels[:2] == [1, 1] and math.isnan(labels[2])
    (tmp_path / "index.csv").write_text("name,tb\na,yes\n")
    with pytest.raises(UserError, match=r"index.csv holds 'yes' in column tb"):
        build_lungmasks(tmp_path)


def test_nothing_to_build(tmp_path: Path, touch) -> None:
    touch(tmp_path, "images/a.jpg")
    with pytest.raises(UserError, match="holds no lung masks; looked for folders called mask, masks or ManualMask"):
        build_lungmasks(tmp_path)
    touch(tmp_path, "masks/a.png", "small/a.jpg")
    with pytest.raises(UserError, match="holds a twice"):
        build_lungmasks(tmp_path)
    assert build_lungmasks(tmp_path, images="small").table["image"].tolist() == ["small/a.jpg"]
    (tmp_path / "images/a.jpg").unlink()
    (tmp_path / "small/a.jpg").unlink()
    with pytest.raises(UserError, match="there are no films"):
        build_lungmasks(tmp_path)


@pytest.mark.realdata
def test_the_real_shenzhen(real_data: Path) -> None:
    manifest = build_lungmasks(real_data / "shenzhen")
    table = manifest.table
    assert (len(table), int(table["normal"].sum()), int(table["label:Tuberculosis"].sum())) == (566, 279, 287)
    assert all(manifest.mask_path(row).is_file() for row in range(len(manifest)))  # type: ignore[union-attr]

"""Class folders, with and without folders of splits."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from afire.data.film import hash_patient
from afire.data.sources.folders import build_classes
from afire.errors import UserError


def test_classes_become_labels(tmp_path: Path, touch) -> None:
    touch(tmp_path, "Normal/1.png", "tb/2.png", "tb/deep/3.png", "mass/4.png")
    table = build_classes(tmp_path).table
    assert table["image"].tolist() == ["Normal/1.png", "mass/4.png", "tb/2.png", "tb/deep/3.png"]
    assert table["normal"].tolist() == [1, 0, 0, 0]
    assert table["label:tb"].tolist() == [0, 0, 1, 1]
    assert table["label:mass"].tolist() == [0, 1, 0, 0]
    assert "label:Normal" not in table
    assert (table["split"] == "").all()


def test_splits(tmp_path: Path, touch, caplog: pytest.LogCaptureFixture) -> None:
    touch(tmp_path, "train/No Finding/1.png", "Valid/tb/2.png", "testing/tb/3.png", "extra/tb/4.png", "5.png")
    touch(tmp_path, "train/6.png")
    with caplog.at_level(logging.WARNING, "afire"):
        table = build_classes(tmp_path).table
    assert dict(zip(table["image"], table["split"], strict=True)) == {
        "train/No Finding/1.png": "train",
        "Valid/tb/2.png": "val",
        "testing/tb/3.png": "test",
    }
    assert table.set_index("split")["normal"].to_dict() == {"train": 1, "val": 0, "test": 0}
    assert "left out: 3 films" in caplog.text and "do not lie in split/class/film" in caplog.text


def test_the_normal_class_can_be_named_or_missing(tmp_path: Path, touch) -> None:
    touch(tmp_path, "clear/1.png", "tb/2.png")
    assert build_classes(tmp_path).table["normal"].isna().all()
    named = build_classes(tmp_path, normal_class="CLEAR")
    assert named.table["normal"].tolist() == [1, 0] and named.labels == ["tb"]
    with pytest.raises(UserError, match="no class folder 'fine'; the classes are clear, tb"):
        build_classes(tmp_path, normal_class="fine")


def test_a_class_may_be_called_like_a_split(tmp_path: Path, touch) -> None:
    touch(tmp_path, "test/1.png", "other/2.png")
    assert build_classes(tmp_path).labels == ["other", "test"]


def test_a_flat_folder_has_no_classes(tmp_path: Path, touch) -> None:
    touch(tmp_path, "1.png")
    with pytest.raises(UserError, match="no class folders, only films; use `afire data build folder`"):
        build_classes(tmp_path)


def test_patients(tmp_path: Path, touch) -> None:
    touch(tmp_path, "normal/p1_a.png", "tb/p1_b.png")
    assert build_classes(tmp_path, patient_pattern="/(p[0-9]+)_").table["patient"].tolist() == [hash_patient("p1")] * 2


def test_masks_beside_the_films_of_a_class_are_no_films(
    tmp_path: Path, touch, caplog: pytest.LogCaptureFixture
) -> None:
    touch(
        tmp_path, "Normal/images/1.png", "Normal/masks/1.png", "Lung_Opacity/images/1.png", "Lung_Opacity/images/2.png"
    )
    touch(tmp_path, "Lung_Opacity/masks/1_mask.png", "Lung_Opacity/masks/9.png")
    with caplog.at_level(logging.WARNING, "afire"):
        manifest = build_classes(tmp_path)
    masks = dict(zip(manifest.table["image"], manifest.table["mask"], strict=True))
    assert masks == {
        "Normal/images/1.png": "Normal/masks/1.png",
        "Lung_Opacity/images/1.png": "Lung_Opacity/masks/1_mask.png",
        "Lung_Opacity/images/2.png": "",
    }
    assert manifest.labels == ["Lung_Opacity"] and manifest.info["mask"] == "lungs", "they are not places of findings"
    assert "1 masks, such as Lung_Opacity/masks/9.png, belong to no film" in caplog.text


def test_masks_in_splits(tmp_path: Path, touch) -> None:
    touch(tmp_path, "train/normal/images/1.png", "train/normal/masks/1.png", "test/tb/images/1.png")
    table = build_classes(tmp_path).table.set_index("split")
    assert table["mask"].to_dict() == {"train": "train/normal/masks/1.png", "test": ""}

"""Joined sets: every film once, patients kept apart, unknown findings unknown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from afire.data.manifest import Manifest, make_manifest, read_manifest, write_manifest
from afire.data.splits import SOURCE, development_split, join_manifests, official_split, write_split
from afire.errors import UserError
from tests import commands


def small_set(root: Path, label: str, count: int = 6, **extra: list[object]) -> Manifest:
    root.mkdir(parents=True, exist_ok=True)
    rows = {
        "image": [f"{number}.png" for number in range(count)],
        "patient": [str(number // 2) for number in range(count)],
        "split": ["train"] * (count - 2) + ["test"] * 2,
        "normal": [float(number % 2) for number in range(count)],
        f"label:{label}": [float(1 - number % 2) for number in range(count)],
        **extra,
    }
    return make_manifest(pd.DataFrame(rows), root, {"normal": f"no {label}"})


def test_films_lie_where_they_did_and_patients_stay_apart(tmp_path: Path) -> None:
    a, b = small_set(tmp_path / "x/a", "A", mask=["0.m.png", *[""] * 5]), small_set(tmp_path / "x/deep/b", "B", 8)
    joined = join_manifests({"a": a, "b": b})
    assert joined.root == (tmp_path / "x").resolve() and len(joined) == 14
    assert [joined.path(row) for row in range(6)] == [a.path(row).resolve() for row in range(6)]
    assert [joined.path(6 + row) for row in range(8)] == [b.path(row).resolve() for row in range(8)]
    assert joined.mask_path(0) == (tmp_path / "x/a/0.m.png").resolve() and joined.mask_path(1) is None
    assert joined.table["patient"].nunique() == 3 + 4 and list(joined.table[SOURCE].unique()) == ["a", "b"]
    assert np.isnan(joined.table["label:B"].iloc[:6]).all() and np.isnan(joined.table["label:A"].iloc[6:]).all()
    assert joined.info["normal"] == "a: no A; b: no B"
    split = official_split(joined, val_share=0.0)
    assert split.films == {"train": 10, "val": 0, "test": 4}


def test_split_files_become_the_lists(tmp_path: Path) -> None:
    words = ["data", "join", "--out", "both.parquet"]
    expected: dict[str, str] = {}
    for name in "ab":
        manifest = small_set(tmp_path / name, name.upper(), 24)
        split = development_split(manifest, 0.2, 0.3, seed=1)
        write_manifest(manifest, tmp_path / f"{name}.parquet")
        write_split(split, tmp_path / f"{name}.json")
        words += ["--data", f"{name}.parquet", "--split", f"{name}.json"]
        expected |= {
            f"{name}/{image}": part
            for part, rows in split.rows(manifest).items()
            for image in manifest.table["image"].iloc[rows]
        }
    commands.run(*words, folder=tmp_path)
    table = read_manifest(tmp_path / "both.parquet").table
    listed = table[table["split"] != ""]
    assert dict(zip(listed["image"], listed["split"], strict=True)) == expected
    assert set(table["split"]) == {"train", "val", "test", ""}  # the official test films are in no part
    assert "2 --data need 2 --split" in commands.run(*words[:-2], folder=tmp_path, expect=2).stderr


def test_one_root_inside_the_other(tmp_path: Path) -> None:
    joined = join_manifests({"a": small_set(tmp_path, "A"), "b": small_set(tmp_path / "b", "B")})
    assert joined.root == tmp_path.resolve() and joined.table["image"].iloc[0] == "0.png"
    assert joined.table["image"].iloc[6] == "b/0.png"


def test_what_cannot_be_joined_is_one_message(tmp_path: Path) -> None:
    a, b = small_set(tmp_path / "a", "A"), small_set(tmp_path / "b", "B")
    with pytest.raises(UserError, match="two manifests or more"):
        join_manifests({"a": a})
    with pytest.raises(UserError, match="itself joined"):
        join_manifests({"c": small_set(tmp_path / "c", "C"), "ab": join_manifests({"a": a, "b": b})})
    with pytest.raises(UserError, match="share no folder"):
        join_manifests({"a": a, "far": Manifest(b.table, Path("/somewhere"), {})})
    with pytest.raises(UserError, match="more than once"):
        join_manifests({"a": a, "again": a})


def test_the_command(tmp_path: Path) -> None:
    for name in "ab":
        write_manifest(small_set(tmp_path / name, name.upper()), tmp_path / f"{name}.parquet")
    words = ["data", "join", "--data", "a.parquet", "--data", "b.parquet", "--out", "both.parquet"]
    done = commands.run(*words, folder=tmp_path)
    assert "both.parquet" in done.stdout + done.stderr
    assert len(read_manifest(tmp_path / "both.parquet")) == 12
    words[5] = "a.parquet"
    assert "two manifests are called a" in commands.run(*words, folder=tmp_path, expect=2).stderr

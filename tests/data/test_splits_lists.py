"""Splits of list files, and development splits of any split: patients stay together, test films stay out."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from afire.cli import app
from afire.data.manifest import Manifest, make_manifest, write_manifest
from afire.data.splits import development_split, list_split, random_split, read_split
from afire.errors import UserError


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Forty films of twenty patients, named as NIH's."""
    names = [f"images/{patient:08d}_{film:03d}.png" for patient in range(20) for film in range(2)]
    patients = [f"{patient:08d}" for patient in range(20) for _ in range(2)]
    normal = [float(patient % 2) for patient in range(20) for _ in range(2)]
    return make_manifest(pd.DataFrame({"image": names, "patient": patients, "normal": normal}), tmp_path)


def write_list(path: Path, patients: range, films: int = 2, extra: str = "") -> Path:
    lines = [f"{patient:08d}_{film:03d}.png 0 1 0" for patient in patients for film in range(films)]
    path.write_text("\n".join([*lines, extra]) + "\n")
    return path


def test_lists_become_a_split(manifest: Manifest, tmp_path: Path) -> None:
    lists = {
        "train": write_list(tmp_path / "train.txt", range(14), films=1, extra="00099999_000.png 1 0 0"),
        "val": write_list(tmp_path / "val.txt", range(14, 16)),
        "test": write_list(tmp_path / "test.txt", range(16, 20)),
    }
    split = list_split(manifest, lists)
    assert dict(split.films) == {"train": 28, "val": 4, "test": 8}, "a film on no list goes with its patient"
    assert split.method["lists"]["train"] == {"listed": 15, "found": 14}
    assert set(manifest.table["patient"].iloc[split.rows(manifest)["test"]]) == set(split.patients["test"])
    carved = list_split(manifest, {name: lists[name] for name in ("train", "test")}, 0.2, seed=1)
    assert carved.films["test"] == 8 and carved.films["val"] > 0 and carved.films["train"] + carved.films["val"] == 28


def test_lists_that_do_not_fit_are_messages(manifest: Manifest, tmp_path: Path) -> None:
    train, other = write_list(tmp_path / "train.txt", range(10)), tmp_path / "other.txt"
    with pytest.raises(UserError, match="would be in train and in test"):
        list_split(manifest, {"train": train, "test": write_list(other, range(9, 12))}, val_share=0)
    other.write_text("chest.png\n")
    with pytest.raises(UserError, match=r"none of the 1 films in .*other\.txt is in this manifest"):
        list_split(manifest, {"train": train, "test": other})
    other.write_text("\n")
    with pytest.raises(UserError, match="names no film"):
        list_split(manifest, {"train": train, "test": other})
    with pytest.raises(UserError, match="does not exist"):
        list_split(manifest, {"train": train, "test": tmp_path / "nowhere.txt"})


def test_the_command_takes_lists_and_draws_seventy_ten_twenty(manifest: Manifest, tmp_path: Path) -> None:
    data = tmp_path / "nih.parquet"
    write_manifest(manifest, data)
    words = ["data", "split", "--data", str(data), "--out", str(tmp_path / "splits")]
    lists = ["--train-list", str(write_list(tmp_path / "a.txt", range(16)))]
    alone = CliRunner().invoke(app, [*words, *lists])
    assert isinstance(alone.exception, UserError) and "give --train-list and --test-list" in str(alone.exception)
    lists += ["--test-list", str(write_list(tmp_path / "b.txt", range(16, 20)))]
    both = CliRunner().invoke(app, [*words, *lists, "--test", "0.2"])
    assert isinstance(both.exception, UserError) and "leave out --folds, --development and --test" in str(
        both.exception
    )
    assert CliRunner().invoke(app, [*words, *lists]).exit_code == 0
    assert read_split(tmp_path / "splits/split.json").films["test"] == 8
    drawn = ["data", "split", "--data", str(data), "--out", str(tmp_path / "own"), "--val", "0.1", "--test", "0.2"]
    assert CliRunner().invoke(app, drawn).exit_code == 0
    assert dict(read_split(tmp_path / "own/split.json").films) == {"train": 28, "val": 4, "test": 8}


def test_a_development_split_of_a_split_leaves_its_test_films_out(manifest: Manifest) -> None:
    split = random_split(manifest, seed=3)
    development = development_split(manifest, of=split)
    inside = {patient for members in development.patients.values() for patient in members}
    assert inside == {*split.patients["train"], *split.patients["val"]} and not inside & {*split.patients["test"]}
    assert all(development.films[name] > 0 for name in ("train", "val", "test"))
    assert development.method["of"] == split.hash

"""``afire data check``: exit codes and what is shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from afire.cli import app
from afire.data.manifest import read_manifest, write_manifest
from afire.data.splits import random_split, write_split
from tests import commands
from tests.data.audit.drawing import draw_set


def check(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["data", "check", "--workers", "1", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    split = np.where(np.arange(60) < 36, "train", "test")
    manifest = draw_set(tmp_path / "films", 60, split=split, **{"label:A": (np.arange(60) // 2 % 2).astype(float)})
    write_manifest(manifest, tmp_path / "films.csv")
    return tmp_path / "films.csv"


def test_a_clean_set_exits_with_0_and_writes_all_files(clean: Path, tmp_path: Path) -> None:
    code, output = check("--data", clean, "--out", tmp_path / "audit")
    assert code == 0
    assert "Nothing was found that invalidates results." in output
    assert "audit.html" in output
    names = {path.name for path in (tmp_path / "audit").iterdir()}
    assert names == {"audit.html", "audit.json", "offenders.csv", "measurements.parquet"}


def test_quiet_says_nothing_about_a_clean_set(clean: Path, tmp_path: Path) -> None:
    assert check("--data", clean, "--out", tmp_path / "audit", "--quiet") == (0, "")


def test_an_error_exits_with_1_and_is_named(clean: Path, tmp_path: Path) -> None:
    (tmp_path / "films" / "film003.png").write_bytes(b"truncated")
    code, output = check("--data", clean, "--out", tmp_path / "audit")
    assert code == 1
    assert "1 film cannot be read" in output
    assert json.loads((tmp_path / "audit" / "audit.json").read_text())["invalid"] is True


def test_warnings_fail_only_when_strict(clean: Path, tmp_path: Path) -> None:
    films = tmp_path / "films"
    (films / "film001.png").write_bytes((films / "film000.png").read_bytes())
    arguments = ("--data", clean, "--out", tmp_path / "audit")
    assert check(*arguments)[0] == 0
    assert check(*arguments, "--strict")[0] == 1


def test_a_split_file_takes_the_place_of_the_manifests_split(tmp_path: Path) -> None:
    # Everyone has a film in both parts of the manifest's split; the split file keeps patients together.
    split = np.where(np.arange(60) % 2 == 0, "train", "test")
    manifest = draw_set(tmp_path / "films", 60, split=split, **{"label:A": (np.arange(60) // 2 % 2).astype(float)})
    write_manifest(manifest, tmp_path / "films.csv")
    write_split(random_split(manifest, 0.1, 0.3, 0), tmp_path / "split.json")
    code, output = check("--data", tmp_path / "films.csv", "--out", tmp_path / "a")
    assert code == 1
    assert "30 patients have films in more than one split" in output
    code, output = check("--data", tmp_path / "films.csv", "--out", tmp_path / "b", "--split", tmp_path / "split.json")
    assert code == 0


def test_a_folder_is_a_set_without_labels(clean: Path, tmp_path: Path) -> None:
    code, output = check("--data", tmp_path / "films", "--out", tmp_path / "audit")
    assert code == 0
    assert "pre-training" in output


def test_a_folder_with_a_manifest_is_read_by_it(clean: Path, tmp_path: Path) -> None:
    manifest = read_manifest(clean)
    write_manifest(manifest, tmp_path / "films" / "manifest.parquet")
    Image.new("L", (96, 96)).save(tmp_path / "films" / "mask.png")
    assert check("--data", tmp_path / "films", "--out", tmp_path / "audit")[0] == 0
    counts = json.loads((tmp_path / "audit" / "audit.json").read_text())["counts"]
    assert (counts["films"], counts["splits"]) == (60, {"train": 36, "test": 24})


def test_a_users_mistake_exits_with_2(tmp_path: Path) -> None:
    ended = commands.run("data", "check", "--data", "gone.csv", "--out", "audit", folder=tmp_path, expect=2)
    assert "gone.csv does not exist" in ended.stderr
    assert not (tmp_path / "audit").exists()

"""The commands embed, probe and compare from the outside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from afire.cli import app
from afire.errors import UserError
from tests import commands
from tests.tasks.conftest import SMALLEST

ENCODER = ["--preset", "tiny", *(word for setting in SMALLEST for word in ("--set", setting))]


def afire(*words: object) -> str:
    """Run a command in this process; its output, or the message it ended with."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, UserError):
        return f"error: {result.exception}"
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


def probe(packed: Path, out: Path, *words: object, weights: str = "sharpness") -> str:
    return afire("probe", "--weights", weights, "--data", packed, "--out", out, "--no-cache", "--seeds", "0,1", *words)


@pytest.mark.slow
def test_probe_writes_a_whole_result_and_does_not_write_over_it(packed: Path, tmp_path: Path) -> None:
    shown = probe(packed, tmp_path / "r", *ENCODER, "--labels", "Blob", weights="random")
    assert "AUC" in shown and "random weights" in shown
    names = {path.name for path in (tmp_path / "r").iterdir()}
    assert names == {
        "result.json",
        "result.md",
        "predictions.parquet",
        *(f"{stem}.{kind}" for stem in ("roc", "calibration") for kind in ("png", "pdf")),
    }
    raw = json.loads((tmp_path / "r" / "result.json").read_text())
    assert raw["task"] == "probe" and len(raw["runs"]) == 2 and raw["config"]["encoder"]["width"] == 16
    assert str(tmp_path) not in json.dumps(raw["environment"])
    assert "already holds a result" in probe(packed, tmp_path / "r")
    probe(packed, tmp_path / "r", "--force", "--quiet")
    assert json.loads((tmp_path / "r" / "result.json").read_text())["weights"]["name"] == "sharpness only"


@pytest.mark.parametrize("command", ["probe", "embed", "finetune"])
def test_a_packed_film_that_was_altered_is_named(packed: Path, tmp_path: Path, command: str) -> None:
    shutil.copytree(packed, tmp_path / "pack")
    images = np.load(tmp_path / "pack/images.npy", mmap_mode="r+")
    images[100, 3, 3] ^= 1  # a film of the test subset, which no training would read
    images.flush()
    words = [command, "--weights", "random", "--data", tmp_path / "pack", *ENCODER, "--out", tmp_path / "out.parquet"]
    words += {"probe": ["--no-cache"], "embed": [], "finetune": ["--set", "training.epochs=1"]}[command]
    assert "the pixels of film100.png (row 100) are not those that were packed" in afire(*words)
    assert not (tmp_path / "out.parquet/result.json").exists()


def test_fractions_have_their_own_folders(packed: Path, tmp_path: Path) -> None:
    shown = probe(packed, tmp_path / "r", "--fraction", "30,100", "--labels", "Blob", "--name", "mine")
    assert "30 %" in shown and "mine" in shown
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"30pct", "100pct"}


@pytest.mark.slow
def test_compare_prints_and_writes_tables(packed: Path, tmp_path: Path) -> None:
    for weights in ("sharpness", "metadata"):
        probe(packed, tmp_path / weights, "--quiet", weights=weights)
    results = tmp_path / "sharpness", tmp_path / "metadata"
    shown = afire("compare", *results, "--out", tmp_path / "tables")
    assert "metadata only" in shown and "p paired" in shown
    names = {path.name for path in (tmp_path / "tables").iterdir()}
    assert names == {"comparison.md", "comparison.tex", "labels.png", "labels.pdf"}
    assert "| metadata only (linear) |" in (tmp_path / "tables" / "comparison.md").read_text(encoding="utf-8")
    probe(packed, tmp_path / "other", "--quiet", "--seeds", "5")
    assert "error: " in afire("compare", results[0], tmp_path / "other")
    assert "note: " in afire("compare", results[0], tmp_path / "other", "--allow-different-splits")


def test_embed_writes_features_of_a_part(packed: Path, tmp_path: Path) -> None:
    words = ["embed", "--weights", "random", "--data", packed, *ENCODER, "--part", "test"]
    shown = afire(*words, "--out", tmp_path / "f.parquet")
    assert "30 x 16 features (mean)" in shown
    assert set(pd.read_parquet(tmp_path / "f.parquet")["split"]) == {"test"}
    assert "already exists" in afire(*words, "--out", tmp_path / "f.parquet")
    assert "lists no val films" in afire(*words[:-1], "val", "--out", tmp_path / "g.parquet")
    assert ".parquet or .npz" in afire(*words, "--out", tmp_path / "g.txt")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0,x"], "not a list of whole numbers"),
        (["--seeds", "-1"], "not a list of whole numbers"),
        (["--fraction", "0"], "percentages above 0"),
        (["--fraction", "ten"], "percentages above 0"),
        (["--labels", "Blub"], "did you mean Blob"),
        (["--split", "nothing.json"], "does not exist"),
    ],
)
def test_mistakes_are_messages_and_leave_nothing(packed: Path, tmp_path: Path, words: list[str], message: str) -> None:
    assert message in probe(packed, tmp_path / "r", *words)
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_weights_that_are_not_there_end_with_code_2(packed: Path, tmp_path: Path) -> None:
    words = ["probe", "--weights", "runs/none", "--data", str(packed), "--out", str(tmp_path / "r")]
    assert commands.run(*words, expect=2).stderr.startswith("error: weights runs/none do not exist")

"""``afire figure`` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from afire.cli import app
from afire.cli.figure import parse_named
from afire.errors import UserError
from tests import commands
from tests.figure_parts import draw_boxed_pack, make_run


def test_names_of_weights(tmp_path: Path) -> None:
    named = parse_named(["K 64=runs/a", "random", "runs/nih", "hf://me/model", "./a=b/c"])
    assert named == {
        "K 64": "runs/a",
        "random": "random",
        "nih": "runs/nih",
        "hf://me/model": "hf://me/model",
        "c": "./a=b/c",
    }
    (tmp_path / "x=y").mkdir()
    assert parse_named([str(tmp_path / "x=y")]) == {"x=y": str(tmp_path / "x=y")}
    with pytest.raises(UserError, match="two of them are called 'nih'"):
        parse_named(["runs/nih", "old/nih"])
    with pytest.raises(UserError, match="names nothing"):
        parse_named(["a="])


@pytest.mark.slow
def test_a_figure_from_the_command_line(tmp_path: Path) -> None:
    data, run = draw_boxed_pack(tmp_path), make_run(tmp_path / "run")
    words = ["figure", "tsne", "--weights", f"ours={run}", "--weights", "random", "--data", data, "--device", "cpu"]
    words += ["--perplexity", 5, "--neighbours", "2,4", "--films", 30, "--seed", 3, "--out", tmp_path / "t"]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "silhouette" in done.output and "t.json" in done.output.replace("\n", "")
    record = json.loads((tmp_path / "t.json").read_text())
    assert record["settings"]["neighbours"] == [2, 4] and record["data"]["seed"] == 3
    assert {path.name for path in tmp_path.glob("t.*")} == {"t.png", "t.pdf", "t.json"}


def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    done = commands.run("figure", "auc", "--results", tmp_path / "none", "--out", tmp_path / "auc", expect=2)
    assert done.stderr.startswith("error: ") and "does not exist" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_list_that_is_none(tmp_path: Path) -> None:
    words = ["figure", "tsne", "--weights", "random", "--data", "x", "--out", "y", "--neighbours", "5,many"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UserError) and "5,10,20" in str(done.exception)

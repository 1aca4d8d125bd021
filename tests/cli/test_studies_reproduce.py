"""``afire reproduce`` as users start it: planned, killed in the middle, started again, and what it then says."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from afire.cli import app
from afire.files import read_json
from tests import commands

SMALL = ["--films", "60", "--set", "image.size=64", "--set", "training.batch_size=8", "--set", "run.picture_epochs=0"]


def arguments(out: Path, target: str, *extra: str) -> list[str]:
    return ["reproduce", target, "--on", "phantom", "--out", str(out), *SMALL, *extra]


def checkpoints(out: Path) -> int:
    return len(list((out / "pretrain-0" / "checkpoints").glob("step-*")))


@pytest.mark.slow
def test_killed_and_started_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = arguments(out, "fig-restore", "--set", "training.epochs=20")
    command = commands.start(*words)
    command.wait_until(lambda: checkpoints(out) > 0, seconds=240)
    command.kill()
    done = {name: (out / "steps" / f"{name}.json").read_text() for name in ("films", "pack")}
    assert read_json(out / "steps" / "pretrain-0.json")["state"] == "begun"

    again = commands.run(*words)
    assert "[1/4] films: done before" in again.stderr and "[3/4] pretrain-0 goes on" in again.stderr
    assert {name: (out / "steps" / f"{name}.json").read_text() for name in done} == done
    steps = [line.split(",")[0] for line in (out / "pretrain-0" / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in steps if line == '{"step": 1']) == 1  # not begun anew
    page = (out / "reproduce.md").read_text()
    assert "Research software, not a medical device." in page
    assert "![restorations](figures/restorations.png)" in page and (out / "figures" / "restorations.png").exists()
    assert "81,117 normal films of MIMIC-CXR-JPG" in page and "epochs 800" in page
    assert "afire pretrain --data" in page
    assert "protocol differences" in again.stdout


def test_the_plan_of_everything_runs_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, arguments(out, "all", "--plan"))
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("afire ")]
    assert len(lines) == 17 and len([line for line in lines if line.startswith("afire pretrain ")]) == 2
    assert not out.exists()


def test_real_films_that_are_not_there(tmp_path: Path) -> None:
    ended = commands.run("reproduce", "table3", "--on", "nih", "--out", tmp_path / "out", expect=2)
    assert "afire data build nih" in ended.stderr


def test_a_target_that_a_set_cannot_have(tmp_path: Path) -> None:
    from afire.errors import UserError

    with pytest.raises(UserError, match="fig-cam cannot be run on childcxr: ChildCXR has no lesion boxes"):
        CliRunner().invoke(
            app, ["reproduce", "fig-cam", "--on", "childcxr", "--out", str(tmp_path)], catch_exceptions=False
        )

"""``afire ablate`` as users start it: planned, killed, started again, with a row that fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from afire.cli import app
from afire.files import read_json
from tests import commands
from tests.studies.conftest import SMALLEST, draw_pack


def arguments(data: Path, out: Path, rows: str, *extra: str) -> list[str]:
    settings = [word for setting in SMALLEST for word in ("--set", setting)]
    words = ["--data", str(data), "--out", str(out), "--rows", rows, "--seeds", "0", "--preset", "tiny", "--jobs", "1"]
    return ["ablate", *words, *settings, *extra]


def newest_step(trial: Path) -> int:
    steps = [int(path.name.removeprefix("step-")) for path in (trial / "run" / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def timed(trial: Path) -> dict[int, float]:
    """Films a second noted at each step: no two trainings would note the same."""
    rates = {}
    for line in (trial / "run" / "metrics.jsonl").read_text().splitlines():
        if line.endswith("}") and "images_per_second" in (record := json.loads(line)):
            assert record["step"] not in rates, "a step is noted twice"
            rates[record["step"]] = record["images_per_second"]
    return rates


@pytest.mark.slow
def test_killed_and_started_again(tmp_path: Path) -> None:
    data, out = draw_pack(tmp_path / "films", 48), tmp_path / "out"
    (tmp_path / "long.yaml").write_text("title: long\nsettings: {training: {epochs: 40}}\n")
    (tmp_path / "bad.yaml").write_text("title: bad\nsettings: {training: {learning_rate: 1.0e+30, epochs: 3}}\n")
    long, bad = str(tmp_path / "long.yaml"), str(tmp_path / "bad.yaml")

    def trial(name: str) -> Path:
        return next((out / "trials").glob(f"{name}-seed0-*"), out / "none")

    # The whole command is gone at once, in the middle of the second trial.
    command = commands.start(*arguments(data, out, long))
    command.wait_until(lambda: newest_step(trial("long")) >= 5)
    command.kill()
    finished = (trial("full") / "trial.json").stat().st_mtime_ns
    saved = newest_step(trial("long"))
    before = timed(trial("long"))
    assert saved >= 5 and not (trial("long") / "trial.json").exists()

    last = commands.run(*arguments(data, out, f"{long},head-shared,{bad}"), expect=1)
    assert "3 different trials, 1 finished; 2 to run" in last.stderr
    assert re.search(r"failed: bad, seed 0: .*not finite.*exit code 2", last.stderr)
    assert (trial("full") / "trial.json").stat().st_mtime_ns == finished
    after = timed(trial("long"))
    kept = {step for step in before if step <= saved}
    assert len(kept) == saved and all(after[step] == before[step] for step in kept)  # not trained again
    assert sorted(after) == list(range(1, max(after) + 1)) and max(after) % 40 == 0

    table = read_json(out / "table.json")
    assert [row["row"] for row in table["rows"]] == ["full", "long", "head-shared"]
    assert table["rows"][2]["auc_mean"] == table["rows"][0]["auc_mean"]
    assert any("not finished, so not in the table: bad" in note for note in table["notes"])
    assert all((out / name).exists() for name in ("table.md", "table.tex", "table.csv", "ablation.png", "ablation.pdf"))


def test_the_plan_runs_nothing(tmp_path: Path) -> None:
    data, out = draw_pack(tmp_path / "films", 48), tmp_path / "out"
    result = CliRunner().invoke(app, arguments(data, out, "no-category,head-shared", "--plan"))
    assert result.exit_code == 0, result.output
    assert "2 trials, 2 to run, 1 side by side: about" in result.output and "head-shared" in result.output
    assert not out.exists()


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    ended = commands.run(*arguments(tmp_path / "nothing", tmp_path / "out", "no-categry"), expect=2)
    assert "did you mean no-category?" in ended.stderr

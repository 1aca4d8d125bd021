"""``afire ablate`` as users start it: planned, killed, started again, with a row that fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from afire.cli import app
from afire.files import read_json
from tests.studies.conftest import SMALLEST, draw_pack

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def arguments(data: Path, out: Path, rows: str, *extra: str) -> list[str]:
    settings = [word for setting in SMALLEST for word in ("--set", setting)]
    words = ["--data", str(data), "--out", str(out), "--rows", rows, "--seeds", "0", "--preset", "tiny", "--jobs", "1"]
    return ["ablate", *words, *settings, *extra]


def start(words: list[str], until: Callable[[], bool]) -> subprocess.Popen[str]:
    """The command in another process, seen to the point where ``until`` holds."""
    command = [sys.executable, "-m", "afire", *words]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not until():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def newest_step(trial: Path) -> int:
    steps = [int(path.name.removeprefix("step-")) for path in (trial / "run" / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def timed(trial: Path) -> dict[int, float]:
    """Films a second noted at each step: no two trainings would note the same."""
    found = {}
    for line in (trial / "run" / "metrics.jsonl").read_text().splitlines():
        if line.endswith("}") and "images_per_second" in (record := json.loads(line)):
            assert record["step"] not in found, "a step is noted twice"
            found[record["step"]] = record["images_per_second"]
    return found


@pytest.mark.slow
def test_killed_and_started_again(tmp_path: Path) -> None:
    data, out = draw_pack(tmp_path / "films", 48), tmp_path / "out"
    (tmp_path / "long.yaml").write_text("title: long\nsettings: {training: {epochs: 40}}\n")
    (tmp_path / "bad.yaml").write_text("title: bad\nsettings: {training: {learning_rate: 1.0e+30, epochs: 3}}\n")
    long, bad = str(tmp_path / "long.yaml"), str(tmp_path / "bad.yaml")

    def trial(name: str) -> Path:
        return next((out / "trials").glob(f"{name}-seed0-*"), out / "none")

    # The whole command is gone at once, in the middle of the second trial.
    process = start(arguments(data, out, long), lambda: newest_step(trial("long")) >= 5)
    process.kill()
    process.communicate()
    finished = (trial("full") / "trial.json").stat().st_mtime_ns
    saved = newest_step(trial("long"))
    before = timed(trial("long"))
    assert saved >= 5 and not (trial("long") / "trial.json").exists()

    words = arguments(data, out, f"{long},head-shared,{bad}")
    last = subprocess.run([sys.executable, "-m", "afire", *words], env=ENVIRONMENT, capture_output=True, text=True)
    assert last.returncode == 1, last.stderr[-3000:]
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
    command = [sys.executable, "-m", "afire", *arguments(tmp_path / "nothing", tmp_path / "out", "no-categry")]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 2 and "did you mean no-category?" in result.stderr and "Traceback" not in result.stderr

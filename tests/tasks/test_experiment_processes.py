"""Runs as users start them: killed, stopped by a signal, on two processes. What goes on is compared bit by bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from afire.tasks.finetune import run_finetune
from afire.tasks.segment import run_segment
from afire.tasks.settings import load_task_config
from tests import commands
from tests.tasks.drawn import MODEL, QUICK, draw_spots, experiment

pytestmark = pytest.mark.slow

# A checkpoint after every step, so that a kill lands anywhere in an epoch; slow enough to be hit.
EVERY_STEP = ["run.checkpoint_minutes=1e-9", "run.keep_checkpoints=2"]
LONG = [*QUICK, "training.epochs=15", "training.patience=100", "training.learning_rate=2e-3", "augment.rotation=30"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_spots(tmp_path_factory.mktemp("spots"))


def words(task: str, pack: Path, out: Path, settings: list[str]) -> list[str]:
    chosen = [word for setting in [*MODEL, *settings] for word in ("--set", setting)]
    asked = ["--weights", "random", "--preset", "tiny", "--seeds", "0", "--device", "cpu", *chosen]
    return [task, "--data", str(pack), "--out", str(out), *asked]


def newest_step(run: Path) -> int:
    steps = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def assert_same(first: Path, second: Path) -> None:
    one, two = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    with np.load(first / "answers.npz") as a, np.load(second / "answers.npz") as b:
        assert all(np.array_equal(a[subset], b[subset]) for subset in ("val", "test"))
    assert lines(first) == lines(second)


def lines(run: Path) -> list[dict[str, object]]:
    """All numbers but those of speed; none twice, none missing."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in ("images_per_second", "data_wait")} for record in records]


def test_a_killed_fine_tuning_ends_bit_identical(packed: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    config = load_task_config("finetune", overrides=LONG)
    list(run_finetune(experiment(packed, whole), config))
    command = commands.start(*words("finetune", packed, killed, [*LONG, *EVERY_STEP]))
    command.wait_until(lambda: newest_step(killed / "seed-0") >= 7)  # two updates an epoch: within one
    command.kill()
    assert not (killed / "seed-0/summary.json").exists()
    list(run_finetune(experiment(packed, killed, resume=True), config))
    assert_same(whole / "seed-0", killed / "seed-0")


def test_a_stopped_segmentation_says_so_and_ends_bit_identical(packed: Path, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    config = load_task_config("segment", overrides=LONG)
    list(run_segment(experiment(packed, whole), config))
    log = stopped / "seed-0/metrics.jsonl"
    begun = [*LONG, "run.checkpoint_epochs=0"]
    command = commands.start(*words("segment", packed, stopped, begun))
    command.wait_until(lambda: log.exists() and log.stat().st_size > 0)
    command.send(signal.SIGTERM)
    ended = command.end()
    assert ended.code == 128 + signal.SIGTERM, ended.stderr[-3000:]
    assert "add --resume to go on" in ended.stderr and "Traceback" not in ended.stderr
    assert newest_step(stopped / "seed-0") > 0 and not (stopped / "result.json").exists()
    list(run_segment(experiment(packed, stopped, resume=True), config))
    assert_same(whole / "seed-0", stopped / "seed-0")


def test_two_processes_equal_one(packed: Path, tmp_path: Path) -> None:
    """With unknown labels, of which the two processes have different numbers in a step."""
    one, two = tmp_path / "one", tmp_path / "two"
    settings = [*QUICK, "training.epochs=4", "labels=[Spot, Doubt]", "class_weights=balanced"]
    list(run_finetune(experiment(packed, one), load_task_config("finetune", overrides=settings)))
    commands.run_processes(2, *words("finetune", packed, two, settings))
    assert (two / "result.json").exists() and (two / "roc.png").exists()
    for first, second in zip(lines(one / "seed-0"), lines(two / "seed-0"), strict=True):
        assert first["step"] == second["step"]
        for name in {"loss", "gradient_norm", "learning_rate"} & first.keys():
            assert first[name] == pytest.approx(second[name], rel=1e-3, abs=1e-5)
    weights = [load_file(out / "seed-0/model.safetensors") for out in (one, two)]
    for key, value in weights[0].items():
        if not key.endswith("qkv.bias"):  # softmax does not feel the bias of the keys: Adam makes its noise large
            torch.testing.assert_close(value, weights[1][key], rtol=1e-3, atol=5e-5)
    answers = [np.load(out / "seed-0/answers.npz") for out in (one, two)]
    for subset in ("val", "test"):
        np.testing.assert_allclose(answers[0][subset], answers[1][subset], atol=1e-4)

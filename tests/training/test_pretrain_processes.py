"""Runs as users start them: killed, stopped by signals, on two processes, with one that dies."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from afire.files import folder_lock
from tests import commands
from tests.training.conftest import SMALLEST

pytestmark = pytest.mark.slow

# A checkpoint after every step, so that a kill lands anywhere in an epoch.
EVERY_STEP = ["run.checkpoint_minutes=1e-9"]


def words(pack: Path, out: Path, *extra: str, settings: tuple[str, ...] = ()) -> list[str]:
    chosen = [word for setting in [*SMALLEST, *settings] for word in ("--set", setting)]
    return ["pretrain", "--data", str(pack), "--out", str(out), "--preset", "tiny", *chosen, *extra]


def final(out: Path) -> dict[str, torch.Tensor]:
    newest = sorted((out / "checkpoints").glob("step-*"))[-1]
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
    tensors = load_file(newest / "model.safetensors")
    tensors |= {f"optimizer {key}": value for key, value in load_file(newest / "optimizer.safetensors").items()}
    return tensors


def checkpoint_count(out: Path) -> int:
    return len(list((out / "checkpoints").glob("step-*")))


LONG = ("training.epochs=12", "run.keep_checkpoints=1000", *EVERY_STEP)


def test_killed_runs_end_bit_identical(packed: Path, tmp_path: Path) -> None:
    commands.run(*words(packed, tmp_path / "whole", settings=LONG))
    killed = tmp_path / "killed"
    for goal in (2, 14, 25):
        command = commands.start(*words(packed, killed, *(["--resume"] if goal > 2 else []), settings=LONG))
        command.wait_until(lambda goal=goal: checkpoint_count(killed) >= goal)  # type: ignore[misc]
        assert command.kill().code == -signal.SIGKILL
    commands.run(*words(packed, killed, "--resume", settings=LONG))
    expected, found = final(tmp_path / "whole"), final(killed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    steps = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if "total" in record] == list(range(1, 37))  # none twice, none missing


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("more", [[], ["--resume"], ["--resume", "--force"]], ids=" ".join)
def test_a_second_command_on_a_run_is_refused_and_changes_nothing(
    packed: Path, tmp_path: Path, more: list[str]
) -> None:
    out, settings = tmp_path / "run", ("training.epochs=2", *EVERY_STEP)
    first = commands.start(*words(packed, out, settings=settings))
    first.wait_until((out / "config.yaml").exists)
    first.send(signal.SIGSTOP)
    before = content(out)
    second = commands.run(*words(packed, out, *more, settings=settings), expect=2)
    assert f"error: another process is writing the run in {out}; wait for it or choose another folder." in second.stderr
    assert content(out) == before
    first.send(signal.SIGCONT)
    assert first.end().code == 0
    commands.run(*words(packed, tmp_path / "alone", settings=settings))
    expected, found = final(tmp_path / "alone"), final(out)
    assert all(torch.equal(expected[key], found[key]) for key in expected) and not list(out.rglob(".lock"))


def test_a_killed_command_leaves_no_lock_behind(packed: Path, tmp_path: Path) -> None:
    command = commands.start(*words(packed, tmp_path / "run", settings=LONG))
    command.wait_until(lambda: checkpoint_count(tmp_path / "run") > 0)
    command.kill()
    assert (tmp_path / "run/.lock").exists(), "the file is left, but nobody holds it"
    commands.run(*words(packed, tmp_path / "run", "--resume", settings=LONG))
    assert not (tmp_path / "run/.lock").exists()


def test_a_second_run_of_two_processes_is_refused_on_both(packed: Path, tmp_path: Path) -> None:
    with folder_lock(tmp_path / "run", "it"):
        ended = commands.run_processes(2, *words(packed, tmp_path / "run"), expect=2)
    assert "another process is writing the run in" in ended[0].stderr
    assert "the first process could not write in its run folder" in ended[1].stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_says_so_and_can_be_resumed(packed: Path, tmp_path: Path, number: signal.Signals) -> None:
    settings = ("training.epochs=2000", "run.checkpoint_epochs=0")
    command = commands.start(*words(packed, tmp_path / "run", settings=settings))
    log = tmp_path / "run/metrics.jsonl"
    command.wait_until(lambda: log.exists() and log.stat().st_size > 0)
    command.send(number)
    ended = command.end()
    assert ended.code == 128 + number and "add --resume to go on" in ended.stderr and "Traceback" not in ended.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "stopped"
    saved = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    assert [path.name for path in saved] == [f"step-{summary['step']:08d}"]


def test_two_processes_equal_one(packed: Path, tmp_path: Path) -> None:
    settings = ("training.epochs=3", "losses.lesion=0.5", "lesions.views=2")
    commands.run(*words(packed, tmp_path / "one", settings=settings))
    commands.run_processes(2, *words(packed, tmp_path / "two", settings=settings))
    one, two = final(tmp_path / "one"), final(tmp_path / "two")
    for key in one:
        if key.startswith("optimizer"):
            continue
        if key.endswith("qkv.bias"):
            # Softmax does not feel the bias of the keys: its gradient is rounding noise, which Adam makes large.
            for tensors in (one, two):
                query, _, value = tensors[key].chunk(3)
                tensors[key] = torch.cat([query, value])
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}")
    for first, second in zip(*(losses(tmp_path / name) for name in ("one", "two")), strict=True):
        assert first == pytest.approx(second, rel=1e-4, abs=1e-5)
    assert json.loads((tmp_path / "two/summary.json").read_text())["processes"] == 2


def test_a_run_goes_on_on_another_number_of_processes(packed: Path, tmp_path: Path) -> None:
    settings = ("training.epochs=4", "run.keep_checkpoints=100")
    commands.run(*words(packed, tmp_path / "whole", settings=settings))
    shutil.copytree(tmp_path / "whole", tmp_path / "moved")
    for newest in sorted((tmp_path / "moved/checkpoints").glob("step-*"))[2:]:
        shutil.rmtree(newest)
    commands.run_processes(2, *words(packed, tmp_path / "moved", "--resume", settings=settings))
    summary = json.loads((tmp_path / "moved/summary.json").read_text())
    assert summary["epoch"] == 4 and summary["processes"] == 2
    for first, second in zip(*(losses(tmp_path / name) for name in ("whole", "moved")), strict=True):
        assert first == pytest.approx(second, rel=1e-3, abs=1e-4)
    rates = [
        json.loads(line).get("learning_rate") for line in (tmp_path / "moved/metrics.jsonl").read_text().splitlines()
    ]
    assert [rate for rate in rates if rate][-1] == pytest.approx(1e-6)


def losses(out: Path) -> list[list[float]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("structure", "category", "restoration", "lesion", "total")
    return [[record[name] for name in names] for record in records if "total" in record]


def test_two_processes_resume_bit_identical(packed: Path, tmp_path: Path) -> None:
    settings = ("training.epochs=4", "run.keep_checkpoints=100")
    commands.run_processes(2, *words(packed, tmp_path / "whole", settings=settings))
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for newest in sorted((tmp_path / "part/checkpoints").glob("step-*"))[2:]:
        (newest / "model.safetensors").unlink()  # as if the run had died while writing these
    commands.run_processes(2, *words(packed, tmp_path / "part", "--resume", settings=settings))
    expected, found = final(tmp_path / "whole"), final(tmp_path / "part")
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_a_process_that_dies_ends_the_others(packed: Path, tmp_path: Path) -> None:
    """With torchrun itself, which the other tests of two processes do without."""
    settings = ("training.epochs=100000", "run.checkpoint_epochs=0")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "afire"),
            *words(packed, tmp_path / "run", settings=settings),
        ],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        log, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 120
        while not (log.exists() and log.stat().st_size > 0):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        assert len(workers) >= 2
        os.kill(int(workers[-1]), signal.SIGKILL)
        _, written = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert "another process of this run ended" in written or "Signal 9" in written


def limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))


def test_a_full_disk_is_a_sentence_and_the_checkpoint_before_stays(packed: Path, tmp_path: Path) -> None:
    """A limit on file size stands in for the full disk: the system refuses the write in the middle of it."""
    out = tmp_path / "run"
    commands.run(*words(packed, out, settings=("training.epochs=1",)))
    before = sorted(path.name for path in (out / "checkpoints").iterdir())
    more = words(packed, out, "--resume", "--force", settings=("training.epochs=2",))
    ended = commands.run(*more, before=limit_file_size, expect=2)
    assert "cannot write the checkpoint" in ended.stderr and f"{before[-1]} is whole" in ended.stderr
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == before

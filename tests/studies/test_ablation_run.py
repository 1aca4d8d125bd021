"""Trials in processes: stopped politely, ended with their parent, and told about when they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afire.config import Config
from afire.files import write_json
from afire.studies import ablation_run as ablate_run
from afire.studies import steps
from afire.studies.ablation_grid import LOG, TRIAL, Trial, choose_rows, open_study, plan_trials
from afire.studies.ablation_run import CLOCK, TrialClock, Workers, plan_workers, run_trials
from afire.studies.steps import Event, Outcome

# Stands in for a trial: waits to be asked to stop, then saves and ends as a trial does.
WAITS = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def save(number, frame):
    (folder / "saved").touch()
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
(folder / "ready").touch()
time.sleep(60)
"""
FAILS = "print('first words'); print('error: no such film.'); raise SystemExit(2)"


@pytest.fixture
def trials(packed: Path, smallest: Callable[..., Config], tmp_path: Path) -> Any:
    study = open_study(packed, tmp_path / "out", smallest())
    return study, plan_trials(study, choose_rows("no-category,no-structure"), [0])


def stand_in(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let every trial run ``program`` instead."""
    popen = subprocess.Popen

    def replaced(command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", program, command[-1]], **options)

    monkeypatch.setattr(steps.subprocess, "Popen", replaced)


def run(study: Any, trials: list[Trial], jobs: int) -> tuple[Outcome, list[Event]]:
    told: list[Event] = []
    return run_trials(study, trials, Workers(jobs, 1, "cpu"), told.append), told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_trials_save(
    trials: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    study, planned = trials
    stand_in(monkeypatch, WAITS)

    def ask() -> None:
        deadline = time.monotonic() + 30
        while not all((trial.folder / "ready").exists() for trial in planned[:2]) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=ask).start()
    outcome, told = run(study, planned, 2)
    assert outcome.signal == number and not outcome.seconds and not outcome.failed
    assert [event.kind for event in told] == ["start", "start"]
    assert [(trial.folder / "saved").exists() for trial in planned] == [True, True, False]  # the third never began


def test_a_failing_trial_is_told_and_the_others_go_on(trials: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    study, planned = trials
    stand_in(monkeypatch, FAILS)
    for trial in planned[1:]:
        write_json(trial.folder / TRIAL, {"format": 1, "key": trial.key, "seconds": {"train": 7}})
    outcome, told = run(study, planned, 1)
    assert outcome.seconds == {"no-category, seed 0": 7, "no-structure, seed 0": 7}
    assert outcome.failed == {"full, seed 0": "no such film. (exit code 2)"}
    assert [event.kind for event in told] == ["start", "failed", "before", "before"]
    assert "first words" in (planned[0].folder / LOG).read_text()


def test_workers_follow_cores_and_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablate_run, "usable_cores", lambda: 8)
    monkeypatch.setattr(ablate_run, "_visible_gpus", lambda: ())
    assert plan_workers(None, 2, "auto", 20) == Workers(4, 2, "cpu")
    assert plan_workers(None, 2, "auto", 3).jobs == 3 and plan_workers(6, 2, "cpu", 20).jobs == 6
    monkeypatch.setattr(ablate_run, "_visible_gpus", lambda: ("2", "5"))
    assert plan_workers(None, 1, "auto", 20) == Workers(2, 1, "cuda", ("2", "5"))
    assert plan_workers(None, 1, "cpu", 20) == Workers(8, 1, "cpu")


def test_time_adds_up_over_starts(tmp_path: Path) -> None:
    write_json(tmp_path / CLOCK, {"train": 100.0})
    clock = TrialClock(tmp_path)
    with pytest.raises(RuntimeError), clock.stage("train"):
        raise RuntimeError
    with clock.stage("probe"):
        pass
    again = TrialClock(tmp_path).seconds()
    assert 100 <= again["train"] < 101 and 0 <= again["probe"] < 1
    (tmp_path / CLOCK).write_text("{")
    assert TrialClock(tmp_path).seconds() == {}


def test_time_is_written_while_a_stage_runs(tmp_path: Path) -> None:
    with TrialClock(tmp_path, between_writes=0.01).stage("train"):
        deadline = time.monotonic() + 10
        while not (tmp_path / CLOCK).exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)

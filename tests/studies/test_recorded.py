"""Steps: what is done is left alone, what was begun goes on, what fails stops only what needs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afire.errors import UserError
from afire.studies import steps as running
from afire.studies.recorded import PlannedStep, read_step, run_planned, step_hashes, step_path
from afire.studies.steps import Event, Outcome

# Stands in for afire: appends its words to a file, and does what the first of them says.
PROGRAM = """
import pathlib, signal, sys, time
lock, words = sys.argv[1], sys.argv[3:]
with open(pathlib.Path(lock).parent / "called", "a") as stream:
    stream.write(" ".join(words) + chr(10))
if words[0] == "fail":
    print("error: it cannot be.")
    sys.exit(2)
if words[0] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("waiting", flush=True)
    time.sleep(60)
if words[0] == "write":
    pathlib.Path(words[1]).write_text(words[2])
if words[0] == "meet":
    pathlib.Path(words[1]).touch()
    while not pathlib.Path(words[2]).exists():
        time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def replaced(command: list[str], **options: Any) -> Any:
        assert command[:3] == [sys.executable, "-m", "afire.studies.steps"] and command[4] == "afire"
        return popen([sys.executable, "-c", PROGRAM, *command[3:]], **options)

    monkeypatch.setattr(running.subprocess, "Popen", replaced)


def run(steps: list[PlannedStep], out: Path) -> tuple[Outcome, list[str]]:
    told: list[str] = []

    def report(event: Event) -> None:
        told.append(f"{event.step.name} {event.kind}")

    return run_planned(steps, out, report), told


def called(out: Path) -> list[str]:
    return (out / "steps" / "called").read_text().splitlines()


def test_finished_steps_are_left_alone(tmp_path: Path) -> None:
    first, second = PlannedStep("first", ("a",)), PlannedStep("second", ("b",), ("first",))
    assert run([first], tmp_path)[1] == ["first start", "first done"]
    outcome, told = run([first, second], tmp_path)
    assert told == ["first before", "second start", "second done"] and called(tmp_path) == ["a", "b"]
    assert list(outcome.seconds) == ["first", "second"]
    record = read_step(tmp_path, "first")
    assert record is not None and record.state == "done" and record.command == "afire a"


def test_a_failing_step_stops_only_what_needs_it(tmp_path: Path) -> None:
    steps = [PlannedStep("bad", ("fail",)), PlannedStep("after", ("a",), ("bad",)), PlannedStep("apart", ("b",))]
    outcome, told = run(steps, tmp_path)
    assert outcome.failed == {"bad": "it cannot be. (exit code 2)"} and outcome.skipped == {"after": "it needs bad"}
    assert list(outcome.seconds) == ["apart"] and told[-1] == "apart done"


def test_a_begun_step_goes_on_with_its_words(tmp_path: Path) -> None:
    step = PlannedStep("one", ("fail",), resume=("--resume",), resume_when=tmp_path / "config.yaml")
    for _ in range(2):
        run([step], tmp_path)
    assert called(tmp_path) == ["fail", "fail"]  # nothing to go on with yet
    (tmp_path / "config.yaml").touch()
    assert run([step], tmp_path)[1] == ["one resume", "one failed"]
    assert called(tmp_path)[-1] == "fail --resume"


def test_a_step_that_ended_just_before_it_could_say_so(tmp_path: Path) -> None:
    step = PlannedStep("one", ("fail",), complete=tmp_path / "detector.json")
    run([step], tmp_path)
    (tmp_path / "detector.json").touch()
    assert run([step], tmp_path)[1] == ["one done"] and called(tmp_path) == ["fail"]


def test_copies_are_kept_and_made_again(tmp_path: Path) -> None:
    table, kept = tmp_path / "table.json", tmp_path / "tables" / "one.json"
    step = PlannedStep("one", ("write", str(table), "1"), keeps=((table, kept),))
    run([step, PlannedStep("two", ("write", str(table), "2"))], tmp_path)
    assert kept.read_text() == "1" and table.read_text() == "2"
    kept.unlink()
    assert run([step], tmp_path)[1] == ["one resume", "one done"] and kept.read_text() == "1"


def test_what_a_step_made_may_be_gone_while_nothing_needs_it(tmp_path: Path) -> None:
    weights, result = tmp_path / "weights", tmp_path / "result"
    train = PlannedStep("train", ("write", str(weights), "1"), resume=("--resume",), makes=weights)
    probe = PlannedStep("probe", ("write", str(result), "2"), ("train",), makes=result)
    run([train, probe], tmp_path)
    weights.unlink()
    assert run([train, probe], tmp_path)[1] == ["train before", "probe before"] and not weights.exists()
    later = PlannedStep("later", ("a",), ("train",))
    assert run([train, probe, later], tmp_path)[1][:3] == ["train resume", "train done", "probe before"]
    assert weights.exists() and called(tmp_path)[-1] == "a"


def test_what_was_made_again_took_its_own_time(tmp_path: Path) -> None:
    result = tmp_path / "result"
    probe = PlannedStep("probe", ("write", str(result), "2"), makes=result)
    run([probe], tmp_path)
    first = read_step(tmp_path, "probe")
    assert first is not None
    replace(first, seconds=1000.0, processor_seconds=1000.0).write(tmp_path, "probe")
    result.unlink()
    assert run([probe], tmp_path)[1] == ["probe resume", "probe done"] and result.exists(), "nobody else has it"
    again = read_step(tmp_path, "probe")
    assert again is not None and again.state == "done" and again.seconds < 500


def test_another_command_or_other_films_are_refused(tmp_path: Path) -> None:
    film = tmp_path / "films.csv"
    film.write_text("a")
    step = PlannedStep("one", ("a", "--set", "epochs=3", "--data", str(film)), inputs=(film,))
    run([step], tmp_path)
    run([replace(step, machine=("--device", "cuda"))], tmp_path)  # another machine is no other study
    with pytest.raises(UserError, match=r"step one .* `epochs=3`, and would now be run with `epochs=4`"):
        run([replace(step, arguments=("a", "--set", "epochs=4", "--data", str(film)))], tmp_path)
    film.write_text("b")
    with pytest.raises(UserError, match="other films or weights"):
        run([step], tmp_path)
    assert called(tmp_path) == ["a --set epochs=3 --data " + str(film)]


def test_the_hash_follows_what_a_step_needs_but_not_where_it_lies(tmp_path: Path) -> None:
    def steps(out: Path, epochs: int) -> list[PlannedStep]:
        return [PlannedStep("a", ("a", f"epochs={epochs}")), PlannedStep("b", ("b", "--out", str(out / "b")), ("a",))]

    here, there = tmp_path / "here", tmp_path / "there"
    assert step_hashes(steps(here, 1), here) == step_hashes(steps(there, 1), there)
    assert step_hashes(steps(here, 1), here)["b"] != step_hashes(steps(here, 2), here)["b"]


def test_a_signal_ends_the_step_and_the_next_start_goes_on(tmp_path: Path) -> None:
    step = PlannedStep("long", ("wait",), resume=("--resume",))

    def ask() -> None:
        deadline = time.monotonic() + 30
        log = step_path(tmp_path, "long", "log")
        while not (log.exists() and "waiting" in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    outcome, told = run([step, PlannedStep("next", ("a",))], tmp_path)
    assert outcome.signal == signal.SIGTERM and not outcome.seconds and told == ["long start"]
    record = read_step(tmp_path, "long")
    assert record is not None and record.state == "begun" and record.seconds > 0


def test_a_truncated_step_file_is_none(tmp_path: Path) -> None:
    step_path(tmp_path, "a").parent.mkdir(parents=True)
    step_path(tmp_path, "a").write_text('{"format": 1, "sta')
    assert read_step(tmp_path, "a") is None


def test_what_a_step_took_is_written_down(tmp_path: Path) -> None:
    run([PlannedStep("first", ("a",))], tmp_path)
    record = read_step(tmp_path, "first")
    assert record is not None and record.processor_seconds > 0 and record.peak_bytes > 1_000_000


def test_steps_run_side_by_side(tmp_path: Path) -> None:
    """Two that wait for each other's file could never end one after the other."""
    files = [str(tmp_path / name) for name in ("here", "there")]
    steps = [PlannedStep("one", ("meet", *files)), PlannedStep("two", ("meet", *reversed(files)))]
    outcome = run_planned(steps, tmp_path, lambda event: None, jobs=2, environment={"OMP_NUM_THREADS": "1"})
    assert set(outcome.seconds) == {"one", "two"}

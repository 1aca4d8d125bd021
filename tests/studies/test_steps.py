"""The one runner of steps: side by side, in the order of their needs, each in a process that ends with its parent."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from afire.files import folder_lock
from afire.studies.steps import Command, Ended, Event, Step, log_steps, run_steps

# What the program of a test step does, by its second word.
PROGRAM = """
import os, pathlib, sys, time
folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / "begun").write_text(str(os.getpid()))
if what == "work":
    start = time.process_time()
    while time.process_time() < start + 0.4:
        pass
if what == "fail":
    print("error: no such film.")
    sys.exit(2)
if what == "meet":
    other = folder.parent / sys.argv[3] / "begun"
    deadline = time.monotonic() + 60
    while not other.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
if what == "wait":
    time.sleep(60)
(folder / "done").touch()
"""


class Program(Step):
    """A step whose process does one thing and leaves a file."""

    def __init__(self, out: Path, name: str, *words: str, needs: tuple[str, ...] = (), cost: float | None = None):
        self.name, self.needs, self.cost, self.words = name, needs, cost, words or ("nothing",)
        self.out, self.folder = out, out / name
        self.how: Ended | None = None

    def is_done(self) -> bool:
        return (self.folder / "done").exists()

    def command(self, slot: int) -> Command:
        self.folder.mkdir(parents=True, exist_ok=True)
        program = self.out / "program.py"
        program.write_text(PROGRAM)
        return Command((str(self.folder), *self.words), self.folder / "log", self.folder, module=str(program))

    def ended(self, how: Ended) -> bool:
        self.how = how
        return self.is_done()


def kinds(steps: list[Program], jobs: int = 1) -> list[str]:
    told: list[Event] = []
    run_steps(steps, told.append, jobs=jobs)
    return [f"{event.step.name} {event.kind}" for event in told]


def test_steps_run_side_by_side(tmp_path: Path) -> None:
    """Each of the two waits to see the other: one after the other they would never end."""
    pair = [Program(tmp_path, "a", "meet", "b"), Program(tmp_path, "b", "meet", "a")]
    assert sorted(kinds(pair, jobs=2)) == ["a done", "a start", "b done", "b start"]


def test_a_step_starts_after_what_it_needs_and_the_next_one_takes_its_place(tmp_path: Path) -> None:
    steps = [Program(tmp_path, "first", "meet", "apart"), Program(tmp_path, "second", needs=("first",))]
    told = kinds([*steps, Program(tmp_path, "apart")], jobs=2)
    assert told.index("apart start") < told.index("first done") < told.index("second start")


def test_failures_stop_only_what_needs_them(tmp_path: Path) -> None:
    steps = [Program(tmp_path, "bad", "fail"), Program(tmp_path, "after", needs=("bad",))]
    steps += [Program(tmp_path, "later", needs=("after",)), Program(tmp_path, "apart")]
    outcome = run_steps(steps, lambda _: None)
    assert outcome.failed == {"bad": "no such film. (exit code 2)"} and list(outcome.seconds) == ["apart"]
    assert outcome.skipped == {"after": "it needs bad", "later": "it needs after"}
    assert kinds(steps)[-1] == "apart before"  # a second start does not run it again


def test_the_time_of_each_process_is_its_own(tmp_path: Path) -> None:
    steps = [Program(tmp_path, "work", "work"), Program(tmp_path, "nothing")]
    run_steps(steps, lambda _: None, jobs=2)
    work, nothing = (step.how for step in steps)
    assert work is not None and nothing is not None and work.code == 0
    assert work.processor_seconds > 0.4 and work.processor_seconds - nothing.processor_seconds > 0.2


def test_time_left_follows_the_cost(tmp_path: Path) -> None:
    told: list[Event] = []
    steps = [Program(tmp_path, "one", "work", cost=1.0), Program(tmp_path, "three", cost=3.0)]
    run_steps(steps, told.append)
    assert steps[0].how is not None
    done = [event for event in told if event.kind == "done"]
    assert done[0].seconds_left == pytest.approx(3 * steps[0].how.seconds) and done[1].seconds_left is None
    told.clear()
    run_steps([Program(tmp_path / "b", "a", cost=1.0), Program(tmp_path / "b", "b")], told.append)
    assert all(event.seconds_left is None for event in told)  # of the second nobody knows


def test_lines_count_what_was_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps = [Program(tmp_path, "good"), Program(tmp_path, "bad", "fail"), Program(tmp_path, "after", needs=("bad",))]
    with caplog.at_level(logging.INFO, "afire"):
        run_steps(steps, log_steps(5, done=2))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "[3/5] good: done",
        "[4/5] bad failed: no such film. (exit code 2)",
        "[5/5] after skipped: it needs bad",
    ]


def test_a_killed_runner_takes_its_steps_with_it(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from tests.studies.test_steps import Program, run_steps; "
        "run_steps([Program(pathlib.Path(sys.argv[1]), 'long', 'wait')], lambda _: None)"
    )
    runner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    begun, deadline = tmp_path / "long" / "begun", time.monotonic() + 60
    while not (begun.exists() and begun.read_text()):
        assert runner.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child = int(begun.read_text())
    runner.kill()
    runner.wait()
    while _is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.kill(process, 0) is None


class Deaf(Program):
    """A step that will not hear of SIGTERM."""

    def command(self, slot: int) -> Command:
        command = super().command(slot)
        program = Path(command.module)
        program.write_text(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{PROGRAM}")
        return command


def test_what_does_not_end_is_made_to(tmp_path: Path) -> None:
    deaf, next_one = Deaf(tmp_path, "deaf", "wait"), Program(tmp_path, "next")

    def ask() -> None:
        deadline = time.monotonic() + 60
        while not (tmp_path / "deaf" / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    outcome = run_steps([deaf, next_one], lambda _: None, grace=0.3)
    assert outcome.signal == signal.SIGTERM and not outcome.failed
    assert deaf.how is not None and deaf.how.stopped and deaf.how.code == -signal.SIGKILL
    assert next_one.how is None


def test_a_step_waits_for_the_process_of_an_earlier_start(tmp_path: Path) -> None:
    step, freed = Program(tmp_path, "a"), []

    def let_go() -> None:
        with folder_lock(step.folder, "it"):
            held.set()
            time.sleep(1.0)
            freed.append(time.monotonic())

    held = threading.Event()
    holder = threading.Thread(target=let_go)
    holder.start()
    assert held.wait(10)
    run_steps([step], lambda _: None)
    holder.join()
    assert step.is_done() and freed

"""Steps: commands in processes of their own, as many side by side as there is room for, gone on with after a kill.

What `afire reproduce`, `afire ablate` and the benchmarks share. The files of a step show whether it is finished, so
the next start needs nothing but the disk; a failing step stops only what needs it.

``python -m afire.studies.steps LOCK MODULE ARGUMENTS...`` runs one step: ``python -m MODULE ARGUMENTS...`` that
waits for a process which an earlier start may have left saving, and that ends when its parent does.
"""

from __future__ import annotations

import logging
import os
import runpy
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from afire.files import FolderBusyError
from afire.processes import end_with_parent, how_it_ended, patient_lock
from afire.progress import format_seconds

SECONDS_TO_SAVE = 120.0  # a step that is told to stop finishes its work in progress and writes a checkpoint
_SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True)
class Command:
    """The process of a step: ``python -m module arguments``, where ``module`` may also be a ``.py`` file."""

    arguments: Sequence[str]
    log: Path
    lock: Path  # the folder that it holds while it runs
    module: str = "afire"
    folder: Path | None = None  # that it runs in
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a process ended: exit code (below 0: a signal), seconds by the clock and of all processors, memory.

    ``stopped``: a signal to the runner ended it.
    """

    code: int
    seconds: float
    processor_seconds: float
    stopped: bool = False
    peak_bytes: int = 0


class Step(ABC):
    """One command with a name. Files decide whether it is finished: those of this start and those of earlier ones."""

    name: str
    needs: tuple[str, ...] = ()
    cost: float | None = None  # relative to other steps, to estimate the time left; None: unknown

    @abstractmethod
    def is_done(self) -> bool:
        """Whether an earlier start, or this one, has finished it."""

    @abstractmethod
    def command(self, slot: int) -> Command | None:
        """What to run in one of the places side by side; None where an earlier start has left nothing to run."""

    def ended(self, ending: Ended) -> bool:
        """Record that its process ended, by itself or stopped; returns whether the step is finished now."""
        return self.is_done()

    def is_begun(self) -> bool:
        """Whether the next command goes on with what an earlier start began."""
        return False

    def seconds(self) -> float:
        """What it took, over all starts."""
        return 0.0

    def announcement(self) -> str:
        """The message when it starts; none if empty."""
        return ""

    def summary(self) -> str:
        """The message when it is finished."""
        return "done"


EventKind = Literal["start", "resume", "done", "before", "failed", "skipped"]


@dataclass(frozen=True)
class Event:
    """A step began or ended. ``message``: why it failed or was skipped; ``seconds_left``: what the rest may take."""

    step: Step
    kind: EventKind
    message: str = ""
    seconds_left: float | None = None


Report = Callable[[Event], None]


@dataclass
class Outcome:
    """How a start ended: seconds of the steps that are done, messages of those that are not, and the signal."""

    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    signal: int = 0


def run_steps(steps: Sequence[Step], report: Report, *, jobs: int = 1, grace: float = SECONDS_TO_SAVE) -> Outcome:
    """Run what is not done yet, ``jobs`` side by side, each after those it needs, otherwise in the order given.

    SIGINT and SIGTERM tell the running steps to stop; after ``grace`` seconds they are killed.
    """
    from afire.training.engine import StopSignals  # only here: the process of a step should not wait for torch

    runner = _Runner(steps, report, jobs)
    with StopSignals() as stop, runner.children(grace):
        while runner.has_work() and not stop.received:
            runner.start_ready()
            if runner.running:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                runner.look()
    runner.outcome.signal = stop.received
    return runner.outcome


def log_steps(total: int, done: int = 0) -> Report:
    """A line as a step begins, if it has an announcement, and one as it ends; ``done`` of ``total`` were left out."""
    logger = logging.getLogger("afire")
    started = ended = done

    def report(event: Event) -> None:
        nonlocal started, ended
        started += event.kind in ("start", "resume", "before", "skipped")
        ended += event.kind not in ("start", "resume")
        step, suffix = (
            event.step,
            f"; about {format_seconds(event.seconds_left)} left" if event.seconds_left is not None else "",
        )
        if event.kind in ("start", "resume"):
            if step.announcement():
                goes_on = " goes on" if event.kind == "resume" else ""
                logger.info("[%d/%d] %s%s: %s", started, total, step.name, goes_on, step.announcement())
        elif event.kind == "before":
            logger.info("[%d/%d] %s: done before", started, total, step.name)
        elif event.kind == "done":
            logger.info("[%d/%d] %s: %s%s", ended, total, step.name, step.summary(), suffix)
        else:
            logger.warning("[%d/%d] %s %s: %s%s", ended, total, step.name, event.kind, event.message, suffix)

    return report


class _Runner:
    """The state of one start: what waits, what runs in which slot, how the rest ended."""

    def __init__(self, steps: Sequence[Step], report: Report, jobs: int) -> None:
        self.waiting, self.report, self.jobs = list(steps), report, jobs
        self.done_before = {step.name for step in steps if step.is_done()}
        self.running: dict[int, _Child] = {}
        self.outcome = Outcome()
        self.clock = _Clock(steps, jobs)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def start_ready(self) -> None:
        """Start what can start, in the order given, until every slot is taken."""
        for step in list(self.waiting):
            free = next((slot for slot in range(self.jobs) if slot not in self.running), None)
            if free is None:
                return
            if step.name in self.done_before:
                self.waiting.remove(step)
                self._done(step, "before")
            elif failed_needs := [
                name for name in step.needs if name in self.outcome.failed or name in self.outcome.skipped
            ]:
                self.waiting.remove(step)
                self.clock.ended(step, None)
                self.outcome.skipped[step.name] = f"it needs {failed_needs[0]}"
                self.report(Event(step, "skipped", self.outcome.skipped[step.name]))
            elif all(name in self.outcome.seconds for name in step.needs):
                self.waiting.remove(step)
                self._start(step, free)

    def _start(self, step: Step, slot: int) -> None:
        goes_on = step.is_begun()
        command = step.command(slot)
        if command is None:
            step.ended(Ended(0, 0.0, 0.0))
            self._done(step, "done")
            return
        self.report(Event(step, "resume" if goes_on else "start"))
        self.running[slot] = _Child(step, command)

    def _done(self, step: Step, kind: EventKind, seconds: float | None = None) -> None:
        self.clock.ended(step, seconds)
        self.outcome.seconds[step.name] = step.seconds()
        self.report(Event(step, kind, seconds_left=self.clock.remaining()))

    def look(self) -> None:
        """See which processes have ended."""
        for slot, child in list(self.running.items()):
            ending = child.poll()
            if ending is None:
                continue
            del self.running[slot]
            child.close()
            if child.step.ended(ending):
                self._done(child.step, "done", ending.seconds)
                continue
            message = how_it_ended(child.log_path, ending.code)
            self.clock.ended(child.step, ending.seconds)
            self.outcome.failed[child.step.name] = message
            self.report(Event(child.step, "failed", message, self.clock.remaining()))

    @contextmanager
    def children(self, grace: float) -> Iterator[None]:
        """When the block ends, running steps are told to stop, and killed after ``grace`` seconds."""
        try:
            yield
        finally:
            for child in self.running.values():
                child.ask_to_stop()
            deadline = time.monotonic() + grace
            for child in self.running.values():
                child.step.ended(replace(child.wait(deadline), stopped=True))
                child.close()


class _Clock:
    """Seconds left, from the steps that have ended in this start, weighted by what they cost."""

    def __init__(self, steps: Sequence[Step], jobs: int) -> None:
        self.left = {step.name: step.cost for step in steps}
        self.jobs = jobs
        self.seconds = self.cost = 0.0

    def ended(self, step: Step, seconds: float | None) -> None:
        """``seconds`` is None for a step that did not run."""
        cost = self.left.pop(step.name)
        if seconds is not None and cost is not None:
            self.cost += cost
            self.seconds += seconds

    def remaining(self) -> float | None:
        costs = [cost for cost in self.left.values() if cost is not None]
        if not self.cost or not costs or len(costs) < len(self.left):
            return None
        return self.seconds / self.cost * sum(costs) / min(self.jobs, len(costs))


class _Child:
    """A running step: its process, the pipe that keeps it alive, its log."""

    def __init__(self, step: Step, command: Command) -> None:
        self.step, self.log_path = step, command.log
        self.started = time.monotonic()
        command.log.parent.mkdir(parents=True, exist_ok=True)
        self._log = command.log.open("ab")
        # A session of its own: Ctrl-C reaches the runner only, which then asks the step to save.
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "afire.studies.steps",
                str(command.lock.resolve()),
                command.module,
                *command.arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=command.folder,
            env={**os.environ, **command.environment},
            start_new_session=True,
        )

    def poll(self) -> Ended | None:
        """How it ended, or None while it runs."""
        if not hasattr(os, "wait4"):
            code = self._process.poll()
            seconds = time.monotonic() - self.started
            return None if code is None else Ended(code, seconds, seconds)
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)  # tells the time of this child alone
        if not pid:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        seconds = time.monotonic() - self.started
        return Ended(self._process.returncode, seconds, usage.ru_utime + usage.ru_stime, peak_bytes=peak)

    def ask_to_stop(self) -> None:
        self._process.terminate()

    def wait(self, deadline: float) -> Ended:
        """Wait for its end, and make it end at the deadline."""
        while (ending := self.poll()) is None:
            if time.monotonic() > deadline:
                self._process.kill()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return ending

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()


def main() -> None:
    """The process of a step."""
    lock, module, sys.argv = Path(sys.argv[1]), sys.argv[2], sys.argv[2:]
    end_with_parent()
    try:
        with patient_lock(lock, "the step in"):
            if module.endswith(".py"):
                sys.path.insert(0, str(Path(module).parent))  # as python FILE does
                runpy.run_path(module, run_name="__main__")
            else:
                runpy.run_module(module, run_name="__main__")
    except FolderBusyError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()

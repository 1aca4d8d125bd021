"""Steps one after the other: finished ones are left alone, begun ones go on, a failing one stops only what needs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from afire.files import write_atomic
from afire.studies.children import how_it_ended
from afire.studies.reproduce.steps import (
    STEPS,
    Step,
    StepFile,
    is_done,
    read_step,
    refuse_another,
    step_hashes,
    step_path,
)
from afire.training.signals import StopSignals

_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_TO_SAVE = 180.0  # a step that was asked to stop writes a checkpoint; an ablation waits for its cells

Event = Literal["start", "resume", "done", "before", "failed", "skipped"]
Report = Callable[[Step, Event, str], None]
"""Called as a step begins or ends, with a sentence where there is one."""


@dataclass
class Outcome:
    """How a start ended: seconds of the steps that are done, sentences of those that are not, and the signal."""

    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    signal: int = 0


def run_steps(steps: Sequence[Step], out: Path, report: Report) -> Outcome:
    """Run what is not done yet, in order. What does not fit to earlier starts is refused before anything is run."""
    hashes = step_hashes(steps, out)
    before = {step.name: read_step(out, step.name) for step in steps}
    for step in steps:
        refuse_another(out, step, before[step.name], hashes[step.name])
    outcome = Outcome()
    with StopSignals() as stop:
        for step in steps:
            found, digest = before[step.name], hashes[step.name]
            if is_done(step, found, digest):
                outcome.seconds[step.name] = found.seconds if found else 0.0
                report(step, "before", "")
                continue
            missing = [name for name in step.needs if name not in outcome.seconds]
            if missing:
                outcome.skipped[step.name] = f"it needs {missing[0]}"
                report(step, "skipped", outcome.skipped[step.name])
                continue
            _run_one(step, out, found, digest, outcome, stop, report)
            if stop.received:
                break
        outcome.signal = stop.received
    return outcome


def _run_one(
    step: Step, out: Path, found: StepFile | None, digest: str, outcome: Outcome, stop: StopSignals, report: Report
) -> None:
    spent = found.seconds if found else 0.0
    started = time.monotonic()
    if not (found and step.complete is not None and step.complete.exists()):
        goes_on = found is not None and (step.resume_when is None or step.resume_when.exists())
        report(step, "resume" if goes_on else "start", "")
        StepFile("begun", digest, step.command, spent).write(out, step.name)
        code = _call([*step.words, *step.machine, *(step.resume if goes_on else ())], out, step.name, stop)
        seconds = spent + time.monotonic() - started
        if stop.received or code:
            StepFile("begun", digest, step.command, round(seconds, 2)).write(out, step.name)
            if not stop.received:
                outcome.failed[step.name] = how_it_ended(step_path(out, step.name, "log"), code)
                report(step, "failed", outcome.failed[step.name])
            return
    for source, target in step.keeps:
        write_atomic(target, lambda path, source=source: _copy(source, path))  # type: ignore[misc]
    outcome.seconds[step.name] = round(spent + time.monotonic() - started, 2)
    StepFile("done", digest, step.command, outcome.seconds[step.name]).write(out, step.name)
    report(step, "done", "")


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _call(words: Sequence[str], out: Path, name: str, stop: StopSignals) -> int:
    """Run ``afire WORDS...`` to its end or to a signal; its exit code."""
    lock = out / STEPS
    command = [sys.executable, "-m", "afire.studies.reproduce.child", str(lock), *words]
    with step_path(out, name, "log").open("ab") as log:
        # A session of its own: Ctrl-C reaches this process only, which then asks the step to save.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and not stop.received:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        finally:
            _end(process)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a running step to stop, then make it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_SECONDS_TO_SAVE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdin is not None:
        process.stdin.close()

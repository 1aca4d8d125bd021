"""One step as a process of its own: ``python -m afire.studies.reproduce.run LOCK WORDS...`` is ``afire WORDS...``.

A step is one ``afire`` command with a name; its file says whether it was begun, finished, and with what.

OUT/steps/NAME.json    state, command, a hash of the command and of everything it started from, seconds
OUT/steps/NAME.log     what the command said

Steps one after the other: finished ones are left alone, begun ones go on, a failing one stops only what needs it.
"""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from afire.errors import UserError
from afire.files import read_json, sha256_file, sha256_text, write_atomic, write_json
from afire.processes import end_with_parent, how_it_ended, patient_lock
from afire.training.engine import StopSignals


def main() -> None:
    """Wait for a step that an earlier start may have left saving, then be the command."""
    lock, sys.argv = Path(sys.argv[1]), ["afire", *sys.argv[2:]]
    end_with_parent()
    with patient_lock(lock, "the steps in"):
        runpy.run_module("afire", run_name="__main__")


if __name__ == "__main__":
    main()


FORMAT = 1
STEPS = "steps"
# What tells a folder's content apart without reading all of it: of a pack, a run, a bundle, a detector.
_TELLTALES = ("pack.json", "summary.json", "data.json", "bundle.json", "detector.json", "result.json")


@dataclass(frozen=True)
class Step:
    """One command, without the leading ``afire``.

    ``resume`` words are added when an earlier start began it (and ``resume_when`` exists, if given). ``complete`` is
    what the command writes last: with it there, an earlier start ended just before it could say so. ``keeps`` are
    copies made at the end, because a later step may write over the originals. ``inputs`` come from outside.
    ``machine`` words (device, jobs) decide nothing about the result.
    """

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    resume_when: Path | None = None
    complete: Path | None = None
    keeps: tuple[tuple[Path, Path], ...] = ()
    inputs: tuple[Path, ...] = ()
    machine: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command as one would type it."""
        return shlex.join(["afire", *self.words, *self.machine])


@dataclass(frozen=True)
class StepFile:
    """What is known about a step from earlier starts."""

    state: Literal["begun", "done"]
    hash: str
    command: str
    seconds: float

    def write(self, out: Path, name: str) -> None:
        write_json(step_path(out, name), {"format": FORMAT, **vars(self)})


def step_path(out: Path, name: str, ending: str = "json") -> Path:
    """The file of a step, or its log."""
    return out / STEPS / f"{name}.{ending}"


def read_step(out: Path, name: str) -> StepFile | None:
    """What an earlier start left, or None; a truncated file counts as none."""
    try:
        raw: Any = read_json(step_path(out, name))
    except UserError:
        return None
    if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
        return None
    return StepFile(**raw)


def step_hashes(steps: Sequence[Step], out: Path) -> dict[str, str]:
    """A hash for each step: its words, its inputs' content, and the hashes of the steps it needs."""
    found: dict[str, str] = {}
    for step in steps:
        prints = {str(path): fingerprint(path) for path in step.inputs}
        # The folder itself may be spelt otherwise or be moved: that changes nothing.
        words = [prints.get(word, word.replace(str(out), "OUT", 1)) for word in step.words]
        decides = {"words": words, "inputs": list(prints.values()), "needs": [found[name] for name in step.needs]}
        found[step.name] = sha256_text(json.dumps(decides))
    return found


def fingerprint(path: Path) -> str:
    """What tells this file or folder from another one; its name where nothing else is there to look at."""
    if path.is_file():
        return sha256_file(path)
    telling: Mapping[str, str] = {name: sha256_file(path / name) for name in _TELLTALES if (path / name).is_file()}
    return sha256_text(json.dumps(telling)) if telling else str(path.resolve())


def is_done(step: Step, found: StepFile | None, digest: str) -> bool:
    """Whether an earlier start finished this very step and its copies are there."""
    return (
        found is not None and found.state == "done" and found.hash == digest and all(b.exists() for _, b in step.keeps)
    )


def refuse_another(out: Path, step: Step, found: StepFile | None, digest: str) -> None:
    """A step of other settings or other films must not be mixed with these."""
    if found is None or found.hash == digest:
        return
    if found.command != step.command:
        before, now = _differing(found.command, step.command)
        what = f"was run with {before}, and would now be run with {now}"
    else:
        what = "started from other films or weights"
    raise UserError(f"step {step.name} in {out} {what}; repeat the earlier settings, or choose another --out.")


def _differing(before: str, now: str) -> tuple[str, str]:
    """The words in which two commands differ, quoted."""
    first, second = shlex.split(before), shlex.split(now)
    only = [[word for word in one if word not in other] for one, other in ((first, second), (second, first))]
    gone, new = (" ".join(words[:4]) or "nothing of the kind" for words in only)
    return f"`{gone}`", f"`{new}`"


_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_TO_SAVE = 180.0  # a step that was asked to stop writes a checkpoint; an ablation waits for its trials

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
    command = [sys.executable, "-m", "afire.studies.reproduce.run", str(lock), *words]
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

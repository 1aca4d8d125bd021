"""Recorded steps: `afire` commands with names, each with a file that records its state and command.

What `afire reproduce` and `afire detect bench` run.

OUT/steps/NAME.json    state, command, a hash of the command and of everything it started from, seconds, memory
OUT/steps/NAME.log     output of the command

What is done is done only for the same command and the same films; anything else in the same folder is refused. What a
finished step has made may be gone, such as the weights of a run, while nothing that is left to do needs it: a study
goes on from its records. What is still needed is made again.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from afire.errors import UserError
from afire.files import read_json, sha256_file, sha256_text, write_atomic, write_json
from afire.studies.steps import SECONDS_TO_SAVE, Command, Ended, Outcome, Report, Step, run_steps

FORMAT = 1
STEPS = "steps"
# What tells a folder's content apart without reading all of it: of a pack, a run, a bundle, a detector.
_TELLTALES = ("pack.json", "summary.json", "data.json", "bundle.json", "detector.json", "result.json")


@dataclass(frozen=True)
class PlannedStep:
    """One command, without the leading ``afire``.

    ``resume`` arguments are added when an earlier start began it (and ``resume_when`` exists, if given). ``complete``
    is what the command writes last: if it exists, an earlier start ended just before it was recorded. ``keeps`` are
    copies made at the end, because a later step may write over the originals. ``makes`` is a file that tells whether
    what later steps (or, where there are none, people) read of it is still there. ``inputs`` come from outside.
    ``machine`` arguments (device, jobs) do not change the result. ``finishes`` are the exit codes of a command that
    did its work.
    """

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    resume_when: Path | None = None
    complete: Path | None = None
    keeps: tuple[tuple[Path, Path], ...] = ()
    makes: Path | None = None
    inputs: tuple[Path, ...] = ()
    machine: tuple[str, ...] = ()
    finishes: tuple[int, ...] = (0,)

    @property
    def command(self) -> str:
        """The command as one would type it."""
        return shlex.join(["afire", *self.arguments, *self.machine])


@dataclass(frozen=True)
class StepFile:
    """What is known about a step from earlier starts."""

    state: Literal["begun", "done"]
    hash: str
    command: str
    seconds: float
    processor_seconds: float = 0.0
    peak_bytes: int = 0  # of memory

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


def step_hashes(steps: Sequence[PlannedStep], out: Path) -> dict[str, str]:
    """A hash for each step: its arguments, its inputs' content, and the hashes of the steps it needs."""
    hashes: dict[str, str] = {}
    for step in steps:
        prints = {str(path): fingerprint(path) for path in step.inputs}
        # The folder itself may be spelt otherwise or be moved: that changes nothing.
        arguments = [prints.get(argument, argument.replace(str(out), "OUT", 1)) for argument in step.arguments]
        decides = {"words": arguments, "inputs": list(prints.values()), "needs": [hashes[name] for name in step.needs]}
        hashes[step.name] = sha256_text(json.dumps(decides))
    return hashes


def fingerprint(path: Path) -> str:
    """A digest of this file, or of telling files in this folder; its path where there are none."""
    if path.is_file():
        return sha256_file(path)
    telling: Mapping[str, str] = {name: sha256_file(path / name) for name in _TELLTALES if (path / name).is_file()}
    return sha256_text(json.dumps(telling)) if telling else str(path.resolve())


def is_done(step: PlannedStep, record: StepFile | None, digest: str) -> bool:
    """Whether an earlier start finished this very step and its copies are there."""
    return (
        record is not None
        and record.state == "done"
        and record.hash == digest
        and all(copy.exists() for _, copy in step.keeps)
    )


def done_steps(steps: Sequence[PlannedStep], out: Path, hashes: Mapping[str, str]) -> set[str]:
    """Names of the steps with nothing left to run.

    Finished by their record, and what they made is there, or everything that needs it is done as well.
    """
    finished: set[str] = set()
    for step in reversed(steps):  # those that need it come after it
        needing = [later.name for later in steps if step.name in later.needs]
        is_available = step.makes is None or step.makes.exists() or (bool(needing) and finished.issuperset(needing))
        if is_available and is_done(step, read_step(out, step.name), hashes[step.name]):
            finished.add(step.name)
    return finished


def refuse_another(out: Path, step: PlannedStep, record: StepFile | None, digest: str) -> None:
    """A step of other settings or other films must not be mixed with these."""
    if record is None or record.hash == digest:
        return
    if record.command != step.command:
        earlier, current = _differing(record.command, step.command)
        reason = f"was run with {earlier}, and would now be run with {current}"
    else:
        reason = "started from other films or weights"
    raise UserError(f"step {step.name} in {out} {reason}; repeat the earlier settings, or choose another --out.")


def _differing(earlier: str, current: str) -> tuple[str, str]:
    """The arguments in which two commands differ, quoted."""
    first, second = shlex.split(earlier), shlex.split(current)
    only = [
        [argument for argument in mine if argument not in other] for mine, other in ((first, second), (second, first))
    ]
    removed, added = (" ".join(arguments[:4]) or "nothing of the kind" for arguments in only)
    return f"`{removed}`", f"`{added}`"


_SECONDS_TO_SAVE = SECONDS_TO_SAVE + 60  # a step may itself run steps that save


def run_planned(
    planned: Sequence[PlannedStep],
    out: Path,
    report: Report,
    *,
    jobs: int = 1,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Outcome:
    """Run what is not done yet, in order, ``jobs`` side by side.

    What does not match earlier starts is refused before anything is run. Commands see ``environment`` too.
    """
    hashes = step_hashes(planned, out)
    for step in planned:
        refuse_another(out, step, read_step(out, step.name), hashes[step.name])
    finished = done_steps(planned, out, hashes)
    steps = [RecordedStep(step, out, hashes[step.name], step.name in finished, environment) for step in planned]
    return run_steps(steps, report, jobs=jobs, grace=_SECONDS_TO_SAVE)


class RecordedStep(Step):
    """A planned step with its file in ``out``."""

    def __init__(
        self,
        planned: PlannedStep,
        out: Path,
        digest: str,
        done: bool,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.planned, self.out, self.digest, self.done, self.environment = planned, out, digest, done, environment
        self.name, self.needs = planned.name, planned.needs
        self.before = read_step(out, planned.name)
        if self.before is not None and self.before.state == "done" and not done and planned.makes is not None:
            # Made again from its beginning: what it took the first time is not added.
            self.before = replace(self.before, state="begun", seconds=0.0, processor_seconds=0.0, peak_bytes=0)

    def is_done(self) -> bool:
        return self.done

    def is_begun(self) -> bool:
        marker = self.planned.resume_when
        return self.before is not None and (marker is None or marker.exists())

    def command(self, slot: int) -> Command | None:
        step = self.planned
        if self.before is not None and step.complete is not None and step.complete.exists():
            return None  # an earlier start ended just before it was recorded
        self._write("begun", Ended(0, 0.0, 0.0))
        arguments = (*step.arguments, *step.machine, *(step.resume if self.is_begun() else ()))
        log, lock = (step_path(self.out, self.name, ending) for ending in ("log", "lock"))
        return Command(arguments, log, lock, environment=self.environment)

    def ended(self, ending: Ended) -> bool:
        if ending.code not in self.planned.finishes or ending.stopped:
            self._write("begun", ending)
            return False
        for source, target in self.planned.keeps:
            write_atomic(target, lambda path, source=source: _copy(source, path))  # type: ignore[misc]
        self._write("done", ending)
        return True

    def seconds(self) -> float:
        record = read_step(self.out, self.name)
        return record.seconds if record is not None else 0.0

    def announcement(self) -> str:
        return self.planned.command

    def _write(self, state: Literal["begun", "done"], ending: Ended) -> None:
        """Add what this start took to what earlier ones did."""
        earlier = self.before or StepFile("begun", "", "", 0.0)
        StepFile(
            state,
            self.digest,
            self.planned.command,
            round(earlier.seconds + ending.seconds, 2),
            round(earlier.processor_seconds + ending.processor_seconds, 2),
            max(earlier.peak_bytes, ending.peak_bytes),
        ).write(self.out, self.name)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)

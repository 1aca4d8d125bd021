"""A step is one ``afire`` command with a name; its file says whether it was begun, finished, and with what.

OUT/steps/NAME.json    state, command, a hash of the command and of everything it started from, seconds
OUT/steps/NAME.log     what the command said
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from afire.errors import UserError
from afire.files import read_json, sha256_file, sha256_text, write_json

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
    """What an earlier start left, or None; a torn file counts as none."""
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

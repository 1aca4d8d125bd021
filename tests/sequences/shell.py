"""Commands run one after the other in a walk's folder, and what must hold after each of them, whatever it was.

- It ends with 0 or 2 (1 where the documentation says so); a traceback is a defect.
- A refusal is one line that begins with `error: `, and leaves every file and folder as it was.
- What it writes is below its --out; files that were there stay as they were, unless it was told to replace them.
- Nothing half-written is left, and no lock.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from afire.cli import main
from afire.files import LOCK, sha256_file
from tests.commands import Command, start

UNFINISHED = (".part-", ".old-")
_LONGEST_MESSAGE = 700


class BrokenPromiseError(AssertionError):
    """Something that must hold does not."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def message(self) -> str:
        """What a refusal says."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        return lines[0].removeprefix("error: ") if lines else ""


class Shell:
    """Runs commands in ``folder``, keeps their history, and checks what holds for all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history: list[str] = []
        self.codes: Counter[tuple[str, int]] = Counter()
        self.messages: Counter[str] = Counter()
        self._digests: dict[tuple[str, int, int, int], str] = {}
        self._after_kill: set[str] = set()  # folders in which a killed command may have left something

    def note(self, text: str) -> None:
        """Something that was done without a command."""
        self.history.append(f"# {text}")

    def run(
        self,
        *words: str,
        out: str | None = None,
        replaces: bool = False,
        keeps: bool = False,
        expect: Collection[int] = (0, 2),
    ) -> Ended:
        """Run a command that writes ``out``: with ``replaces`` it may change what is there, with ``keeps`` also when it
        is refused."""
        before = self.tree()
        self.history.append(shlex.join(["afire", *words]))
        ended = call(words, self.folder)
        self._count(words, ended)
        if ended.code != 2:  # a refusal leaves everything as it was, also what a kill has left
            self._after_kill.discard(out or "")
        self._check_ending(ended, expect)
        self._check_files(before, self.tree(), out, may_change=replaces or (keeps and ended.code == 2), ended=ended)
        return ended

    def kill(self, *words: str, out: str, when: Callable[[], bool], seconds: float, how: signal.Signals) -> int:
        """Start a command in a process of its own and end it with ``how`` when ``when`` holds, or after ``seconds``.

        The exit code, negative where the signal ended it; 0 where it was done before.
        """
        before = self.tree()
        self.history.append(f"{shlex.join(['afire', *words])}  # then {how.name}")
        command = start(*words, folder=self.folder)
        deadline = time.monotonic() + seconds
        while command.is_running and not when() and time.monotonic() < deadline:
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError):
            command.send(how)
        code = _code_of(command, how)
        self.history[-1] += f": {code}"
        self.codes[_name_of(words), code] += 1
        if code not in (0, 2, -how, 128 + how):  # it may have ended, or been refused, before
            raise BrokenPromiseError(f"killed with {how.name}, it ended with {code}: {command.end().stderr[-2000:]}")
        self._after_kill.add(out)
        self._check_outside(before, self.tree(), out)
        return code

    @contextlib.contextmanager
    def stopped(self, *words: str, out: str, when: Callable[[], bool]) -> Iterator[bool]:
        """Start a command in a process of its own and stop it for the block, as soon as ``when`` holds.

        Whether it then holds its folder: it may have been done before. After the block it goes on to its end.
        """
        self.history.append(f"{shlex.join(['afire', *words])}  # stopped on the way")
        command = start(*words, folder=self.folder)
        while command.is_running and not when():
            time.sleep(0.002)
        with contextlib.suppress(ProcessLookupError):
            command.send(signal.SIGSTOP)
        self._after_kill.add(out)
        try:
            yield command.is_running and (self.folder / out / LOCK).exists()
        finally:
            with contextlib.suppress(ProcessLookupError):
                command.send(signal.SIGCONT)
        ended = command.end(seconds=120)
        self._after_kill.discard(out)
        self.codes[_name_of(words), ended.code] += 1
        self._check_ending(Ended(ended.code, ended.stdout, ended.stderr), [0])

    def tree(self) -> dict[str, str]:
        """Every file with its digest, and every folder."""
        return dict(self._walk(self.folder))

    def _walk(self, folder: Path) -> Iterator[tuple[str, str]]:
        for entry in os.scandir(folder):
            path = os.path.relpath(entry.path, self.folder)
            if entry.is_dir(follow_symlinks=False):
                yield path, "folder"
                yield from self._walk(Path(entry.path))
            else:
                status = entry.stat()
                key = (path, status.st_size, status.st_mtime_ns, status.st_ino)
                if key not in self._digests:
                    self._digests[key] = sha256_file(Path(entry.path))
                yield path, self._digests[key]

    def _count(self, words: Sequence[str], ended: Ended) -> None:
        name = _name_of(words)
        self.codes[name, ended.code] += 1
        if ended.code == 2:
            self.messages[f"{name}: {ended.message.replace(str(self.folder), 'WORLD')}"] += 1

    def _check_ending(self, ended: Ended, expect: Collection[int]) -> None:
        if ended.code not in expect or "Traceback" in ended.stderr:
            wanted = " or ".join(map(str, expect))
            raise BrokenPromiseError(
                f"exit code {ended.code}, not {wanted}: {ended.stderr[-3000:] or ended.stdout[-500:]}"
            )
        if ended.code != 2:
            return
        lines = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        if len(lines) != 1 or not ended.stderr.rstrip().endswith(lines[0]):
            raise BrokenPromiseError(f"a refusal is one line at the end, but this was said: {ended.stderr[-2000:]!r}")
        if not 10 < len(ended.message) < _LONGEST_MESSAGE:
            raise BrokenPromiseError(f"not a sentence: {ended.message!r}")

    def _check_files(
        self, before: dict[str, str], after: dict[str, str], out: str | None, may_change: bool, ended: Ended
    ) -> None:
        if ended.code == 2 and not may_change:
            changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
            changed = [path for path in changed if path in after or _is_kept(path)]
            if changed:
                raise BrokenPromiseError(f"a refusal changed {changed[:8]}: {ended.message}")
            return
        self._check_outside(before, after, out)
        if not may_change:
            changed = sorted(path for path in before if _is_kept(path) and before[path] != after.get(path))
            if changed:
                raise BrokenPromiseError(f"overwritten or removed: {changed[:8]}")
        left = [path for path in after if self._is_litter(path)]
        if left:
            raise BrokenPromiseError(f"left half-written: {left[:8]}")

    def _check_outside(self, before: dict[str, str], after: dict[str, str], out: str | None) -> None:
        changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
        outside = sorted(path for path in changed if not _is_below(path, out) and not self._is_litter(path))
        if outside:
            raise BrokenPromiseError(f"written or changed outside of {out}: {outside[:8]}")

    def _is_litter(self, path: str) -> bool:
        names = Path(path).parts
        killed = any(_is_below(path, folder) for folder in self._after_kill)
        return any(name.startswith(UNFINISHED) or name == LOCK for name in names) and not killed


def _code_of(command: Command, how: signal.Signals) -> int:
    try:
        return command.end(seconds=120).code
    except FileNotFoundError:  # ended before it could say anything
        return -how


def call(words: Sequence[str], folder: Path) -> Ended:
    """``afire`` with ``words`` in this process, as its entry point runs it."""
    stdout, stderr = io.StringIO(), io.StringIO()
    here = Path.cwd()
    os.chdir(folder)
    try:
        with (
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
            mock.patch.object(sys, "argv", ["afire", *words]),
            mock.patch("afire.cli.keep_freed_memory"),  # is for whole programs
        ):
            code = _code_of_main()
    finally:
        os.chdir(here)
    return Ended(code, stdout.getvalue(), stderr.getvalue())


def _name_of(words: Sequence[str]) -> str:
    return " ".join(words[: 2 if words[0] in ("data", "detect") else 1])


def _code_of_main() -> int:
    try:
        main()
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _is_below(path: str, out: str | None) -> bool:
    """Whether ``path`` is ``out``, below it, or a folder above it, which may have to be made."""
    return out is not None and (path == out or path.startswith(f"{out}/") or out.startswith(f"{path}/"))


def _is_kept(path: str) -> bool:
    """A lock that a killed command has left is removed by the next one that takes it, whatever becomes of that one."""
    return Path(path).name != LOCK

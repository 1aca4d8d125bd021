"""Commands as a user starts them: exit code, output, time and memory, and what remains after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
DOCUMENTED = (0, 1, 2)
_SECONDS_TO_END = 20.0


class DrillError(Exception):
    """A check of a drill failed."""


@dataclass(frozen=True)
class Ended:
    """How a command ended. ``cpu_seconds`` are of all its processes, ``peak_megabytes`` of the largest."""

    code: int
    said: str
    errors: str
    seconds: float
    cpu_seconds: float
    peak_megabytes: float
    killed: bool = False

    def as_row(self) -> dict[str, Any]:
        """What the results keep."""
        return {
            "exit code": self.code,
            "seconds": round(self.seconds, 1),
            "cpu seconds": round(self.cpu_seconds, 1),
            "peak_megabytes": round(self.peak_megabytes),
        }


def afire(*words: object) -> list[str]:
    """The command line of ``afire``, of this very Python."""
    return [sys.executable, "-m", "afire", *map(str, words)]


def run(
    command: Sequence[str],
    log: Path,
    *,
    seconds: float = 1800.0,
    kill_when: Callable[[float], bool] | None = None,
    kill_workers: bool = True,
) -> Ended:
    """Run to the end, or until ``kill_when`` says so of the CPU seconds used so far: then ``kill -9``.

    CPU seconds tell how far a command is, however busy the machine is with other things meanwhile. The kill is of the
    whole process group, or without ``kill_workers`` of the first process alone. More than ``seconds`` is a hang.
    Whatever happens, no process of the command may be left.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=err, start_new_session=True)
        killed, peak = False, 0.0
        try:
            while True:
                peak = max(peak, peak_megabytes(process.pid))
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                taken = time.monotonic() - start
                if pid:
                    break
                if not killed and kill_when is not None and kill_when(cpu_seconds(process.pid)):
                    (os.killpg if kill_workers else os.kill)(process.pid, signal.SIGKILL)
                    killed = True
                if taken > seconds:
                    raise DrillError(f"{' '.join(command[2:6])} hangs: not done after {seconds:.0f} s")
                time.sleep(0.002 if kill_when is not None else 0.02)
            process.returncode = os.waitstatus_to_exitcode(status)
            _require_no_orphans(process.pid)
        finally:
            if process.returncode is None or alive_in_session(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
    return Ended(
        process.returncode,
        log.with_suffix(".out").read_text(errors="replace"),
        log.with_suffix(".err").read_text(errors="replace"),
        taken,
        usage.ru_utime + usage.ru_stime,
        peak,
        killed and process.returncode == -signal.SIGKILL,
    )


def succeed(command: Sequence[str], log: Path, **options: Any) -> Ended:
    """Run; anything but exit code 0 is an error of the drill."""
    ended = run(command, log, **options)
    if ended.code != 0:
        raise DrillError(f"{' '.join(command[2:6])} ended with {ended.code}: {last_line(ended.errors)}")
    return ended


def require_documented_end(ended: Ended, what: str, codes: Sequence[int] = DOCUMENTED) -> None:
    """An exit code that is documented, and no traceback."""
    if ended.code not in codes:
        raise DrillError(f"{what} ended with {ended.code}: {last_line(ended.errors)}")
    if "Traceback" in ended.errors + ended.said:
        raise DrillError(f"{what} printed a traceback: {last_line(ended.errors)}")


def last_line(text: str) -> str:
    """The last line of output."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def with_children(pid: int) -> list[int]:
    """A process and those it has started."""
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has just ended
        below = []
    return [pid, *map(int, below)]


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and those it has started, so far."""
    ticks = 0
    for one in with_children(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_megabytes(pid: int) -> float:
    """The most memory that a process, or one it has started, has held so far.

    Asked while it runs: what the system tells at its end counts the memory of the process that started it, too.
    """
    peaks = [0.0]
    for one in with_children(pid):
        try:
            status = Path(f"/proc/{one}/status").read_text()
        except OSError:
            continue
        peaks += [int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
    return max(peaks)


def alive_in_session(session: int) -> list[int]:
    """Processes of a session that still run; those that only wait to be forgotten do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def _require_no_orphans(session: int) -> None:
    deadline = time.monotonic() + _SECONDS_TO_END
    while left := alive_in_session(session):
        if time.monotonic() > deadline:
            raise DrillError(f"{len(left)} processes outlived the command by {_SECONDS_TO_END:.0f} s")
        time.sleep(0.02)


def stray_files(folder: Path) -> list[str]:
    """What a kill left behind and nobody removed: files and folders under a temporary name."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob(".part-*"))


def tree_hashes(folder: Path) -> dict[str, str]:
    """Hash of every file below ``folder``."""
    from afire.files import sha256_file

    return {
        path.relative_to(folder).as_posix(): sha256_file(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }

"""Work over processes: every result once, errors handed on, a dead worker noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from afire.processes import in_processes, usable_cores


def square(number: int) -> int:
    return number * number


def fail(number: int) -> int:
    raise ValueError(f"no {number}")


def die(number: int) -> int:
    os._exit(3)


@pytest.mark.parametrize("processes", [1, 2])
def test_every_job_gives_one_result(processes: int) -> None:
    found = in_processes(square, ((number,) for number in range(9)), processes)
    assert sorted(found) == [number * number for number in range(9)]


@pytest.mark.parametrize("processes", [1, 2])
def test_errors_are_handed_on(processes: int) -> None:
    with pytest.raises(ValueError, match="no 1"):
        list(in_processes(fail, [(1,)], processes))


def test_a_worker_that_dies_is_noticed() -> None:
    with pytest.raises(BrokenProcessPool):
        list(in_processes(die, [(1,), (2,)], 2))


def note_and_sleep(folder: str, number: int) -> None:
    Path(folder, f"{os.getpid()}").touch()
    time.sleep(120)


def is_running(pid: int) -> bool:
    """Whether a process is there and not only waiting to be forgotten."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path, how: signal.Signals) -> None:
    program = (
        "import sys; from afire.processes import in_processes; from tests.test_processes import note_and_sleep\n"
        "if __name__ == '__main__': list(in_processes(note_and_sleep, [(sys.argv[1], n) for n in range(8)], 2))"
    )
    script = tmp_path / "parent.py"
    script.write_text(program)
    noted = tmp_path / "workers"
    noted.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(script), str(noted)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: len(list(noted.iterdir())) == 2)
        workers = [int(path.name) for path in noted.iterdir()]
        assert all(is_running(worker) for worker in workers)
    finally:
        parent.send_signal(how)
        parent.wait(30)
    until(lambda: not any(is_running(worker) for worker in workers))


def test_there_is_a_core() -> None:
    assert usable_cores() >= 1

"""The ``afire`` command in a process of its own, as users start it, without the seconds that its imports take.

A server that has imported everything and done nothing is forked for each command. Output goes to files, so that a
process that writes much never waits for its reader.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from tests.forked import fork_commands

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *(
            "afire.cli.tasks",
            "afire.training.loop",
            "afire.detect.fit",
            "afire.detect.run",
            "afire.report.task_figures",
            "afire.pacs.service",
            "afire.studies.ablation_run",
            "tests.forked",
        ),
        *("torch._dynamo", "torch.utils.tensorboard", "accelerate", "sklearn.linear_model", "matplotlib.pyplot"),
    ]
)
_SECONDS = 300.0


class Ended(NamedTuple):
    """How a command ended and what it wrote; ``code`` is negative where a signal ended it."""

    code: int
    stdout: str
    stderr: str


class Command:
    """A command under way."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        before: Callable[[], object] | None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="afire-command-"))
        self._own_session = before is os.setsid
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        arguments = (list(words), variables, folder, self._folder, before)
        self._process = _context.Process(target=_run_here, args=arguments)
        self._process.start()
        _started.append(self)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> Ended:
        """End it at once, as the system does when memory runs out."""
        if self._own_session:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        return self.end()

    def end(self, seconds: float = _SECONDS) -> Ended:
        """Wait for the end."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise AssertionError(f"not ended after {seconds:.0f} seconds: {self._written('stderr')[-3000:]}")
        return Ended(self._process.exitcode, self._written("stdout"), self._written("stderr"))

    def wait_until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until ``condition`` holds; the command must not end before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.is_running, self._written("stderr")[-3000:] + self._written("stdout")[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def _written(self, name: str) -> str:
        return (self._folder / name).read_text(encoding="utf-8", errors="replace")

    def forget(self) -> None:
        self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


_started: list[Command] = []


@atexit.register
def _end_all() -> None:
    """Before multiprocessing waits for what a failed test has left running."""
    for command in _started:
        command.forget()


def start(
    *words: object,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], object] | None = None,
) -> Command:
    """``afire`` with ``words``, in ``folder``.

    ``before`` is called in the new process first; after ``os.setsid``, :meth:`Command.kill` ends its children too.
    """
    return Command([str(word) for word in words], folder or Path.cwd(), environment or {}, before)


def run(
    *words: object, folder: Path | None = None, before: Callable[[], object] | None = None, expect: int = 0
) -> Ended:
    """``afire`` with ``words`` to its end, which must be ``expect``; a traceback only ever comes with code 1."""
    return _checked(start(*words, folder=folder, before=before), expect)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_processes(count: int, *words: object, folder: Path | None = None, expect: int = 0) -> list[Ended]:
    """One run of ``count`` processes, as torchrun starts them; the end of each must be ``expect``."""
    port = str(free_port())
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [_checked(command, expect) for command in [start(*words, folder=folder, environment=rank) for rank in ranks]]


def fork_processes(count: int, work: Callable[..., object], *arguments: object) -> None:
    """``work(rank, *arguments)`` in ``count`` processes side by side; an error in one of them is raised here."""
    from torch.multiprocessing import start_processes

    processes = start_processes(work, args=arguments, nprocs=count, join=False, start_method="forkserver")
    deadline = time.monotonic() + _SECONDS
    while not processes.join(timeout=5):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            raise AssertionError(f"{work.__name__}: not over after {_SECONDS:.0f} s")


def fork_group(work: Callable[..., object], folder: Path) -> None:
    """``work(rank, folder)`` in two processes that train together, over gloo."""
    fork_processes(2, _join_and_work, work, str(folder))


def _join_and_work(rank: int, work: Callable[[int, str], object], folder: str) -> None:
    import torch

    from afire.nn import distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        work(rank, folder)
    finally:
        distributed.leave()


def start_process(work: Callable[..., object], *arguments: object) -> BaseProcess:
    """``work(*arguments)`` in a process of its own, to be killed by whoever started it."""
    process = _context.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def _checked(command: Command, expect: int) -> Ended:
    ended = command.end()
    assert ended.code == expect, f"exit code {ended.code}: {ended.stderr[-3000:]}"
    assert "Traceback" not in ended.stderr or expect == 1, ended.stderr[-3000:]
    return ended


def _run_here(
    words: list[str], variables: dict[str, str], folder: Path, output: Path, before: Callable[[], object] | None
) -> None:
    """In the new process: what ``python -m afire`` does."""
    if before is not None:
        before()
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    from afire.studies import steps

    fork_commands(steps)
    os.fsync = lambda _: None  # as in tests/conftest.py
    sys.argv = ["afire", *words]
    runpy.run_module("afire", run_name="__main__", alter_sys=True)

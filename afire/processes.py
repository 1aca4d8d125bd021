"""Processes: work spread over them, how they use memory, and how those of a study end.

Packing, drawing and auditing spread their work over processes and take results as they come.

Memory: a training step on a CPU allocates and frees the same large tensors over and over. By default each comes as new
pages of 4 KiB that the kernel has to clear and map one by one, which takes up to a tenth of a step.
:func:`keep_freed_memory` asks for fewer and larger pages, and keeps freed ones for the next step.

The processes of a study end when their parent does, and no two of them write one folder. A child's standard input is a
pipe that nobody writes to. It ends when the parent does, for whatever reason, and the child then stops as on SIGTERM:
it saves, and does not run on beside the next start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for_end
from pathlib import Path
from typing import Any, TypeVar

from afire.files import FolderBusyError, folder_lock

T = TypeVar("T")
_LOW_PRIORITY = 5  # added to the niceness


def in_processes(work: Callable[..., T], jobs: Iterable[tuple[Any, ...]], processes: int) -> Iterator[T]:
    """``work(*job)`` of each job as it finishes, in any order, with at most two jobs per process waiting.

    One process or fewer is this one. Otherwise workers are spawned: a fork of a process that has started threads (BLAS,
    a progress bar) may deadlock. A worker that dies raises ``BrokenProcessPool``; workers end when this process does,
    also when it is killed.
    """
    if processes <= 1:
        for job in jobs:
            yield work(*job)
        return
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=follow_parent)
    running: set[Future[T]] = set()
    try:
        for job in jobs:
            running.add(pool.submit(work, *job))
            if len(running) >= 2 * processes:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in finished)
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in finished)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def background_processes(processes: int) -> ProcessPoolExecutor:
    """Workers as those of :func:`in_processes`, of low priority: for what is done ahead while this process works."""
    return ProcessPoolExecutor(max(1, processes), mp_context=get_context("spawn"), initializer=_follow_in_background)


def _follow_in_background() -> None:
    follow_parent()
    if hasattr(os, "nice"):
        os.nice(_LOW_PRIORITY)


def follow_parent() -> None:
    """For a worker: ignore Ctrl-C, because the parent stops its workers; end when the parent does.

    A killed parent cannot tell its workers: they hold both ends of the queue they wait at, and would wait for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait_for_end([sentinel])
    os._exit(1)  # at once: nobody is left to read its results


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt, from malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Keep freed memory and ask for huge pages, before torch makes its first tensor; settings of the user stay.

    Only for whole programs: a library must not decide this for the process it is used in.
    """
    if not sys.platform.startswith("linux"):
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's own switch for huge pages under CPU tensors
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, _LARGEST)
        mallopt(_TOP_PAD, 64 * 2**20)


_SECONDS_FOR_THE_LOCK = 180.0


def end_with_parent() -> None:
    """Ask this process to stop as SIGTERM would, once standard input ends."""

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin: its lock, held here, would abort the interpreter at its end
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def patient_lock(folder: Path, description: str, seconds: float = _SECONDS_FOR_THE_LOCK) -> Iterator[None]:
    """Hold ``folder``. The process of a start that was killed may still be saving: it ends by itself, so wait."""
    deadline = time.monotonic() + seconds
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(folder_lock(folder, description))
                break
            except FolderBusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        yield


def how_it_ended(log: Path, code: int) -> str:
    """How a child that failed ended, and its last line of output."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    message = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    status = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{message.removeprefix('error: ')} ({status})"

"""Work spread over processes, results as they come: what packing, drawing and auditing share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")


def in_processes(work: Callable[..., T], jobs: Iterable[tuple[Any, ...]], processes: int) -> Iterator[T]:
    """``work(*job)`` of each job as it finishes, in any order, with at most two jobs per process waiting.

    One process or fewer is this one. Otherwise workers are spawned: a fork of a process that has started threads (BLAS,
    a progress bar) may deadlock. A worker that dies raises ``BrokenProcessPool``.
    """
    if processes <= 1:
        for job in jobs:
            yield work(*job)
        return
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=leave_ctrl_c)
    running: set[Future[T]] = set()
    try:
        for job in jobs:
            running.add(pool.submit(work, *job))
            if len(running) >= 2 * processes:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def leave_ctrl_c() -> None:
    """For a worker: Ctrl-C is for the parent, which then stops its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

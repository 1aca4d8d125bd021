"""Work spread over processes, results as they come: what packing, drawing and auditing share."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for_end
from typing import Any, TypeVar

T = TypeVar("T")


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
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def follow_parent() -> None:
    """For a worker: Ctrl-C is for the parent, which then stops its workers; the end of the parent is its own.

    A killed parent cannot tell its workers: they hold both ends of the queue they wait at, and would wait for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait_for_end([sentinel])
    os._exit(1)  # at once: what the parent wanted of this process, nobody will read


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

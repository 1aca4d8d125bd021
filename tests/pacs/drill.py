"""A service in its own process that kills itself after a given step, and a sender that repeats what was not taken."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from afire.detect.base import load_detector
from afire.detect.run import detector_hash
from afire.files import write_text
from afire.pacs.service import Service
from tests.commands import start_process
from tests.pacs.films import dataset
from tests.pacs.peers import settings_for, store, wait_for

_PATIENCE = 2.0  # seconds for a peer that was killed to answer; what it took is sent again, which does no harm
STEPS = ("received", "scored", "cleared", "outgoing", "sent", "recorded", "done")
Death = tuple[str, int]
"""After which step, and after how many of them."""


def live(spool: Path, send: str, model: Path, port_file: Path, death: Death | None) -> None:
    """In the new process: a service, until it is killed."""
    torch.set_num_threads(1)
    count = itertools.count(1)

    def observe(event: str, film: str, *, reason: str = "", kind: str = "") -> None:
        if death is not None and event == death[0] and next(count) == death[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    service = Service(settings_for(spool, send), load_detector(model), detector_hash(model), observe)
    service.start()
    write_text(port_file, str(service.port))
    threading.Event().wait()


@contextmanager
def lives(spool: Path, send: str, model: Path, death: Death | None = None) -> Iterator[tuple[BaseProcess, int | None]]:
    """A service in its own process and its port; none if it died before it could listen."""
    port_file = spool.parent / "port"
    port_file.unlink(missing_ok=True)
    process = start_process(live, spool, send, model, port_file, death)
    wait_for(lambda: port_file.exists() or not process.is_alive(), 60)
    try:
        yield process, int(port_file.read_text()) if port_file.exists() else None
    finally:
        process.kill()
        process.join()


class FilmSender:
    """Sends films until each was acknowledged."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.pending = list(numbers)

    def send(self, port: int | None, most: int) -> None:
        """One association, with some of the films that are left."""
        if port is None or not self.pending:
            return
        batch = self.pending[:most]
        statuses = store(port, *(dataset(number) for number in batch), patience=_PATIENCE)
        taken = {number for number, status in zip(batch, statuses, strict=True) if status == 0}
        self.pending = [number for number in self.pending if number not in taken]

    def send_at_once(self, port: int, associations: int) -> None:
        """All that are left, in so many associations side by side, until each was taken."""
        while self.pending:
            shares = [FilmSender(self.pending[first::associations]) for first in range(associations)]
            threads = [threading.Thread(target=share.send, args=(port, len(self.pending))) for share in shares]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.pending = [number for share in shares for number in share.pending]


def die_after_each_step(
    spool: Path, send: str, model: Path, films: FilmSender, between: Callable[[str], None] = lambda _: None
) -> None:
    """A service that is killed after each step once, and gets films meanwhile."""
    for step in STEPS:
        with lives(spool, send, model, (step, 2)) as (process, port):
            films.send(port, 6)
            process.join(30)
            assert process.exitcode == -signal.SIGKILL, f"it did not come to {step}"
        between(step)

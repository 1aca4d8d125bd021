"""What the processes of a study share: they end when their parent does, and no two write one folder.

A child's standard input is a pipe that nobody writes to. It ends when the parent does, however that happened, and the
child then stops as SIGTERM would make it: what saves on a signal saves, and nothing goes on beside the next start.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from afire.files import FolderBusyError, folder_lock

_SECONDS_FOR_THE_LOCK = 180.0


def end_with_parent() -> None:
    """Ask this process to stop as SIGTERM would, once standard input ends."""

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin: its lock, held here, would abort the interpreter at its end
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def patient_lock(folder: Path, what: str, seconds: float = _SECONDS_FOR_THE_LOCK) -> Iterator[None]:
    """Hold ``folder``. The process of a start that was killed may still be saving: it ends by itself, so wait."""
    deadline = time.monotonic() + seconds
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(folder_lock(folder, what))
                break
            except FolderBusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        yield


def how_it_ended(log: Path, code: int) -> str:
    """How a child that failed ended, and the last thing it said."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{last.removeprefix('error: ')} ({how})"

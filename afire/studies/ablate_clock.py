"""How long a cell took over all of its starts, kept beside it so that a kill loses seconds and not minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from afire.errors import UserError
from afire.files import read_json, write_json

CLOCK = "seconds.json"
_SECONDS_BETWEEN_WRITES = 5.0


class CellClock:
    """Seconds spent on each stage of a cell, those of earlier starts included.

    Work that a kill threw away was spent all the same and counts: the sum is what the cell cost.
    """

    def __init__(self, folder: Path, between_writes: float = _SECONDS_BETWEEN_WRITES) -> None:
        self.path, self.between_writes = folder / CLOCK, between_writes
        self._before = _read(self.path)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of the block towards ``name``, written every few seconds while it runs."""
        started, ended = time.monotonic(), threading.Event()
        before = self._before.get(name, 0.0)

        def note() -> None:
            self._before[name] = before + time.monotonic() - started
            write_json(self.path, {stage: round(seconds, 2) for stage, seconds in self._before.items()})

        def keep() -> None:
            while not ended.wait(self.between_writes):
                note()

        writer = threading.Thread(target=keep, daemon=True)
        writer.start()
        try:
            yield
        finally:
            ended.set()
            writer.join()
            note()

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage so far."""
        return {name: round(value, 2) for name, value in self._before.items()}


def _read(path: Path) -> dict[str, float]:
    """What earlier starts spent; nothing where there were none or the file is not ours."""
    try:
        found = read_json(path)
    except UserError:
        return {}
    return {str(k): float(v) for k, v in found.items()} if isinstance(found, dict) else {}

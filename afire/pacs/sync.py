"""What a power cut must not undo: files and names on their way to the disk, several at a time where it can be."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Condition


def sync(path: Path) -> None:
    """A file or the names in a folder, so that a power cut does not undo them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class SharedSync:
    """Syncs a folder for all who ask meanwhile: whoever comes while one is under way waits for the next, together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turn = Condition()
        self._begun = self._finished = 0  # numbers of the last sync that began, and of the last that went well
        self._is_running = False

    def __call__(self) -> None:
        """When this returns, what was renamed in the folder before the call is safe."""
        with self._turn:
            wanted = self._begun + 1
            self._turn.wait_for(lambda: not self._is_running or self._finished >= wanted)
            if self._finished >= wanted:
                return
            self._is_running, self._begun = True, self._begun + 1
            number = self._begun
        went_well = False
        try:
            sync(self._folder)
            went_well = True
        finally:
            with self._turn:
                self._is_running = False
                self._finished = number if went_well else self._finished
                self._turn.notify_all()

"""SIGTERM and SIGINT ask a run to finish its step and save, instead of ending it anywhere."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """``with StopSignals() as stop``: ``stop.received`` is the signal's number once one came, else 0.

    A second Ctrl-C is not held back: whoever presses twice means now.
    """

    _WATCHED = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            for number in self._WATCHED:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

"""Progress with rate and ETA: a bar on a terminal, plain lines elsewhere, silence when used as a library.

The CLI calls :func:`configure` once; library code only calls :func:`track` or :func:`progress`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Literal, Protocol, TypeVar

Mode = Literal["off", "lines", "bar"]
T = TypeVar("T")

_SECONDS_BETWEEN_LINES = 10.0
_mode: Mode = "off"


def configure(mode: Mode) -> None:
    """Choose how progress is shown from now on."""
    global _mode
    _mode = mode


def current_mode() -> Mode:
    """How progress is shown now."""
    return _mode


@contextmanager
def silenced() -> Iterator[None]:
    """Show no progress inside: the caller shows that of the whole work."""
    mode = _mode
    configure("off")
    try:
        yield
    finally:
        configure(mode)


def mode_for_terminal(quiet: bool) -> Mode:
    """``bar`` on a terminal, ``lines`` when standard error goes to a file, ``off`` when quiet."""
    if quiet:
        return "off"
    return "bar" if sys.stderr.isatty() else "lines"


class Progress(Protocol):
    """What the body of ``with progress(...)`` receives."""

    def advance(self, amount: int = 1) -> None: ...


class _Silent:
    def advance(self, amount: int = 1) -> None:
        pass


class _Lines:
    """A line now and then, and one at the end, for log files and CI."""

    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = 0
        self.start = self.last = time.monotonic()

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        now = time.monotonic()
        if now - self.last >= _SECONDS_BETWEEN_LINES:
            self.last = now
            self.show()

    def show(self) -> None:
        seconds = max(time.monotonic() - self.start, 1e-9)
        rate = self.done / seconds
        of_total = f"/{self.total}" if self.total else ""
        unfinished = self.total is not None and 0 < self.done < self.total
        eta = f", {format_seconds((self.total - self.done) / rate)} left" if unfinished and self.total else ""
        sys.stderr.write(f"{self.description}: {self.done}{of_total} {self.unit}, {rate:.1f} {self.unit}/s{eta}\n")
        sys.stderr.flush()


def format_seconds(seconds: float) -> str:
    """``75`` -> ``1:15``; ``3675`` -> ``1:01:15``."""
    total = round(seconds)
    hours, remainder = divmod(total, 3600)
    minutes, secs = divmod(remainder, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


@contextmanager
def progress(description: str, total: int | None = None, unit: str = "items") -> Iterator[Progress]:
    """Show progress while the body runs: ``with progress("packing", n, "films") as bar: bar.advance()``."""
    if _mode == "off":
        yield _Silent()
    elif _mode == "lines":
        lines = _Lines(description, total, unit)
        yield lines
        lines.show()
    else:
        with _bar(description, total, unit) as bar:
            yield bar


def track(items: Iterable[T], description: str, total: int | None = None, unit: str = "items") -> Iterator[T]:
    """Iterate over ``items`` and show how far it is."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(description, total, unit) as bar:
        for item in items:
            yield item
            bar.advance()


@contextmanager
def _bar(description: str, total: int | None, unit: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{speed:.1f} {unit}/s" if speed else f"-- {unit}/s", style="cyan")

    class Bar:
        def advance(self, amount: int = 1) -> None:
            display.advance(task, amount)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeElapsedColumn())
    with RichProgress(*columns, TextColumn("eta"), TimeRemainingColumn(), console=Console(stderr=True)) as display:
        task = display.add_task(description, total=total)
        yield Bar()

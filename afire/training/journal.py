"""Numbers of any run: ``metrics.jsonl`` and TensorBoard for programs, W&B on request, speed, and the live line."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from typing_extensions import Self

from afire import progress
from afire.errors import UserError
from afire.training.run_folder import METRICS

_SECONDS_BETWEEN_LINES = 15.0


class Journal:
    """Writes and shows numbers on the first process; on the others it only keeps time.

    ``films_per_step`` is what one update of all processes looks at; ``wandb`` holds the settings to log there, if any.
    """

    def __init__(
        self,
        out: Path,
        *,
        first_step: int,
        steps: int,
        films_per_step: int,
        main: bool,
        tensorboard: bool = False,
        wandb: Mapping[str, Any] | None = None,
    ) -> None:
        self.out, self.main, self.steps, self.films_per_step = out, main, steps, films_per_step
        self.first_step = self.steps_done = first_step
        self.start = self.last_line = time.perf_counter()
        self._mode = progress.current_mode() if main else "off"
        self._tensorboard, self._wandb_settings = tensorboard, wandb
        self._file: TextIO | None = None
        self._board: Any = None
        self._wandb: Any = None

    def __enter__(self) -> Self:
        self.start = self.last_line = time.perf_counter()
        if self.main:
            self._file = (self.out / METRICS).open("a", encoding="utf-8")
            if self._tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self.out / "tensorboard"), purge_step=self.first_step)
            self._wandb = self._start_wandb() if self._wandb_settings is not None else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mode == "bar":
            sys.stderr.write("\n")
        for writer in (self._file, self._board):
            if writer is not None:
                writer.close()
        if self._wandb is not None:
            self._wandb.finish()

    @property
    def images_per_second(self) -> float:
        """Films of all processes per second since this process began."""
        seconds = max(time.perf_counter() - self.start, 1e-9)
        return (self.steps_done - self.first_step) * self.films_per_step / seconds

    @property
    def time_left(self) -> str:
        """As ``1:15``, at the speed so far."""
        films = (self.steps - self.steps_done) * self.films_per_step
        return progress.format_seconds(films / max(self.images_per_second, 1e-9))

    def data_wait(self, waited: float) -> float:
        """Share of the time spent waiting for data."""
        return min(waited / max(time.perf_counter() - self.start, 1e-9), 1.0)

    def peak_memory(self) -> int:
        """Largest memory in use so far: of the GPU if there is one, else of this process."""
        if torch.cuda.is_available():
            return int(torch.cuda.max_memory_allocated())
        try:
            import resource
        except ImportError:  # Windows
            return 0
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def line_is_due(self, step: int) -> bool:
        """Whether the live line of ``step`` should be shown: always in a terminal, now and then in a log."""
        now = time.perf_counter()
        last = step == self.steps
        due = self._mode == "bar" or (self._mode == "lines" and (last or now - self.last_line > _SECONDS_BETWEEN_LINES))
        if due:
            self.last_line = now
        return due

    def show(self, line: str) -> None:
        """The live line: written over the one before in a terminal, below it in a log."""
        if self._mode == "bar":
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\033[K{line[:width]}")
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def say(self, sentence: str) -> None:
        """A line that stays."""
        if self._mode == "off":
            return
        start = "\r\033[K" if self._mode == "bar" else ""
        sys.stderr.write(f"{start}{sentence}\n")
        sys.stderr.flush()

    def coloured(self, text: str, code: str) -> str:
        """``text`` in a colour where a terminal shows it."""
        return f"{code}{text}\033[0m" if self._mode == "bar" else text

    def write(self, record: Mapping[str, Any], step: int) -> None:
        """One line of ``metrics.jsonl``; its floats also go to TensorBoard and W&B."""
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in record.items() if isinstance(value, float)}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(numbers), step=step)

    def _start_wandb(self) -> Any:
        try:
            import wandb
        except ImportError:
            raise UserError("run.wandb is on, but wandb is not installed; pip install 'afire[wandb]'.") from None
        return wandb.init(
            project="afire", dir=str(self.out), name=self.out.name, config=dict(self._wandb_settings or {})
        )

"""Numbers of a run: one live line for people, ``metrics.jsonl`` and TensorBoard for programs, W&B on request."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

from afire import progress
from afire.config import Config
from afire.errors import UserError
from afire.training.health import Health
from afire.training.run_folder import METRICS
from afire.training.schedules import Schedules, StepSettings

_SECONDS_BETWEEN_LINES = 15.0
_COLOURS = {"green": "\033[32m", "amber": "\033[33m", "red": "\033[31m"}

logger = logging.getLogger("afire")


class Metrics:
    """Writes and shows the numbers of a run on the first process; on the others it only keeps time."""

    def __init__(self, out: Path, config: Config, schedules: Schedules, first_step: int, main: bool) -> None:
        self.out, self.config, self.schedules, self.main = out, config, schedules, main
        self.first_step = self.steps_done = first_step
        self.start = self.last_line = time.perf_counter()
        self._mode = progress.current_mode() if main else "off"
        self._file: TextIO | None = None
        self._board: Any = None
        self._wandb: Any = None

    def __enter__(self) -> Metrics:
        self.start = self.last_line = time.perf_counter()
        if self.main:
            from torch.utils.tensorboard import SummaryWriter

            self._file = (self.out / METRICS).open("a", encoding="utf-8")
            self._board = SummaryWriter(str(self.out / "tensorboard"), purge_step=self.first_step)
            self._wandb = self._start_wandb() if self.config.run.wandb else None
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
        """Films of all processes and views per second since this process began."""
        seconds = max(time.perf_counter() - self.start, 1e-9)
        films = (self.steps_done - self.first_step) * self.schedules.films_per_step * self.config.lesions.views
        return films / seconds

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

    def step(
        self, step: int, losses: Mapping[str, float], settings: StepSettings, norm: float, waited: float, bad: int
    ) -> None:
        """Note one update; ``step`` counts the updates that are done."""
        self.steps_done = step
        if not self.main:
            return
        record = {
            "step": step,
            **losses,
            "gradient_norm": norm,
            "learning_rate": settings.learning_rate,
            "weight_decay": settings.weight_decay,
            "teacher_momentum": settings.teacher_momentum,
            "teacher_temperature": settings.teacher_temperature,
            "images_per_second": self.images_per_second,
            "data_wait": self.data_wait(waited),
        }
        self._write(record, step)
        now = time.perf_counter()
        last = step == self.schedules.steps
        if self._mode == "bar" or (self._mode == "lines" and (last or now - self.last_line > _SECONDS_BETWEEN_LINES)):
            self.last_line = now
            self._show(self._line(step, losses, settings, record["data_wait"], bad))

    def epoch(self, step: int, epoch: int, health: Health | None, found: Mapping[str, float]) -> None:
        """Note the end of an epoch: health, and what observers found."""
        record: dict[str, Any] = {"step": step, "epoch": epoch, **found}
        if health is not None:
            colour, reason = health.verdict()
            record |= {f"health/{name}": value for name, value in health.as_dict().items()}
            record |= {"health": colour, "health_reason": reason}
            self._say(epoch, colour, reason, health, found)
        self._write(record, step)

    def _line(self, step: int, losses: Mapping[str, float], settings: StepSettings, wait: float, bad: int) -> str:
        speed = self.images_per_second
        per_step = self.schedules.films_per_step * self.config.lesions.views
        left = progress.format_seconds((self.schedules.steps - step) * per_step / max(speed, 1e-9))
        epoch = (step - 1) // self.schedules.steps_per_epoch + 1
        parts = " ".join(f"{name} {value:.3f}" for name, value in losses.items() if name != "total" and value != 0)
        skipped = f" | {bad} bad films skipped" if bad else ""
        return (
            f"epoch {epoch}/{self.config.training.epochs} step {step}/{self.schedules.steps} | "
            f"loss {losses['total']:.3f} ({parts}) | lr {settings.learning_rate:.1e} | {speed:.0f} images/s | "
            f"{left} left | data wait {wait:.1%} | {self.peak_memory() / 2**30:.1f} GB{skipped}"
        )

    def _show(self, line: str) -> None:
        if self._mode == "bar":
            import shutil

            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\033[K{line[:width]}")
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def _say(self, epoch: int, colour: str, reason: str, health: Health, found: Mapping[str, float]) -> None:
        if self._mode == "off":
            return
        numbers = (
            f"clusters in use {1 - health.dead_clusters:.0%}, rank {health.effective_rank:.0f}, "
            f"agreement {health.agreement:.0%}, film dependence {health.image_dependence:.0%}, "
            f"abnormal {health.abnormal_share:.0%}"
        )
        probes = "".join(f", {name} {value:.3f}" for name, value in found.items())
        mark = f"{_COLOURS[colour]}{colour}\033[0m" if self._mode == "bar" else colour
        start = "\r\033[K" if self._mode == "bar" else ""
        sys.stderr.write(f"{start}health after epoch {epoch}: {mark}: {reason} ({numbers}{probes})\n")
        sys.stderr.flush()

    def _write(self, record: Mapping[str, Any], step: int) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in record.items() if isinstance(value, float)}
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(numbers), step=step)

    def _start_wandb(self) -> Any:
        try:
            import wandb
        except ImportError:
            raise UserError("run.wandb is on, but wandb is not installed; pip install 'afire[wandb]'.") from None
        return wandb.init(project="afire", dir=str(self.out), name=self.out.name, config=self.config.model_dump())

"""The numbers of a run: ``metrics.jsonl`` and ``run.tracking`` for programs, a live line and a page for people."""

from __future__ import annotations

import json
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, TextIO

import torch
from typing_extensions import Self

from afire import progress
from afire._version import __version__
from afire.config import Config
from afire.methods import METHODS
from afire.methods.health import Health
from afire.training.run_folder import METRICS
from afire.training.tracking import Trackers

_SECONDS_BETWEEN_LINES = 15.0
_COLOURS = {"green": "\033[32m", "amber": "\033[33m", "red": "\033[31m"}


class Journal(ABC):
    """Writes and shows numbers on the first process; on the others it only keeps time.

    ``films_per_step`` is what one update of all processes looks at; ``tracking`` says where numbers go beside
    ``metrics.jsonl``, and ``settings`` are what is said there about the run.
    """

    @abstractmethod
    def record(self, losses: Mapping[str, float]) -> Mapping[str, float]:
        """The losses of an update as ``metrics.jsonl`` has them."""

    @abstractmethod
    def line(self, step: int, losses: Mapping[str, float], rates: Mapping[str, float], wait: float) -> str:
        """What the live line says after an update."""

    def __init__(
        self,
        out: Path,
        *,
        first_step: int,
        epochs: int,
        steps_per_epoch: int,
        films_per_step: int,
        main: bool,
        tracking: Sequence[str] = (),
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.out, self.main, self.films_per_step = out, main, films_per_step
        self.epochs, self.steps_per_epoch, self.steps = epochs, steps_per_epoch, epochs * steps_per_epoch
        self.first_step = self.steps_done = first_step
        self.start = self.last_line = time.perf_counter()
        self._mode = progress.current_mode() if main else "off"
        self._tracking, self._settings = tracking, settings
        self._file: TextIO | None = None
        self._trackers: Trackers | None = None

    def __enter__(self) -> Self:
        if self.main:
            self._file = (self.out / METRICS).open("a", encoding="utf-8")
            self._trackers = Trackers(self._tracking, self.out, self.first_step, self._settings)
        self.start = self.last_line = time.perf_counter()  # to open what tracks a run is part of its start
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mode == "bar":
            sys.stderr.write("\n")
        if self._file is not None:
            self._file.close()
        if self._trackers is not None:
            self._trackers.close(failed=kind is not None)

    def step(
        self,
        step: int,
        losses: Mapping[str, float],
        rates: Mapping[str, float],
        norm: float,
        waited: float,
        bad: int,
    ) -> None:
        """Note one update; ``step`` counts the updates that are done, ``bad`` the films that were skipped."""
        self.steps_done = step
        if not self.main:
            return
        wait = self.data_wait(waited)
        record = {"step": step, **self.record(losses), "gradient_norm": norm, **rates}
        self.write({**record, "images_per_second": self.images_per_second, "data_wait": wait}, step)
        if self.line_is_due(step):
            skipped = f" | {bad} bad films skipped" if bad else ""
            self.show(self.line(step, losses, rates, wait) + skipped)

    def position(self, step: int) -> str:
        """``epoch 2/10 step 15/100``."""
        return f"epoch {(step - 1) // self.steps_per_epoch + 1}/{self.epochs} step {step}/{self.steps}"

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

    def say(self, message: str) -> None:
        """Print a line that stays."""
        if self._mode == "off":
            return
        start = "\r\033[K" if self._mode == "bar" else ""
        sys.stderr.write(f"{start}{message}\n")
        sys.stderr.flush()

    def coloured(self, text: str, code: str) -> str:
        """``text`` in a colour where a terminal shows it."""
        return f"{code}{text}\033[0m" if self._mode == "bar" else text

    def write(self, record: Mapping[str, Any], step: int) -> None:
        """One line of ``metrics.jsonl``; its floats also go to what tracks the run."""
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in record.items() if isinstance(value, float)}
        if self._trackers is not None:
            self._trackers.log(numbers, step)


class PretrainingJournal(Journal):
    """The journal of a pre-training run; its films per second count every view."""

    def record(self, losses: Mapping[str, float]) -> Mapping[str, float]:
        return losses

    def line(self, step: int, losses: Mapping[str, float], rates: Mapping[str, float], wait: float) -> str:
        terms = " ".join(f"{name} {value:.3f}" for name, value in losses.items() if name != "total" and value != 0)
        return (
            f"{self.position(step)} | loss {losses['total']:.3f} ({terms}) | lr {rates['learning_rate']:.1e} | "
            f"{self.images_per_second:.0f} images/s | {self.time_left} left | data wait {wait:.1%} | "
            f"{self.peak_memory() / 2**30:.1f} GB"
        )

    def epoch(self, step: int, epoch: int, health: Health | None, numbers: Mapping[str, float]) -> None:
        """Note the end of an epoch: health, and the numbers of observers."""
        record: dict[str, Any] = {"step": step, "epoch": epoch, **numbers}
        if health is not None:
            record |= {f"health/{name}": value for name, value in health.numbers.items()}
            record |= {"health": health.colour, "health_reason": health.reason}
            probes = "".join(f", {name} {value:.3f}" for name, value in numbers.items())
            mark = self.coloured(health.colour, _COLOURS[health.colour])
            self.say(f"health after epoch {epoch}: {mark}: {health.reason} ({health.shown}{probes})")
        self.write(record, step)


class TaskJournal(Journal):
    """The journal of a run that learns from labels."""

    best = ""

    def record(self, losses: Mapping[str, float]) -> Mapping[str, float]:
        return {"loss": sum(losses.values()), **losses}

    def line(self, step: int, losses: Mapping[str, float], rates: Mapping[str, float], wait: float) -> str:
        return (
            f"{self.out.parent.name}/{self.out.name} {self.position(step)} | "
            f"loss {sum(losses.values()):.3f}{self.best} | lr {rates['learning_rate']:.1e} | "
            f"{self.images_per_second:.0f} images/s | {self.time_left} left at most | data wait {wait:.1%}"
        )

    def epoch(self, step: int, epoch: int, metric: str, value: float, better: bool, stale: int) -> None:
        """Note the validation result of an epoch."""
        self.write({"step": step, "epoch": epoch, f"val/{metric}": value, "better": better, "stale": stale}, step)
        if better:
            self.note_best(metric, value, epoch)

    def note_best(self, metric: str, value: float, epoch: int) -> None:
        """Show the best value in the live line from now on."""
        self.best = f" | best {metric} {value:.3f} (epoch {epoch})"


def run_page(config: Config, data: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The text of ``README.md`` of a run: how it ended."""
    losses = ", ".join(f"{name} {value:.4f}" for name, value in summary["losses"].items())
    colour, reason = summary["health"]
    encoder, epochs = config.encoder, config.training.epochs
    is_method = config.method in METHODS  # else the networks are a detector's own, which need not read ``encoder``
    trains = "A pre-training run" if is_method else f"The training of a detector ({config.method})"
    command = "pretrain" if is_method else "detect fit"
    method = METHODS.get(config.method)
    kind = "films with labels" if method is not None and method.learns_from_labels else "normal films"
    films = f"{data['used']:,} {kind} of {data['films']:,} ({data['source']}), hash `{data['hash'][:12]}`"
    rows = {
        "data": films if method is None or method.trains else "none: the weights are those it was started from",
        "films": f"{config.image.size} px",
        "encoder": f"width {encoder.width}, depth {encoder.depth}, patch {encoder.patch_size}"
        + (", convolutional stem" if encoder.stem == "conv" else ""),
        "parameters": f"{summary['parameters']:,} trained",
        "losses at the end": losses,
        "health": f"{colour}: {reason}",
        "speed": f"{summary['images_per_second']:.1f} images/s on {summary['processes']} process(es)",
        "waiting for data": f"{summary['data_wait']:.1%} of the time",
        "bad films skipped": summary["bad_films"],
    }
    board = " and `tensorboard/`" if "tensorboard" in config.run.tracking else ""
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if is_method or name != "encoder")
    return f"""# {trains}, afire {__version__}

Status: **{summary["status"]}** at step {summary["step"]:,} of {summary["steps"]:,} (epoch {summary["epoch"]}/{epochs}).

| | |
|---|---|
{table}

- `config.yaml` every setting; `environment.json` versions, machine and commit; `data.json` which films
- `metrics.jsonl`{board} numbers by step; `pictures/` restorations and prototypes by epoch
- `checkpoints/` the newest checkpoints; go on with `afire {command} --resume` and the same arguments

Research software, not a medical device.
"""

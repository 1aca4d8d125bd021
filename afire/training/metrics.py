"""Numbers of a pre-training run: one live line for people, and what the journal keeps for programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from afire.config import Config
from afire.training.health import Health
from afire.training.journal import Journal
from afire.training.schedules import Schedules, StepSettings

_COLOURS = {"green": "\033[32m", "amber": "\033[33m", "red": "\033[31m"}


class Metrics(Journal):
    """The journal of a pre-training run; its films per second count every view."""

    def __init__(self, out: Path, config: Config, schedules: Schedules, first_step: int, main: bool) -> None:
        super().__init__(
            out,
            first_step=first_step,
            steps=schedules.steps,
            films_per_step=schedules.films_per_step * config.lesions.views,
            main=main,
            tensorboard=True,
            wandb=config.model_dump() if config.run.wandb else None,
        )
        self.config, self.schedules = config, schedules

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
        self.write(record, step)
        if self.line_is_due(step):
            self.show(self._line(step, losses, settings, record["data_wait"], bad))

    def epoch(self, step: int, epoch: int, health: Health | None, found: Mapping[str, float]) -> None:
        """Note the end of an epoch: health, and what observers found."""
        record: dict[str, Any] = {"step": step, "epoch": epoch, **found}
        if health is not None:
            colour, reason = health.verdict()
            record |= {f"health/{name}": value for name, value in health.as_dict().items()}
            record |= {"health": colour, "health_reason": reason}
            self._say_health(epoch, colour, reason, health, found)
        self.write(record, step)

    def _line(self, step: int, losses: Mapping[str, float], settings: StepSettings, wait: float, bad: int) -> str:
        epoch = (step - 1) // self.schedules.steps_per_epoch + 1
        parts = " ".join(f"{name} {value:.3f}" for name, value in losses.items() if name != "total" and value != 0)
        skipped = f" | {bad} bad films skipped" if bad else ""
        return (
            f"epoch {epoch}/{self.config.training.epochs} step {step}/{self.steps} | "
            f"loss {losses['total']:.3f} ({parts}) | lr {settings.learning_rate:.1e} | "
            f"{self.images_per_second:.0f} images/s | {self.time_left} left | data wait {wait:.1%} | "
            f"{self.peak_memory() / 2**30:.1f} GB{skipped}"
        )

    def _say_health(self, epoch: int, colour: str, reason: str, health: Health, found: Mapping[str, float]) -> None:
        numbers = (
            f"clusters in use {1 - health.dead_clusters:.0%}, rank {health.effective_rank:.0f}, "
            f"agreement {health.agreement:.0%}, film dependence {health.image_dependence:.0%}, "
            f"abnormal {health.abnormal_share:.0%}"
        )
        probes = "".join(f", {name} {value:.3f}" for name, value in found.items())
        mark = self.coloured(colour, _COLOURS[colour])
        self.say(f"health after epoch {epoch}: {mark}: {reason} ({numbers}{probes})")

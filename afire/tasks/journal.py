"""Numbers of a run that learns from labels: the live line, and what the journal keeps for programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from afire.training.journal import Journal


class TaskJournal(Journal):
    """The numbers of a supervised run."""

    def __init__(
        self, out: Path, *, first_step: int, steps_per_epoch: int, epochs: int, films_per_step: int, main: bool
    ) -> None:
        super().__init__(
            out, first_step=first_step, steps=epochs * steps_per_epoch, films_per_step=films_per_step, main=main
        )
        self.epochs, self.steps_per_epoch = epochs, steps_per_epoch
        self.name = f"{out.parent.name}/{out.name}"
        self.best = ""

    def update(self, step: int, losses: Mapping[str, float], rate: float, norm: float, waited: float, bad: int) -> None:
        """Note one update; ``step`` counts the updates that are done."""
        self.steps_done = step
        if not self.main:
            return
        total, wait = sum(losses.values()), self.data_wait(waited)
        record = {"step": step, "loss": total, **losses, "gradient_norm": norm, "learning_rate": rate}
        self.write({**record, "images_per_second": self.images_per_second, "data_wait": wait}, step)
        if self.line_is_due(step):
            epoch = (step - 1) // self.steps_per_epoch + 1
            skipped = f" | {bad} bad films skipped" if bad else ""
            self.show(
                f"{self.name} epoch {epoch}/{self.epochs} step {step}/{self.steps} | loss {total:.3f}{self.best} | "
                f"lr {rate:.1e} | {self.images_per_second:.0f} images/s | {self.time_left} left at most | "
                f"data wait {wait:.1%}{skipped}"
            )

    def epoch(self, step: int, epoch: int, metric: str, value: float, better: bool, stale: int) -> None:
        """Note the validation result of an epoch."""
        self.write({"step": step, "epoch": epoch, f"val/{metric}": value, "better": better, "stale": stale}, step)
        if better:
            self.note_best(metric, value, epoch)

    def note_best(self, metric: str, value: float, epoch: int) -> None:
        """What the live line says from now on."""
        self.best = f" | best {metric} {value:.3f} (epoch {epoch})"

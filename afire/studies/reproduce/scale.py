"""How much is run: the paper's protocol, a quick version of it, or minutes on the phantom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from afire.errors import UserError

# Settings may be meant for one kind of command: --set finetune.training.epochs=3.
TASKS = ("finetune", "segment", "detect", "ablate")


@dataclass(frozen=True)
class Scale:
    """Presets, settings, seeds, labelling ratios and folds of all steps. ``settings`` are those of the pre-training."""

    name: str
    preset: str
    seeds: tuple[int, ...]
    fractions: tuple[float, ...]
    folds: int
    settings: tuple[str, ...] = ()
    finetune: tuple[str, ...] = ()
    segment: tuple[str, ...] = ()
    detect: tuple[str, ...] = ()
    ablate: tuple[str, ...] = ()
    quick_recipe: bool = False  # the recipe `quick` instead of the paper's for its set
    films: int = 0  # of the phantom
    drawn_size: int = 0

    def changed(
        self,
        preset: str | None = None,
        overrides: Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        fractions: Sequence[float] | None = None,
        folds: int | None = None,
        films: int | None = None,
    ) -> Scale:
        """The same with what a user asked for; ``overrides`` are pre-training's unless they start with a task."""
        scale = replace(
            self,
            # Settings of ours were made for our preset; with another one they would mean something else.
            preset=preset or self.preset,
            settings=self.settings if preset in (None, self.preset) else (),
            seeds=tuple(seeds) if seeds is not None else self.seeds,
            fractions=tuple(fractions) if fractions is not None else self.fractions,
            folds=self.folds if folds is None else folds,
            films=self.films if films is None else films,
        )
        for text in overrides:
            task, dot, rest = text.strip().partition(".")
            if task in TASKS and dot:
                scale = replace(scale, **{task: (*getattr(scale, task), rest)})  # type: ignore[arg-type]
            else:
                scale = replace(scale, settings=(*scale.settings, text.strip()))
        return scale


PAPER = Scale("paper", "paper", (0, 1, 2), (1, 10, 100), 5)
QUICK = Scale(
    "quick",
    "small",
    (0, 1),
    (1, 10, 100),
    0,
    settings=("training.epochs=10",),
    ablate=("training.epochs=5",),
    finetune=("training.epochs=3",),
    segment=("training.epochs=10",),
    detect=("adapt.epochs=5",),
    quick_recipe=True,
)
PHANTOM = Scale(
    "phantom",
    "tiny",
    (0, 1),
    (10, 100),
    2,
    settings=("image.size=128", "training.epochs=20", "run.picture_epochs=20"),
    ablate=("training.epochs=8",),
    finetune=("training.epochs=6",),
    segment=("training.epochs=6", "training.learning_rate=1e-3", "training.batch_size=32"),
    detect=("adapt.epochs=4",),
    films=800,
    drawn_size=160,
)


def scale_for(on: str, quick: bool) -> Scale:
    """The scale that a set starts from."""
    if on == "phantom":
        if quick:
            raise UserError("--quick is for real films; the phantom is quick as it is.")
        return PHANTOM
    return QUICK if quick else PAPER

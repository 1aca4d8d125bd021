"""Options that the task commands share, and how their lists are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from afire.config import Config

Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        help="A run, a bundle, hf://owner/name, a file (timm, DINO, MAE, Hugging Face, original AFiRe) or random.",
        metavar="WEIGHTS",
    ),
]
Data = Annotated[Path, typer.Option("--data", help="A pack, a manifest (.parquet or .csv) or a folder of films.")]
SplitFile = Annotated[
    Path | None,
    typer.Option("--split", help="A split file; without it the official lists, or a split drawn by patient."),
]
Labels = Annotated[
    str | None,
    typer.Option("--labels", help="Labels, separated by commas; abnormal means not normal. Default: all findings."),
]
Seeds = Annotated[str, typer.Option("--seeds", help="Seeds, by commas; {seed} in --weights is a run for each.")]
Fractions = Annotated[str, typer.Option("--fraction", help="Percent of the training labels, separated by commas.")]
Folds = Annotated[int, typer.Option("--folds", help="Grouped k-fold over all films instead of one split; 0 = off.")]
Name = Annotated[str | None, typer.Option("--name", help="What tables call this result.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a result that is already in --out.")]
Network = Annotated[str, typer.Option("--network", help="Which of a run's networks: teacher or student.")]


def parse_seeds(text: str) -> list[int]:
    """``0,1,2`` -> ``[0, 1, 2]``."""
    from afire.errors import UserError

    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise UserError(f"--seeds {text!r} is not a list of whole numbers such as 0,1,2.")
    return seeds


def parse_fractions(text: str) -> list[float]:
    """``1,10,100`` percent -> ``[0.01, 0.1, 1.0]``."""
    from afire.errors import UserError

    try:
        fractions = [float(word) / 100 for word in text.split(",")]
    except ValueError:
        fractions = []
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
        raise UserError(f"--fraction {text!r} is not a list of percentages above 0 and up to 100, such as 1,10,100.")
    return fractions


def parse_labels(text: str | None) -> list[str] | None:
    """``Mass, Nodule`` -> ``["Mass", "Nodule"]``."""
    if text is None:
        return None
    return [word.strip() for word in text.split(",") if word.strip()] or None


def asked_config(preset: str | None, file: Path | None, overrides: list[str] | None) -> Config | None:
    """The settings the user gave, or None where no option gave any: a run brings its own."""
    from afire.config import load_config

    return load_config(preset, file, overrides or ()) if preset or file or overrides else None


def fraction_folder(out: Path, fraction: float, several: bool) -> Path:
    """Where a label fraction's result goes: ``OUT`` itself, or ``OUT/10pct`` when there are several."""
    return out / f"{100 * fraction:g}pct" if several else out

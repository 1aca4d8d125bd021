"""Options that several commands share, so that they are spelt and explained once, and how they are read."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    pass


EXAMPLE_STYLE = {"help_option_names": ["-h", "--help"]}


def print_version(show: bool) -> None:
    if show:
        from afire._version import __version__

        typer.echo(f"afire {__version__}")
        raise typer.Exit


def _configure_output(quiet: bool, verbose: bool) -> None:
    from afire import progress

    progress.configure(progress.mode_for_terminal(quiet))
    level = logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("afire").setLevel(level)


def _on_quiet(quiet: bool) -> bool:
    _configure_output(quiet, verbose=False)
    return quiet


def _on_verbose(verbose: bool) -> bool:
    if verbose:
        _configure_output(quiet=False, verbose=True)
    return verbose


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.", callback=_on_quiet)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more.", callback=_on_verbose)]
Seed = Annotated[int, typer.Option("--seed", help="Every random choice follows from it.", min=0)]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option("--device", help="Where to compute.")]
Root = Annotated[Path | None, typer.Option("--root", help="Folder that the manifest's paths start from.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change one setting: key.sub=value. Repeat for more; `afire config` lists them."),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        help="How long to train: epochs follow from the speed, measured once at the start.",
        min=0.01,
    ),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
Preset = Annotated[
    Literal["paper", "original", "large", "huge", "small", "tiny", "residual"] | None,
    typer.Option("--preset", help="Settings to start from."),
]
# Repeated from afire.config, which costs an import of pydantic; a test holds the two together.
Fit = Literal["squash", "letterbox", "crop"]
Voi = Literal["auto", "lut", "window", "none"]


def is_first_process() -> bool:
    """Whether this is the only process of a command, or the one of several that prints."""
    return os.environ.get("RANK", "0") == "0"


def console(stderr: bool = False):  # type: ignore[no-untyped-def]
    """A rich console; made late because importing rich's is most of the cost of ``--help``."""
    from rich.console import Console

    return Console(stderr=stderr)


def print_line(text: object) -> None:
    """A line as it is: a path stays one that can be copied, and brackets in it are no markup."""
    console().print(str(text), soft_wrap=True, markup=False, highlight=False)


Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        help="A run, a bundle, hf://owner/name, timm:NAME, a file (timm, DINO, MAE, Hugging Face, original AFiRe) or "
        "random.",
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
Plan = Annotated[bool, typer.Option("--plan", help="Only say what would be run.")]
Name = Annotated[str | None, typer.Option("--name", help="What tables call this result.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a result that is already in --out.")]
Network = Annotated[
    str | None,
    typer.Option("--network", help="Which of a run's networks, such as AFiRe's student. Default: the one it exports."),
]
Shards = Annotated[
    int | None, typer.Option("--shards", help="In so many shards, which several machines can compute.", min=1)
]
ShardOf = Annotated[
    str | None, typer.Option("--shard", help="Compute this shard alone, from 0/N to N-1/N.", metavar="I/N")
]
Finish = Annotated[
    bool, typer.Option("--finish", help="All shards are there: check them, and write what is made of them.")
]
Engine = Annotated[
    Literal["local", "ray"], typer.Option("--engine", help="ray: every shard is a task of a Ray cluster.")
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="The Ray cluster; without it one is started here.", metavar="HOST:PORT"),
]


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


def fraction_folder(out: Path, fraction: float, several: bool) -> Path:
    """Where a label fraction's result goes: ``OUT`` itself, or ``OUT/10pct`` when there are several."""
    return out / f"{100 * fraction:g}pct" if several else out

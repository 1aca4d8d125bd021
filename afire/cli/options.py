"""Options that several commands share, so that they are spelt and explained once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

EXAMPLE_STYLE = {"help_option_names": ["-h", "--help"]}


def print_version(show: bool) -> None:
    if show:
        from afire import __version__

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
Set = Annotated[list[str] | None, typer.Option("--set", help="Change one setting: key.sub=value. Repeat for more.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
Preset = Annotated[
    Literal["paper", "original", "small", "tiny"] | None, typer.Option("--preset", help="Settings to start from.")
]
# Repeated from afire.config, which costs an import of pydantic; a test holds the two together.
Fit = Literal["squash", "letterbox", "crop"]
Voi = Literal["auto", "lut", "window", "none"]


def console(stderr: bool = False):  # type: ignore[no-untyped-def]
    """A rich console; made late because importing rich's is most of the cost of ``--help``."""
    from rich.console import Console

    return Console(stderr=stderr)

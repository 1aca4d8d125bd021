"""``afire config``: the resolved settings as YAML that reads back as itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afire.cli.options import ConfigFile, Preset, Set


def config(
    preset: Preset = None,
    config_file: ConfigFile = None,
    overrides: Set = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write to this file instead of the screen.")] = None,
) -> None:
    """Print the settings as YAML with their meaning.

    Example: [cyan]afire config --preset small --set training.epochs=10 --out mine.yaml[/cyan]
    """
    from afire.config import load_config, to_yaml
    from afire.files import write_text

    text = to_yaml(load_config(preset, config_file, overrides or ()))
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)

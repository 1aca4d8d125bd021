"""``afire config``: the resolved settings as YAML that reads back as itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from afire.cli.options import ConfigFile, Preset, Set


def config(
    task: Annotated[
        Literal["pretrain", "finetune", "segment"],
        typer.Option("--task", help="Whose settings: the model's or a task's."),
    ] = "pretrain",
    preset: Preset = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Settings of a task: nih14, chexpert5, quick; siim, lungs.")
    ] = None,
    config_file: ConfigFile = None,
    overrides: Set = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write to this file instead of the screen.")] = None,
) -> None:
    """Print the settings as YAML with their meaning.

    Example: [cyan]afire config --preset small --set training.epochs=10 --out mine.yaml[/cyan]

    Settings of a task: afire config --task finetune --recipe nih14 --out mine.yaml, then --recipe mine.yaml.
    """
    from afire.config import Section, load_config, to_yaml
    from afire.errors import UserError
    from afire.files import write_text
    from afire.task_config import load_task_config

    settings: Section
    if task == "pretrain":
        if recipe is not None:
            raise UserError("--recipe is for --task finetune or segment; the model's settings start from --preset.")
        settings = load_config(preset, config_file, overrides or ())
    else:
        if preset is not None:
            raise UserError("--preset is for the model's settings; a task's start from --recipe.")
        settings = load_task_config(task, recipe, config_file, overrides or ())
    text = to_yaml(settings)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)

"""``afire data``: build, check, split and pack a dataset, or draw the phantom."""

from __future__ import annotations

import typer

from afire.cli.pack import pack
from afire.cli.split import split

app = typer.Typer(no_args_is_help=True, help="Build, check, split and pack a dataset, or draw the phantom.")
app.command("split")(split)
app.command("pack")(pack)

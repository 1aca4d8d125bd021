"""``afire data``: build, check, split and pack a dataset, or draw the phantom."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Build, check, split and pack a dataset, or draw the phantom.")

"""``afire lesions``: look at the synthetic lesions."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Synthetic lesions: look at what the model is trained to find.")

"""``afire detect``: fit a detector on normal films, evaluate it, use it."""

from __future__ import annotations

import typer

from afire.cli.detect.evaluate import evaluate
from afire.cli.detect.fit import fit
from afire.cli.detect.run import run

app = typer.Typer(
    no_args_is_help=True,
    help="Find abnormal films with a detector that has seen normal ones only.",
    epilog="Research software, not a medical device.",
)
app.command("fit")(fit)
app.command("eval")(evaluate)
app.command("run")(run)

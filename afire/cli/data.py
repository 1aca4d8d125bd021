"""``afire data``: build, join, check, split and pack a dataset, or draw the phantom."""

from __future__ import annotations

import typer

from afire.cli.build import build_app
from afire.cli.check import check
from afire.cli.join import join
from afire.cli.pack import pack
from afire.cli.phantom import phantom
from afire.cli.split import split
from afire.cli.stats import stats

app = typer.Typer(no_args_is_help=True, help="Build, join, check, split and pack a dataset, or draw the phantom.")
app.add_typer(build_app, name="build")
app.command("stats")(stats)
app.command("join")(join)
app.command("split")(split)
app.command("pack")(pack)
app.command("check")(check)
app.command("phantom")(phantom)

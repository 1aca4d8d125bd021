"""``afire push``: a bundle to the Hugging Face hub, or into this machine's cache of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afire.cli.options import Quiet, Verbose


def push(
    bundle: Annotated[Path, typer.Argument(help="A bundle that `afire export` wrote.", metavar="BUNDLE")],
    target: Annotated[str, typer.Argument(help="hf://owner/name, with @branch for another branch.", metavar="TARGET")],
    cache: Annotated[
        bool, typer.Option("--cache", help="No network: put it into this machine's cache, where hf:// finds it.")
    ] = False,
    public: Annotated[
        bool, typer.Option("--public", help="A new repository is for everybody; default: private.")
    ] = False,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Upload a whole bundle; its hashes are checked first. Log in before with `hf auth login`.

    Example: [cyan]afire push nih-bundle hf://my-hospital/afire-nih[/cyan]

    Then, anywhere: afire probe --weights hf://my-hospital/afire-nih --data pack --out results/nih
    """
    import logging

    from afire.bundle.card import UNSPECIFIED
    from afire.cli.options import console
    from afire.weights import hub
    from afire.weights.bundle import open_bundle

    name = hub.parse_hub_name(target)
    opened = open_bundle(bundle)
    if opened.about.get("licence") == UNSPECIFIED:
        logging.getLogger("afire").warning("the card says no licence; export again with --licence to say one")
    if cache:
        where = str(hub.install(bundle, name, opened.hash))
    else:
        where = hub.push(bundle, name, private=not public, message=message)
    if not quiet:
        console().print(f"{name}: {where}", soft_wrap=True, markup=False, highlight=False)

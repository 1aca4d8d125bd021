"""``afire verify``: is a bundle whole, and does it say here what it said where it was exported?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afire.cli.options import Quiet, Verbose

if TYPE_CHECKING:
    from afire.bundle import Check


def verify(
    bundle: Annotated[str, typer.Argument(help="A bundle, or hf://owner/name.", metavar="BUNDLE")],
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check every hash of a bundle, then recompute its expected outputs with each library that is installed.

    Ends with 0 when all are equal, 1 when one is not, 2 when the bundle is not whole.

    Example: [cyan]afire verify nih-bundle[/cyan]
    """
    from afire.bundle import verify_bundle
    from afire.cli.options import console
    from afire.weights.bundle import open_bundle, unlisted_files
    from afire.weights.hub import local_path

    screen = console()
    folder: Path = local_path(bundle)
    opened = open_bundle(folder)

    def say(line: str) -> None:
        if not quiet:
            screen.print(line, soft_wrap=True, markup=False, highlight=False)

    say(f"files: every SHA-256 as exported by afire {opened.about['afire']}; hash {opened.hash[:16]}")
    beside = unlisted_files(folder)
    if beside:
        say(f"not part of the bundle, and read by nothing: {', '.join(beside[:5])}")
    checks = []
    for check in verify_bundle(opened):
        checks.append(check)
        say(_line(check, verbose))
    wrong = [check.backend for check in checks if check.equal is False]
    if wrong:
        typer.echo(f"not equal: {', '.join(wrong)}", err=True)
        raise typer.Exit(1)
    say("equal")


def _line(check: Check, verbose: bool) -> str:
    if check.note:
        return f"{check.backend}: {check.note}"
    worst = max(check.differences, key=lambda one: one.largest / one.bound)
    word = "equal" if check.equal else "NOT EQUAL"
    line = (
        f"{check.backend}: {word}, largest difference {worst.largest:.1e} ({worst.output}, allowed {worst.bound:.1e})"
    )
    if verbose or not check.equal:
        line += "".join(f"\n    {one.output}: {one.largest:.1e}, allowed {one.bound:.1e}" for one in check.differences)
    return line

"""``afire data split``: who is trained on, who is validated on, who is tested on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afire.cli.options import Quiet, Root, Seed, Verbose


def split(
    data: Annotated[Path, typer.Option("--data", help="A manifest (.parquet or .csv) or a pack.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the split files.")],
    root: Root = None,
    val: Annotated[float, typer.Option(help="Share of the training films that becomes validation.")] = 0.1,
    test: Annotated[
        float | None, typer.Option(help="Draw a test part of this share by patient instead of using the official one.")
    ] = None,
    development: Annotated[
        bool,
        typer.Option(
            "--development",
            help="Draw all parts from the official training films, to choose settings by; --test is then 0.25.",
        ),
    ] = False,
    fractions: Annotated[str, typer.Option(help="Label fractions in percent, nested.")] = "100",
    folds: Annotated[int, typer.Option(help="Grouped k-fold over all films instead of one split; 0 = off.")] = 0,
    seed: Seed = 0,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Split by patient: official or drawn, with nested label fractions or folds.

    Example: [cyan]afire data split --data nih.parquet --out splits/nih --fractions 1,10,100[/cyan]
    """
    from rich.table import Table

    from afire.cli.options import console
    from afire.data.dataset import open_manifest
    from afire.data.splits import (
        development_split,
        fold_splits,
        fraction_of,
        official_split,
        random_split,
        write_split,
    )
    from afire.errors import UserError

    if folds and test is not None:
        raise UserError("--folds and --test exclude each other: every fold brings its own test part.")
    if folds and development:
        raise UserError("--folds and --development exclude each other: folds go over all films.")
    manifest = open_manifest(data, root)
    percents = _percents(fractions)
    if folds:
        bases = {f"fold-{i}": base for i, base in enumerate(fold_splits(manifest, folds, val, seed))}
    elif development:
        bases = {"development": development_split(manifest, val, 0.25 if test is None else test, seed)}
    elif test is not None:
        bases = {"split": random_split(manifest, val, test, seed)}
    else:
        bases = {"split": official_split(manifest, val, seed)}
    table = Table("file", "train", "val", "test", "patients", "hash")
    for name, base in bases.items():
        for percent in percents:
            part = base if percent == 100 else fraction_of(base, manifest, percent / 100, seed)
            path = out / (f"{name}.json" if percent == 100 else f"{name}-{percent:g}pct.json")
            write_split(part, path)
            films = [f"{part.films[p]:,}" for p in ("train", "val", "test")]
            patients = " + ".join(f"{len(part.patients[p]):,}" for p in ("train", "val", "test"))
            table.add_row(str(path), *films, patients, part.hash[:12])
    if not quiet:
        console().print(table)


def _percents(text: str) -> list[float]:
    from afire.errors import UserError

    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--fractions {text!r} is not a list of percentages such as 1,10,100.") from None

"""``afire data join``: several sets as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afire.cli.options import Quiet, Verbose


def join(
    data: Annotated[list[Path], typer.Option("--data", help="A manifest (.parquet or .csv). Give it for each set.")],
    split: Annotated[
        list[Path] | None,
        typer.Option("--split", help="A split file for each --data, in their order; its parts become the lists."),
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="The joined manifest (.parquet or .csv).")],
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Join manifests into one, to pre-train on several sets; patients of different sets are kept apart.

    Example: [cyan]afire data join --data childcxr.parquet --data nih.parquet --out both.parquet[/cyan]
    """
    from rich.table import Table

    from afire.cli.options import console
    from afire.data.join import join_manifests, listed_as
    from afire.data.manifest import check_manifest_name, read_manifest, write_manifest
    from afire.data.splits import read_split
    from afire.errors import UserError

    check_manifest_name(out)
    names = [path.stem for path in data]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"two manifests are called {twice[0]}; rename one, its name tells the sets apart.")
    if split and len(split) != len(data):
        raise UserError(f"{len(data)} --data need {len(data)} --split in the same order, not {len(split)}.")
    parts = {path.stem: read_manifest(path) for path in data}
    if split:
        chosen = zip(parts.items(), split, strict=True)
        parts = {name: listed_as(part, read_split(file)) for (name, part), file in chosen}
    joined = join_manifests(parts)
    write_manifest(joined, out)
    if quiet:
        return
    table = Table("set", "films", "patients", "normal")
    for name, part in [*parts.items(), (out.name, joined)]:
        normal = int((part.table["normal"] == 1).sum())
        table.add_row(name, f"{len(part):,}", f"{part.table['patient'].nunique():,}", f"{normal:,}")
    console().print(table)

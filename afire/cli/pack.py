"""``afire data pack``: decode and resize once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from afire.cli.options import Fit, Quiet, Root, Verbose, Voi


def pack(
    data: Annotated[Path, typer.Option("--data", help="A manifest (.parquet or .csv) or a folder of films.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the pack.")],
    root: Root = None,
    size: Annotated[int, typer.Option(help="Side of the packed films in pixels.", min=16, max=4096)] = 224,
    bits: Annotated[Literal[8, 16], typer.Option(help="8 or 16 bits per pixel.")] = 8,
    fit: Annotated[Fit, typer.Option(help="How a film becomes square.")] = "squash",
    voi: Annotated[Voi, typer.Option(help="DICOM grey-scale.")] = "auto",
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option(help="What to do with a film that cannot be read.")
    ] = "stop",
    workers: Annotated[int | None, typer.Option(help="Processes; all cores by default.", min=1)] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Decode and resize every film once, into one memory-mapped array. A rerun continues.

    Example: [cyan]afire data pack --data nih.parquet --out packs/nih --size 224 --on-error skip[/cyan]
    """
    from afire.cli.options import console
    from afire.data.dataset import open_manifest
    from afire.data.pack import PackSettings
    from afire.data.pack import pack as pack_films

    settings = PackSettings(size, bits, fit, voi)
    summary = pack_films(open_manifest(data, root), out, settings, on_error, workers)
    if not quiet:
        skipped = f", {len(summary.skipped)} skipped (named in pack.json)" if summary.skipped else ""
        console().print(f"packed {summary.films:,} films of {size} px{skipped}: {out}, hash {summary.hash[:12]}")

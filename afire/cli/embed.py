"""``afire embed``: features of films as a file for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from afire.cli.options import ConfigFile, Device, Preset, Quiet, Root, Set, Verbose
from afire.cli.task_options import Data, Force, Weights


def embed(
    weights: Weights,
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="File for the features: .parquet or .npz.")],
    root: Root = None,
    pool: Annotated[
        Literal["mean", "class", "tokens"],
        typer.Option(help="Mean of the image tokens, the class token, or all image tokens."),
    ] = "mean",
    network: Annotated[Literal["teacher", "student"], typer.Option(help="Which of a run's networks.")] = "teacher",
    part: Annotated[
        Literal["all", "train", "val", "test"], typer.Option(help="Only films the manifest lists in this part.")
    ] = "all",
    seed: Annotated[int, typer.Option("--seed", help="Of random weights.", min=0)] = 0,
    preset: Preset = None,
    config_file: ConfigFile = None,
    overrides: Set = None,
    force: Force = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Export features: the mean token of the teacher by default.

    Example: [cyan]afire embed --weights runs/nih --data packs/childcxr --out childcxr-features.parquet[/cyan]
    """
    import logging

    import numpy as np

    from afire.cli.options import console
    from afire.cli.task_options import asked_config
    from afire.data.dataset import open_films
    from afire.errors import UserError
    from afire.tasks.backbone import load_backbone, pick_device
    from afire.tasks.embed import check_name, write_features

    check_name(out)
    if out.exists() and not force:
        raise UserError(f"{out} already exists; add --force to replace it.")
    target = pick_device(device)
    backbone = load_backbone(weights, asked_config(preset, config_file, overrides), network=network, seed=seed)
    logging.getLogger("afire").info("%s: %s", backbone.name, backbone.report)
    image = backbone.config.image
    films = open_films(data, root, image.size, image.fit, image.voi)
    rows = np.arange(len(films))
    if part != "all":
        rows = np.flatnonzero(films.manifest.table["split"] == part)
        if len(rows) == 0:
            raise UserError(f"the manifest lists no {part} films.")
    shape = write_features(out, backbone, films, rows, pool, target)
    if not quiet:
        words = " x ".join(f"{side:,}" for side in shape)
        console().print(f"{out}: {words} features ({pool})", soft_wrap=True, markup=False, highlight=False)

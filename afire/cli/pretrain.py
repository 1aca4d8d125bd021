"""``afire pretrain``: AFiRe on normal films, from one CPU to many nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from afire.cli.options import ConfigFile, Device, Preset, Quiet, Root, Set, Verbose


def pretrain(
    data: Annotated[Path, typer.Option("--data", help="A pack, a manifest (.parquet or .csv) or a folder of films.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the run.")],
    root: Root = None,
    split: Annotated[Path | None, typer.Option(help="A split file; only its training films are used.")] = None,
    preset: Preset = None,
    config_file: ConfigFile = None,
    overrides: Set = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="Start from weights: a run, a bundle, hf://owner/name, or a timm, DINO, MAE, Hugging Face or original "
            "AFiRe file."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Resume although settings or data changed.")] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Every random choice follows from it.", min=0)] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Pre-train on normal films. Alone, with torchrun or with accelerate launch; resumes bit by bit.

    Example: [cyan]afire pretrain --data packs/nih --out runs/nih --preset small[/cyan]

    Several GPUs: torchrun --nproc-per-node 8 -m afire pretrain --data packs/mimic --out runs/mimic --preset paper
    """
    import logging

    from afire.config import load_config
    from afire.data.dataset import is_pack, open_films
    from afire.data.splits import read_split
    from afire.training import pretrain as run_pretraining
    from afire.training.selection import normal_training_rows

    logger = logging.getLogger("afire")
    settings = [*(overrides or ()), *([f"seed={seed}"] if seed is not None else [])]
    config = load_config(preset, config_file, settings)
    first = _is_first_process()
    films = open_films(data, root, config.image.size, config.image.fit, config.image.voi)
    chosen_split = read_split(split) if split is not None else None
    rows, sentence = normal_training_rows(films.manifest, chosen_split)
    if first:
        logger.info("%s from %s", sentence, data)
        if not is_pack(data):
            logger.info("these films are decoded again in every epoch; `afire data pack` does it once")
    observers: list[object] = []
    if config.run.picture_epochs:
        from afire.report.training_pictures import EpochPictures

        observers.append(EpochPictures(config.run.picture_epochs, config.training.epochs))
    if config.run.probe_epochs and first:
        from afire.training.online import OnlineProbe

        observers.append(OnlineProbe(films, chosen_split, config.run.probe_epochs, config.run.probe_films, config.seed))
    result = run_pretraining(
        config,
        films,
        out,
        rows,
        source=data.name,
        init=init,
        resume=resume,
        force=force,
        device=device,
        observers=observers,  # type: ignore[arg-type]
    )
    if first:
        words = {
            "finished": "finished",
            "stopped": "stopped by a signal; add --resume to go on",
            "collapsed": "collapsed",
        }
        logger.info("%s at step %d of %d: %s", words[result.status], result.step, result.steps, out)
    if result.status == "stopped":
        raise typer.Exit(128 + result.signal)  # what a shell, SLURM and Kubernetes read as "ended by that signal"
    if result.status == "collapsed":
        raise typer.Exit(1)


def _is_first_process() -> bool:
    import os

    return os.environ.get("RANK", "0") == "0"

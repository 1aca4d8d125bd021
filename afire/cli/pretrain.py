"""``afire config``: the resolved settings as YAML that reads back as itself.

``afire pretrain``: AFiRe on normal films, from one CPU to many nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from afire.cli.options import ConfigFile, Device, Preset, Quiet, Root, Set, Verbose


def config(
    task: Annotated[
        Literal["pretrain", "finetune", "segment"],
        typer.Option("--task", help="Whose settings: the model's or a task's."),
    ] = "pretrain",
    preset: Preset = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Settings of a task: nih14, chexpert5, quick; siim, lungs.")
    ] = None,
    config_file: ConfigFile = None,
    overrides: Set = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write to this file instead of the screen.")] = None,
) -> None:
    """Print the settings as YAML with their meaning.

    Example: [cyan]afire config --preset small --set training.epochs=10 --out mine.yaml[/cyan]

    Settings of a task: afire config --task finetune --recipe nih14 --out mine.yaml, then --recipe mine.yaml.
    """
    from afire.config import Section, load_config, to_yaml
    from afire.errors import UserError
    from afire.files import write_text
    from afire.tasks.settings import load_task_config

    settings: Section
    if task == "pretrain":
        if recipe is not None:
            raise UserError("--recipe is for --task finetune or segment; the model's settings start from --preset.")
        settings = load_config(preset, config_file, overrides or ())
    else:
        if preset is not None:
            raise UserError("--preset is for the model's settings; a task's start from --recipe.")
        settings = load_task_config(task, recipe, config_file, overrides or ())
    text = to_yaml(settings)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)


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
    from afire.data.pack import config_for, is_pack, open_films
    from afire.data.splits import read_split
    from afire.training.batches import normal_training_rows
    from afire.training.loop import pretrain as run_pretraining

    logger = logging.getLogger("afire")
    settings = [*(overrides or ()), *([f"seed={seed}"] if seed is not None else [])]
    config = config_for(load_config(preset, config_file, settings), data)
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
        from afire.report.sheets import EpochPictures

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

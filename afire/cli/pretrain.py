"""``afire pretrain``: a method on normal films, from one CPU to many nodes. ``afire config``: its settings as YAML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from afire.cli.options import ConfigFile, Device, Minutes, Preset, Quiet, Root, Set, Verbose, is_first_process

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from afire.config import Config
    from afire.data.pack import Films
    from afire.data.splits import Split
    from afire.training.pretraining import Observer

MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="The pre-training method: afire (the default), mae, moco, dino, c2l, pcl, genesis, transvw, dira, pcrl, "
        "adam1, adam2, supervised, imagenet, phantom. `afire config` prints its settings.",
    ),
]


def config(
    task: Annotated[
        Literal["pretrain", "finetune", "segment"],
        typer.Option("--task", help="Whose settings: the model's or a task's."),
    ] = "pretrain",
    method: MethodName = None,
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
    from afire.cli.settings import FINETUNE, SEGMENT, model_config, sort_settings
    from afire.errors import UserError
    from afire.files import write_text
    from afire.settings import to_yaml
    from afire.tasks.settings import load_task_config

    if task == "pretrain":
        if recipe is not None:
            raise UserError("--recipe is for --task finetune or segment; the model's settings start from --preset.")
        text = _method_yaml(method, model_config(preset, config_file, _with_method(method, overrides)))
    else:
        if preset is not None or method is not None:
            raise UserError("--preset and --method are for the model's settings; a task's start from --recipe.")
        [settings] = sort_settings(overrides, FINETUNE if task == "finetune" else SEGMENT)
        text = to_yaml(load_task_config(task, recipe, config_file, settings))
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)


def _with_method(method: str | None, overrides: list[str] | None) -> list[str]:
    return [*([f"method={method}"] if method is not None else []), *(overrides or ())]


def _method_yaml(method: str | None, settings: Config) -> str:
    """The settings that the method reads, its own ones explained."""
    from afire.settings import to_yaml

    if method is None and settings.method == "afire":
        return to_yaml(settings)  # without torch: the method's own settings are none
    from afire.methods import method_type, unread
    from afire.settings import validate

    options = validate(settings.options, method_type(settings.method).settings_type)
    return to_yaml(settings, unread(settings.method), options)


def _given(
    config: Config, data: Path, root: Path | None, split: Path | None, is_first: bool
) -> tuple[Films, NDArray[np.int64], Split | None]:
    """The films of ``data``, which of them are used, and the split that says so."""
    import logging

    from afire.data.pack import is_pack, open_films
    from afire.data.splits import read_split
    from afire.methods import method_type
    from afire.training.batches import labelled_training_rows, normal_training_rows

    logger = logging.getLogger("afire")
    films = open_films(data, root, config.image.size, config.image.fit, config.image.voi)
    film_split = read_split(split) if split is not None else None
    choose = labelled_training_rows if method_type(config.method).learns_from_labels else normal_training_rows
    rows, message = choose(films.manifest, film_split)
    if is_first:
        logger.info("%s from %s", message, data)
        if not is_pack(data):
            logger.info("these films are decoded again in every epoch; `afire data pack` does it once")
    return films, rows, film_split


def _drawn(config: Config, split: Path | None) -> tuple[Films, NDArray[np.int64], None]:
    """Rows for films that the method draws itself."""
    import numpy as np

    from afire.data.pack import NumberedFilms
    from afire.errors import UserError
    from afire.methods import method_type

    count = method_type(config.method).own_films(config)
    if not count:
        reason = " while options.afire is above 0" if config.method == "phantom" else ""
        raise UserError(f"the method {config.method} learns from films{reason}; say which with --data.")
    if split is not None:
        raise UserError("--split chooses among the films of --data, and there are none; leave it out.")
    return NumberedFilms(count, config.image), np.arange(count), None


def pretrain(
    out: Annotated[Path, typer.Option("--out", help="Folder of the run.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="A pack, a manifest (.parquet or .csv) or a folder of films; not for a method that draws its own.",
        ),
    ] = None,
    root: Root = None,
    split: Annotated[Path | None, typer.Option(help="A split file; only its training films are used.")] = None,
    method: MethodName = None,
    preset: Preset = None,
    config_file: ConfigFile = None,
    overrides: Set = None,
    init: Annotated[
        str | None,
        typer.Option(
            help="Start from weights: a run, a bundle, hf://owner/name, timm:NAME, or a timm, DINO, MAE, Hugging Face "
            "or original AFiRe file, whose architecture is then the run's."
        ),
    ] = None,
    minutes: Minutes = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Resume although settings or data changed.")] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Every random choice follows from it.", min=0)] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Pre-train on normal films. Alone, with torchrun or with accelerate launch; resumes bit by bit.

    Example: [cyan]afire pretrain --data packs/nih --out runs/nih --preset small[/cyan]

    Without anybody's films: afire pretrain --method phantom --out runs/phantom --preset small

    Several GPUs: torchrun --nproc-per-node 8 -m afire pretrain --data packs/mimic --out runs/mimic --preset paper
    """
    import logging

    from afire.cli.settings import PRETRAIN, refuse_two_lengths, sort_settings
    from afire.data.pack import config_for
    from afire.errors import UserError
    from afire.methods import check_overrides
    from afire.settings import load_config
    from afire.training.pretrain import pretrain as run_pretraining
    from afire.weights import said_by_start, start_from

    logger = logging.getLogger("afire")
    arguments = [*_with_method(method, overrides), *([f"seed={seed}"] if seed is not None else [])]
    [settings] = sort_settings(arguments, PRETRAIN)
    if minutes is not None:
        refuse_two_lengths(settings)
        settings.append(f"training.minutes={minutes}")
    weights_settings = said_by_start(init, data, preset) if init is not None else {}
    config = load_config(preset, config_file, settings, weights_settings)
    config = config if data is None else config_for(config, data)
    check_overrides(config.method, settings)
    is_first = is_first_process()
    films, rows, chosen_split = _drawn(config, split) if data is None else _given(config, data, root, split, is_first)
    if config.run.probe_epochs and data is None:
        raise UserError("the online probe (run.probe_epochs) needs films with labels; give them with --data.")

    def observers(settled: Config) -> list[Observer]:
        """Those of the run, whose length is known now."""
        run = settled.run
        watching: list[Observer] = []
        if run.picture_epochs:
            from afire.report.sheets import EpochPictures

            watching.append(EpochPictures(run.picture_epochs, settled.training.epochs))
        if run.probe_epochs and is_first:
            from afire.training.online import OnlineProbe

            watching.append(OnlineProbe(films, chosen_split, run.probe_epochs, run.probe_films, settled.seed))
        return watching

    result = run_pretraining(
        config,
        films,
        out,
        rows,
        source=data.name if data is not None else config.method,
        start=start_from(init) if init is not None else None,
        behind=init,
        resume=resume,
        force=force,
        device=device,
        observers=observers,
    )
    if is_first:
        endings = {
            "finished": "finished",
            "stopped": "stopped by a signal; add --resume to go on",
            "collapsed": "collapsed",
        }
        logger.info("%s at step %d of %d: %s", endings[result.status], result.step, result.steps, out)
    if result.status == "stopped":
        raise typer.Exit(128 + result.signal)  # what a shell, SLURM and Kubernetes read as "ended by that signal"
    if result.status == "collapsed":
        raise typer.Exit(1)

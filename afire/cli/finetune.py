"""``afire finetune``: all weights, for one or many findings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from afire.cli.options import ConfigFile, Device, Preset, Quiet, Root, Verbose
from afire.cli.task_options import Data, Folds, Fractions, Labels, Name, Seeds, SplitFile, Weights
from afire.cli.trained import Recipe, RedoForce, Resume, TaskSet


def finetune(
    weights: Weights,
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Folder for the result, with a folder for each run.")],
    root: Root = None,
    split: SplitFile = None,
    labels: Labels = None,
    recipe: Annotated[Recipe, typer.Option("--recipe", help="nih14, chexpert5, quick, or a YAML file.")] = None,
    overrides: TaskSet = None,
    seeds: Seeds = "0,1,2",
    fractions: Fractions = "100",
    folds: Folds = 0,
    name: Name = None,
    network: Annotated[Literal["teacher", "student"], typer.Option(help="Which of a run's networks.")] = "teacher",
    preset: Preset = None,
    config_file: ConfigFile = None,
    resume: Resume = False,
    force: RedoForce = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fine-tune all weights for one or many findings: early stopping on validation AUC, test films once at the end.

    Example: [cyan]afire finetune --weights runs/nih --data packs/nih --recipe nih14 --out results/nih[/cyan]

    Settings: afire config --task finetune. Several GPUs: torchrun --nproc-per-node 4 -m afire finetune ...
    """
    import json

    from afire.cli.task_options import parse_labels
    from afire.cli.trained import experiment_of, report_results, split_overrides, stops_on_signal, task_settings
    from afire.tasks.finetune import run_finetune

    model_settings, task_overrides = split_overrides(overrides)
    chosen = parse_labels(labels)
    config = task_settings("finetune", recipe, [*task_overrides, *([f"labels={json.dumps(chosen)}"] if chosen else [])])
    experiment = experiment_of(
        weights=weights,
        data=data,
        out=out,
        root=root,
        split=split,
        seeds=seeds,
        fractions=fractions,
        folds=folds,
        name=name,
        network=network,
        preset=preset,
        config_file=config_file,
        overrides=model_settings,
        resume=resume,
        force=force,
        device=device,
    )
    with stops_on_signal():
        report_results(run_finetune(experiment, config), experiment, out, quiet)

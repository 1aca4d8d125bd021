"""``afire segment``: masks from the tokens of an encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from afire.cli.options import ConfigFile, Device, Preset, Quiet, Root, Verbose
from afire.cli.task_options import Data, Folds, Fractions, Name, Seeds, SplitFile, Weights
from afire.cli.trained import Recipe, RedoForce, Resume, TaskSet


def segment(
    weights: Weights,
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Folder for the result, with a folder for each run.")],
    root: Root = None,
    split: SplitFile = None,
    mask_column: Annotated[
        str | None,
        typer.Option("--mask-column", help="Manifest column with mask paths or RLE. Default: mask, else rle."),
    ] = None,
    recipe: Annotated[Recipe, typer.Option("--recipe", help="siim, lungs, or a YAML file.")] = None,
    overrides: TaskSet = None,
    seeds: Seeds = "0,1,2",
    fractions: Fractions = "100",
    folds: Folds = 0,
    name: Name = None,
    network: Annotated[Literal["teacher", "student"], typer.Option(help="Which of a run's networks.")] = "teacher",
    overlays: Annotated[
        int, typer.Option("--overlays", help="Test films in the picture of masks; 0 = none.", min=0)
    ] = 15,
    preset: Preset = None,
    config_file: ConfigFile = None,
    resume: Resume = False,
    force: RedoForce = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Learn masks with a light decoder on the encoder's tokens: Dice over all films and over those with a mask.

    Example: [cyan]afire segment --weights runs/nih --data packs/shenzhen --recipe lungs --out results/lungs[/cyan]

    Settings: afire config --task segment. Several GPUs: torchrun --nproc-per-node 4 -m afire segment ...
    """
    import json

    from afire.cli.trained import experiment_of, report_results, split_overrides, stops_on_signal, task_settings
    from afire.tasks.segment import run_segment

    model_settings, task_overrides = split_overrides(overrides)
    column = [f"masks.column={json.dumps(mask_column)}"] if mask_column else []
    config = task_settings("segment", recipe, [*task_overrides, *column])
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

    def draw(folder: Path, result: object, predictions: object) -> list[Path]:
        from afire.data.dataset import open_films
        from afire.report.segment_figures import write_overlays

        size = result.data["size"]  # type: ignore[attr-defined]
        films = open_films(data, root, size)
        return write_overlays(folder, films, config.masks, predictions, overlays) if overlays else []  # type: ignore[arg-type]

    with stops_on_signal():
        report_results(run_segment(experiment, config), experiment, out, quiet, draw)

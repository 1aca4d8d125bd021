"""``afire probe``: what fixed features are worth, by logistic regression or nearest neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from afire.cli.options import ConfigFile, Device, Preset, Quiet, Root, Set, Verbose
from afire.cli.task_options import Data, Folds, Force, Fractions, Labels, Name, Seeds, SplitFile

if TYPE_CHECKING:
    from afire.tasks.results import Result


def probe(
    weights: Annotated[
        str,
        typer.Option(
            "--weights", help="A run folder, a weights file or random; or metadata, area, sharpness, which need none."
        ),
    ],
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Folder for the result.")],
    root: Root = None,
    split: SplitFile = None,
    labels: Labels = None,
    method: Annotated[Literal["linear", "knn"], typer.Option(help="Logistic regression or nearest neighbours.")] = (
        "linear"
    ),
    pool: Annotated[Literal["mean", "class"], typer.Option(help="Mean of the image tokens, or the class token.")] = (
        "mean"
    ),
    network: Annotated[Literal["teacher", "student"], typer.Option(help="Which of a run's networks.")] = "teacher",
    seeds: Seeds = "0,1,2",
    fractions: Fractions = "100",
    folds: Folds = 0,
    name: Name = None,
    preset: Preset = None,
    config_file: ConfigFile = None,
    overrides: Set = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for features; default: AFIRE_CACHE or ~/.cache/afire.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither read nor keep features.")] = False,
    force: Force = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Probe fixed features: AUC, average precision, accuracy and F1 on test films, settings chosen on validation.

    Example: [cyan]afire probe --weights runs/nih --data packs/childcxr --labels abnormal --out results/nih[/cyan]
    """
    from afire.cli.task_options import asked_config, fraction_folder, parse_fractions, parse_labels, parse_seeds
    from afire.data.splits import read_split
    from afire.tasks.probe_task import ProbeTask, run_probe
    from afire.tasks.results import check_out, write_result

    shares = parse_fractions(fractions)
    folders = {share: fraction_folder(out, share, len(shares) > 1) for share in shares}
    for folder in folders.values():
        check_out(folder, force)
    task = ProbeTask(
        weights=weights,
        data=data,
        root=root,
        split=read_split(split) if split is not None else None,
        labels=parse_labels(labels),
        method=method,
        pooling=pool,
        network=network,
        seeds=parse_seeds(seeds),
        folds=folds,
        name=name,
        config=asked_config(preset, config_file, overrides),
        cache=None if no_cache else cache or _default_cache(),
        device=device,
    )
    results: list[Result] = []
    for share, (result, predictions) in run_probe(task, shares):
        from afire.report.task_figures import write_figures
        from afire.report.task_tables import write_page

        write_result(folders[share], result, predictions)
        write_page(folders[share], result, write_figures(folders[share], result, predictions))
        results.append(result)
    if not quiet:
        _show(results, out)


def _default_cache() -> Path:
    from afire.tasks.features import default_cache

    return default_cache()


def _show(results: list[Result], out: Path) -> None:
    from afire.cli.options import console
    from afire.report.task_console import show_results

    screen = console()
    show_results(screen, results)
    screen.print(str(out), soft_wrap=True, markup=False, highlight=False)

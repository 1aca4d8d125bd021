"""The commands of tasks: ``afire probe``, ``finetune``, ``segment`` and ``embed``, and what they share.

Probing asks what fixed features are worth, fine-tuning changes all weights for one or many findings, segmentation
learns masks from an encoder's tokens, and embedding writes features for other tools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, overload

import typer

from afire.cli.options import (
    Address,
    ConfigFile,
    Data,
    Device,
    Engine,
    Finish,
    Folds,
    Force,
    Fractions,
    Labels,
    Name,
    Network,
    Preset,
    Quiet,
    Root,
    Seeds,
    Set,
    ShardOf,
    Shards,
    SplitFile,
    Verbose,
    Weights,
    is_first_process,
    print_line,
)

if TYPE_CHECKING:
    import pandas as pd

    from afire.tasks.experiment import Experiment
    from afire.tasks.results import Result
    from afire.tasks.settings import FinetuneConfig, SegmentConfig

Recipe = str | None
Resume = Annotated[
    bool, typer.Option("--resume", help="Keep finished runs, go on with begun ones, start those that are missing.")
]
RedoForce = Annotated[
    bool, typer.Option("--force", help="Start again where --out holds runs; with --resume: although settings changed.")
]


def probe(
    weights: Annotated[
        str,
        typer.Option(
            "--weights", help="A run folder, a weights file or random; or metadata, area, sharpness, edge, lite0."
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
    network: Network = None,
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
    from afire.cli.options import fraction_folder, parse_fractions, parse_labels, parse_seeds
    from afire.cli.settings import config_from_options
    from afire.data.splits import read_split
    from afire.tasks.features import TRIVIAL, default_cache
    from afire.tasks.probe import ProbeTask, run_probe
    from afire.tasks.results import check_out
    from afire.weights.lite0 import LITE0

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
        config=config_from_options(
            preset, config_file, overrides, data, None if weights in (*TRIVIAL, LITE0) else weights
        ),
        cache=None if no_cache else cache or default_cache(),
        device=device,
    )
    results = ((share, result, predictions) for share, (result, predictions) in run_probe(task, shares))
    report_results(results, folders, out, quiet)


def finetune(
    weights: Weights,
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Folder for the result, with a folder for each run.")],
    root: Root = None,
    split: SplitFile = None,
    labels: Labels = None,
    recipe: Annotated[Recipe, typer.Option("--recipe", help="nih14, chexpert5, quick, or a YAML file.")] = None,
    overrides: Set = None,
    seeds: Seeds = "0,1,2",
    fractions: Fractions = "100",
    folds: Folds = 0,
    name: Name = None,
    network: Network = None,
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

    from afire.cli.options import parse_labels
    from afire.cli.settings import FINETUNE, NETWORK, sort_settings
    from afire.tasks.finetune import run_finetune

    own_settings, network_settings = sort_settings(overrides, FINETUNE, NETWORK)
    names = parse_labels(labels)
    config = task_settings("finetune", recipe, [*own_settings, *([f"labels={json.dumps(names)}"] if names else [])])
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
        overrides=network_settings,
        resume=resume,
        force=force,
        device=device,
    )
    with stops_on_signal():
        report_results(run_finetune(experiment, config), experiment.folders, out, quiet)


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
    overrides: Set = None,
    seeds: Seeds = "0,1,2",
    fractions: Fractions = "100",
    folds: Folds = 0,
    name: Name = None,
    network: Network = None,
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

    from afire.cli.settings import NETWORK, SEGMENT, sort_settings
    from afire.tasks.segment import run_segment

    own_settings, network_settings = sort_settings(overrides, SEGMENT, NETWORK)
    column = [f"masks.column={json.dumps(mask_column)}"] if mask_column else []
    config = task_settings("segment", recipe, [*own_settings, *column])
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
        overrides=network_settings,
        resume=resume,
        force=force,
        device=device,
    )

    def draw(folder: Path, result: object, predictions: object) -> list[Path]:
        from afire.data.pack import open_films
        from afire.report.task_figures import write_overlays

        image = result.config["image"]  # type: ignore[attr-defined]
        films = open_films(data, root, image["size"], image["fit"], image["voi"])
        return write_overlays(folder, films, config.masks, predictions, overlays) if overlays else []  # type: ignore[arg-type]

    with stops_on_signal():
        report_results(run_segment(experiment, config), experiment.folders, out, quiet, draw)


def embed(
    weights: Weights,
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="File for the features: .parquet or .npz.")],
    root: Root = None,
    pool: Annotated[
        Literal["mean", "class", "tokens"],
        typer.Option(help="Mean of the image tokens, the class token, or all image tokens."),
    ] = "mean",
    network: Network = None,
    part: Annotated[
        Literal["all", "train", "val", "test"], typer.Option(help="Only films that the manifest lists in this subset.")
    ] = "all",
    seed: Annotated[int, typer.Option("--seed", help="Of random weights.", min=0)] = 0,
    preset: Preset = None,
    config_file: ConfigFile = None,
    overrides: Set = None,
    force: Force = False,
    shards: Shards = None,
    shard: ShardOf = None,
    finish: Finish = False,
    engine: Engine = "local",
    address: Address = None,
    workers: Annotated[
        int | None, typer.Option(help="With --engine ray: processes, each with the weights; default: the cores.", min=1)
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Export features: the mean token of the network that the method exports, unless options say otherwise.

    Example: [cyan]afire embed --weights runs/nih --data packs/childcxr --out childcxr-features.parquet[/cyan]
    """
    import logging

    from afire.cli.settings import config_from_options
    from afire.cluster.shards import Where, all_shards, shards_asked
    from afire.errors import UserError
    from afire.tasks.feature_shards import EmbedTask, begun_features, embed_shards, finish_features
    from afire.tasks.features import check_name, write_features
    from afire.weights import pick_device

    check_name(out)
    if out.exists() and not force:
        raise UserError(f"{out} already exists; add --force to replace it.")
    count, single = shards_asked(shards, shard, finish)
    where = Where(engine, address, workers)
    config = config_from_options(preset, config_file, overrides, data, weights)
    task = EmbedTask(weights, data, out, root, pool, network, part, seed, config, device)
    count = count or begun_features(task) if finish else count
    if count is None and (engine == "ray" or workers is not None):
        raise UserError("--engine ray and --workers are for features in shards; add --shards.")
    if count is None:
        target = pick_device(device)
        backbone, films, rows = task.open()
        logging.getLogger("afire").info("%s: %s", backbone.name, backbone.report)
        shape = write_features(out, backbone, films, rows, pool, target)
    else:
        if not finish:
            computed = embed_shards(task, [single] if single is not None else all_shards(count), where)
        if single is not None:
            if not quiet:
                print_line(
                    f"shard {single}: {f'{computed:,} films' if computed else 'nothing to do'}: {task.shards_folder}"
                )
            return
        shape = finish_features(task, count)
    if not quiet:
        sides = " x ".join(f"{side:,}" for side in shape)
        print_line(f"{out}: {sides} features ({pool})")


@overload
def task_settings(kind: Literal["finetune"], recipe: str | None, overrides: Iterable[str]) -> FinetuneConfig: ...


@overload
def task_settings(kind: Literal["segment"], recipe: str | None, overrides: Iterable[str]) -> SegmentConfig: ...


def task_settings(
    kind: Literal["finetune", "segment"], recipe: str | None, overrides: Iterable[str]
) -> FinetuneConfig | SegmentConfig:
    """The settings of a recipe, which is a preset's name or a YAML file, changed by ``overrides``."""
    from afire.tasks.settings import load_task_config

    file = Path(recipe) if recipe is not None and recipe.endswith((".yaml", ".yml")) else None
    return load_task_config(kind, None if file else recipe, file, overrides)


def experiment_of(
    *,
    weights: str,
    data: Path,
    out: Path,
    root: Path | None,
    split: Path | None,
    seeds: str,
    fractions: str,
    folds: int,
    name: str | None,
    network: str | None,
    preset: str | None,
    config_file: Path | None,
    overrides: list[str],
    resume: bool,
    force: bool,
    device: str,
) -> Experiment:
    """An :class:`~afire.tasks.experiment.Experiment` from options as they were typed."""
    from afire.cli.options import fraction_folder, parse_fractions, parse_seeds
    from afire.cli.settings import config_from_options
    from afire.data.splits import read_split
    from afire.tasks.experiment import Experiment

    _quieten_other_processes()
    shares = parse_fractions(fractions)
    return Experiment(
        weights=weights,
        data=data,
        folders={share: fraction_folder(out, share, len(shares) > 1) for share in shares},
        seeds=parse_seeds(seeds),
        root=root,
        split=read_split(split) if split is not None else None,
        folds=folds,
        name=name,
        model=config_from_options(preset, config_file, overrides, data, weights),
        network=network,
        device=device,
        resume=resume,
        force=force,
    )


@contextmanager
def stops_on_signal() -> Iterator[None]:
    """A run that a signal ended after saving becomes the exit code that a shell, SLURM and Kubernetes expect."""
    import logging

    from afire.tasks.experiment import StoppedBySignal

    try:
        yield
    except StoppedBySignal as stopped:
        if is_first_process():
            logging.getLogger("afire").warning("%s", stopped)
        raise typer.Exit(128 + stopped.signal) from None


def report_results(
    results: Iterable[tuple[float, Result, pd.DataFrame]],
    folders: Mapping[float, Path],
    out: Path,
    quiet: bool,
    more_figures: Callable[[Path, Result, pd.DataFrame], list[Path]] | None = None,
) -> None:
    """Write each result with its figures and page as it comes, then show them; on the first process only."""
    is_first = is_first_process()
    written: list[Result] = []
    for fraction, result, predictions in results:
        if not is_first:
            continue
        from afire.report.task_figures import write_figures
        from afire.report.task_tables import write_page
        from afire.tasks.results import write_result

        folder = folders[fraction]
        figures = write_figures(folder, result, predictions)
        figures += more_figures(folder, result, predictions) if more_figures else []
        write_page(folder, result, figures)
        write_result(folder, result, predictions)  # last: a result that exists has all its files
        written.append(result)
    if is_first and not quiet:
        from afire.cli.options import console
        from afire.report.task_tables import show_results

        show_results(console(), written)
        print_line(out)


def _quieten_other_processes() -> None:
    """All processes of a run log the same; the first one is enough."""
    if not is_first_process():
        import logging

        from afire import progress

        progress.configure("off")
        logging.getLogger("afire").setLevel(logging.ERROR)

"""What the commands that train on labels share: their options, and from options to an experiment and its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, overload

import typer

if TYPE_CHECKING:
    import pandas as pd

    from afire.task_config import FinetuneConfig, SegmentConfig
    from afire.tasks.experiment import Experiment
    from afire.tasks.results import Result

Recipe = str | None
TaskSet = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Change one setting of the task, or of the model (image.*, encoder.*): key.sub=value. Repeat."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Keep finished runs, go on with begun ones, start those that are missing.")
]
RedoForce = Annotated[
    bool, typer.Option("--force", help="Start again where --out holds runs; with --resume: although settings changed.")
]
_MODEL_SECTIONS = ("image", "encoder")


def split_overrides(overrides: list[str] | None) -> tuple[list[str], list[str]]:
    """Those of the model's settings (``image.*`` and ``encoder.*``), and those of the task's."""
    model = [text for text in overrides or () if text.strip().split(".")[0] in _MODEL_SECTIONS]
    return model, [text for text in overrides or () if text not in model]


@overload
def task_settings(kind: Literal["finetune"], recipe: str | None, overrides: Iterable[str]) -> FinetuneConfig: ...


@overload
def task_settings(kind: Literal["segment"], recipe: str | None, overrides: Iterable[str]) -> SegmentConfig: ...


def task_settings(
    kind: Literal["finetune", "segment"], recipe: str | None, overrides: Iterable[str]
) -> FinetuneConfig | SegmentConfig:
    """The settings of a recipe, which is a preset's name or a YAML file, changed by ``overrides``."""
    from afire.task_config import load_task_config

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
    network: Literal["teacher", "student"],
    preset: str | None,
    config_file: Path | None,
    overrides: list[str],
    resume: bool,
    force: bool,
    device: str,
) -> Experiment:
    """An :class:`~afire.tasks.experiment.Experiment` from options as they were typed."""
    from afire.cli.task_options import asked_config, fraction_folder, parse_fractions, parse_seeds
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
        model=asked_config(preset, config_file, overrides),
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
    found: Iterable[tuple[float, Result, pd.DataFrame]],
    experiment: Experiment,
    out: Path,
    quiet: bool,
    more_figures: Callable[[Path, Result, pd.DataFrame], list[Path]] | None = None,
) -> None:
    """Write each result with its figures and page as it comes, then show them; on the first process only."""
    first = is_first_process()
    results: list[Any] = []
    for fraction, result, predictions in found:
        if not first:
            continue
        from afire.report.task_figures import write_figures
        from afire.report.task_tables import write_page
        from afire.tasks.results import write_result

        folder = experiment.folders[fraction]
        write_result(folder, result, predictions)
        figures = write_figures(folder, result, predictions)
        figures += more_figures(folder, result, predictions) if more_figures else []
        write_page(folder, result, figures)
        results.append(result)
    if first and not quiet:
        from afire.cli.options import console
        from afire.report.task_console import show_results

        screen = console()
        show_results(screen, results)
        screen.print(str(out), soft_wrap=True, markup=False, highlight=False)


def _quieten_other_processes() -> None:
    """All processes of a run say the same; the first one is enough."""
    if not is_first_process():
        import logging

        from afire import progress

        progress.configure("off")
        logging.getLogger("afire").setLevel(logging.ERROR)


def is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"

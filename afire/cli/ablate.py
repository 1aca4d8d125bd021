"""Tables with tests: ``afire compare`` of any results, ``afire ablate`` of what each component is worth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afire.cli.options import ConfigFile, Data, Device, Preset, Quiet, Root, Seeds, Set, SplitFile, Verbose

if TYPE_CHECKING:
    from afire.studies.ablation_grid import Row, Study, Trial
    from afire.studies.ablation_run import Workers
    from afire.studies.steps import Outcome
    from afire.tasks.compare import Comparison


def compare(
    results: Annotated[
        list[Path], typer.Argument(help="Folders of results; the first is what the others are compared with.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for comparison.md, comparison.tex, figures.")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="Metrics, separated by commas. Default: all shared ones.")] = None,
    allow_different_splits: Annotated[
        bool, typer.Option("--allow-different-splits", help="Compare although the films differ.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare results: means and sds, paired bootstrap over patients, t-test over runs.

    Example: [cyan]afire compare results/random results/afire --out tables[/cyan]
    """
    from afire.tasks.compare import compare as compare_results

    wanted = [word.strip() for word in metrics.split(",")] if metrics else None
    comparisons = compare_results(results, metrics=wanted, allow_different_splits=allow_different_splits)
    if not quiet:
        for comparison in comparisons:
            _show(comparison, wanted or comparison.metrics[:1], len(comparisons) > 1)
    if out is not None:
        _write(comparisons, out)
        if not quiet:
            from afire.cli.options import console

            console().print(str(out), soft_wrap=True, markup=False, highlight=False)


def _show(comparison: Comparison, metrics: list[str], several: bool) -> None:
    """All means; differences in ``metrics`` only, because all of them are many and stand in comparison.md."""
    from rich.text import Text

    from afire.cli.options import console
    from afire.report.task_tables import show_comparison

    screen = console()
    if several:
        screen.print(Text(f"{100 * comparison.fraction:g} % of the training labels", style="bold"))
    show_comparison(screen, comparison, metrics)


def _write(comparisons: list[Comparison], out: Path) -> None:
    from afire.files import write_text
    from afire.report.style import save_figure, style
    from afire.report.task_figures import label_figure
    from afire.report.task_tables import comparison_latex, comparison_markdown

    write_text(out / "comparison.md", comparison_markdown(comparisons))
    write_text(out / "comparison.tex", comparison_latex(comparisons))
    for comparison in comparisons:
        if len(comparison.labels) > 1 and comparison.entries[0].result.per_label:
            stem = f"labels-{100 * comparison.fraction:g}pct" if len(comparisons) > 1 else "labels"
            shown, names = [entry.result for entry in comparison.entries], [entry.name for entry in comparison.entries]
            with style():
                save_figure(label_figure(shown, comparison.metrics[0], names), out / stem)


def ablate(
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Folder of the study; started again, it goes on there.")],
    rows: Annotated[
        str, typer.Option("--rows", help="table1, table4, ours, all, names of rows or YAML files, by commas.")
    ] = "table1,table4",
    root: Root = None,
    split: SplitFile = None,
    labels: Annotated[
        str, typer.Option("--labels", help="Labels of the probe, separated by commas; abnormal means not normal.")
    ] = "abnormal",
    seeds: Seeds = "0,1,2",
    preset: Preset = "small",
    config_file: ConfigFile = None,
    overrides: Set = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Trials side by side; default: by cores, or one a GPU.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of each trial on a CPU.")] = 1,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would be run, and how long it may take.")] = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train, probe and tabulate the ablations of the paper and ours. Finished trials are never run again.

    Example: [cyan]afire ablate --data packs/childcxr --out studies/childcxr --seeds 0,1,2[/cyan]

    A trial is one row with one seed. Kill it and start it again with the same arguments: it goes on where it was.
    """
    from afire.cli.options import parse_labels, parse_seeds
    from afire.cli.settings import ABLATE, sort_settings
    from afire.config import load_config
    from afire.data.splits import read_split
    from afire.files import folder_lock
    from afire.studies.ablation_grid import begin_study, choose_rows, open_study, plan_trials
    from afire.studies.ablation_run import plan_workers, run_trials
    from afire.studies.steps import log_steps

    chosen = choose_rows(rows)
    [own] = sort_settings(overrides, ABLATE)
    study = open_study(
        data,
        out,
        load_config(preset, config_file, own),
        root=root,
        split=read_split(split) if split is not None else None,
        labels=parse_labels(labels),
    )
    trials = plan_trials(study, chosen, parse_seeds(seeds))
    waiting = [trial for trial in trials if trial.result() is None]
    workers = plan_workers(jobs, threads, device, len(waiting))
    if plan:
        _show_plan(trials, study, workers)
        return
    with folder_lock(out, "the study in"):
        begin_study(study)
        _say_start(len(chosen), trials, waiting, workers)
        outcome = run_trials(study, waiting, workers, log_steps(len(trials), len(trials) - len(waiting)))
        _write_table(study, chosen, trials, quiet)
    _end(outcome, waiting)


def _say_start(rows: int, trials: list[Trial], waiting: list[Trial], workers: Workers) -> None:
    import logging

    logging.getLogger("afire").info(
        "%d rows, %d different trials, %d finished; %d to run, %d side by side on %s",
        rows,
        len(trials),
        len(trials) - len(waiting),
        len(waiting),
        workers.jobs,
        f"{len(workers.gpus)} GPUs" if workers.gpus else f"the CPU, {workers.threads} thread(s) each",
    )


def _show_plan(trials: list[Trial], study: Study, workers: Workers) -> None:
    from afire.cli.options import console
    from afire.progress import format_seconds
    from afire.report.table import Column, table_of
    from afire.studies.ablation_run import estimate_seconds

    estimates = estimate_seconds(study, trials, workers)
    states = {trial.key: trial.state() for trial in trials}
    rows = []
    for trial in trials:
        about = "" if states[trial.key] == "finished" else format_seconds(estimates[trial.key])
        rows.append([trial.name, states[trial.key], ", ".join(trial.rows[1:]), about])
    left = [estimates[trial.key] for trial in trials if states[trial.key] != "finished"]
    screen = console()
    screen.print(table_of(["trial", Column("state", text=True), Column("also", text=True), "about"], rows).console())
    hours = format_seconds(max(sum(left) / workers.jobs, max(left, default=0.0)))
    screen.print(
        f"{len(trials)} trials, {len(left)} to run, {workers.jobs} side by side: about {hours}", highlight=False
    )


def _write_table(study: Study, rows: list[Row], trials: list[Trial], quiet: bool) -> None:
    from afire.cli.options import console
    from afire.report.ablation import show_ablation, write_ablation
    from afire.studies.ablation_table import make_table

    table = make_table(study, rows, trials)
    if table is None:
        return
    page = write_ablation(study.out, table)
    if not quiet:
        screen = console()
        show_ablation(screen, table)
        screen.print(str(page), soft_wrap=True, markup=False, highlight=False)


def _end(outcome: Outcome, trials: list[Trial]) -> None:
    """Exit codes: 128 + the signal that stopped it, 1 when a trial failed."""
    import logging

    logger = logging.getLogger("afire")
    for trial in trials:
        if trial.name in outcome.failed:
            log = trial.folder / "log.txt"
            logger.warning("failed: %s: %s; its log is %s", trial.name, outcome.failed[trial.name], log)
    if outcome.signal:
        logger.warning("stopped by a signal; the same command goes on from here")
        raise typer.Exit(128 + outcome.signal)
    if outcome.failed:
        raise typer.Exit(1)

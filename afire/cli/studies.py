"""Many runs, one table: ``afire compare`` of any results, ``afire ablate``, and ``afire reproduce`` of the paper.

Ablations and reproductions are steps in processes of their own: killed and started again, they go on where they were.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from afire.cli.options import (
    ConfigFile,
    Data,
    Device,
    Preset,
    Quiet,
    Root,
    Seeds,
    Set,
    SplitFile,
    Verbose,
    print_line,
)

if TYPE_CHECKING:
    from afire.studies.ablation_grid import Row, Study, Trial
    from afire.studies.ablation_run import Workers
    from afire.studies.recorded import PlannedStep
    from afire.studies.reproduce_plan import Request
    from afire.studies.reproduce_sets import Target
    from afire.studies.steps import Outcome
    from afire.tasks.compare import Comparison

TargetOption = Literal["table1", "table2", "table3", "table4", "fig-tsne", "fig-cam", "fig-restore", "all"]


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

    names = [word.strip() for word in metrics.split(",")] if metrics else None
    comparisons = compare_results(results, metrics=names, allow_different_splits=allow_different_splits)
    if not quiet:
        for comparison in comparisons:
            _show_comparison(comparison, names or comparison.metrics[:1], len(comparisons) > 1)
    if out is not None:
        _write_comparisons(comparisons, out)
        if not quiet:
            print_line(out)


def _show_comparison(comparison: Comparison, metrics: list[str], several: bool) -> None:
    """All means; differences in ``metrics`` only, because there are many, and all of them are in comparison.md."""
    from rich.text import Text

    from afire.cli.options import console
    from afire.report.task_tables import show_comparison

    screen = console()
    if several:
        screen.print(Text(f"{100 * comparison.fraction:g} % of the training labels", style="bold"))
    show_comparison(screen, comparison, metrics)


def _write_comparisons(comparisons: list[Comparison], out: Path) -> None:
    from afire.files import write_text
    from afire.report.style import save_figure, style
    from afire.report.task_figures import label_figure, p_value_figure
    from afire.report.task_tables import comparison_latex, comparison_markdown
    from afire.tasks.compare import all_pairs

    write_text(out / "comparison.md", comparison_markdown(comparisons))
    write_text(out / "comparison.tex", comparison_latex(comparisons))
    for comparison in comparisons:
        if len(comparison.labels) > 1 and comparison.entries[0].result.per_label:
            stem = f"labels-{100 * comparison.fraction:g}pct" if len(comparisons) > 1 else "labels"
            results, names = (
                [entry.result for entry in comparison.entries],
                [entry.name for entry in comparison.entries],
            )
            with style():
                save_figure(label_figure(results, comparison.metrics[0], names), out / stem)
        if len(comparison.entries) > 2:
            stem = f"p-values-{100 * comparison.fraction:g}pct" if len(comparisons) > 1 else "p-values"
            with style():
                save_figure(p_value_figure(all_pairs(comparison)), out / stem)


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
    from afire.data.splits import read_split
    from afire.files import folder_lock
    from afire.settings import load_config
    from afire.studies.ablation_grid import LOG, begin_study, choose_rows, open_study, plan_trials
    from afire.studies.ablation_run import plan_workers, run_trials
    from afire.studies.steps import log_steps

    selection = choose_rows(rows)
    [settings] = sort_settings(overrides, ABLATE)
    study = open_study(
        data,
        out,
        load_config(preset, config_file, settings),
        root=root,
        split=read_split(split) if split is not None else None,
        labels=parse_labels(labels),
    )
    trials = plan_trials(study, selection, parse_seeds(seeds))
    waiting = [trial for trial in trials if trial.result() is None]
    workers = plan_workers(jobs, threads, device, len(waiting))
    if plan:
        _show_trials(trials, study, workers)
        return
    with folder_lock(out, "the study in"):
        begin_study(study)
        _say_start(len(selection), trials, waiting, workers)
        outcome = run_trials(study, waiting, workers, log_steps(len(trials), len(trials) - len(waiting)))
        _write_table(study, selection, trials, quiet)
    folders = {trial.name: trial.folder for trial in waiting}
    end(outcome, lambda name: folders[name] / LOG)


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


def _show_trials(trials: list[Trial], study: Study, workers: Workers) -> None:
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
    remaining = [estimates[trial.key] for trial in trials if states[trial.key] != "finished"]
    screen = console()
    screen.print(table_of(["trial", Column("state", text=True), Column("also", text=True), "about"], rows).console())
    hours = format_seconds(max(sum(remaining) / workers.jobs, max(remaining, default=0.0)))
    screen.print(
        f"{len(trials)} trials, {len(remaining)} to run, {workers.jobs} side by side: about {hours}", highlight=False
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
        show_ablation(console(), table)
        print_line(page)


def reproduce(
    target: Annotated[TargetOption, typer.Argument(help="A table or a figure of the paper, or all of them.")],
    on: Annotated[
        Literal["phantom", "childcxr", "nih", "chexpert", "siim", "shenzhen"],
        typer.Option("--on", help="The films to run it on; the phantom is drawn, the others must be downloaded."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of everything; started again, it goes on there.")],
    data: Annotated[Path | None, typer.Option("--data", help="The set as a pack or a manifest.")] = None,
    root: Annotated[Path | None, typer.Option("--root", help="The set as it was downloaded.")] = None,
    pretrain_data: Annotated[
        Path | None,
        typer.Option(
            "--pretrain-data", help="Other films to pre-train on, as the paper does on MIMIC: pack, manifest."
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="The run of a pre-training that is there already; {seed}: one for each seed."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Scaled down: preset small, few epochs, no folds.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Only print the commands, to read, change and run.")] = False,
    preset: Preset = None,
    overrides: Set = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="Pre-training and all that follows; default 0,1,2; 0,1 when scaled down."),
    ] = None,
    fractions: Annotated[
        str | None, typer.Option("--fraction", help="Percent of the labels; default 1,10,100; 10,100 on the phantom.")
    ] = None,
    folds: Annotated[int | None, typer.Option("--folds", help="Default 5; 2 on the phantom; 0 = none.", min=0)] = None,
    films: Annotated[int | None, typer.Option("--films", help="Films of the phantom to draw.", min=60)] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Ablations side by side.", min=1)] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a table or figure of the paper from films to numbers: paper, ours, and where the protocols differ.

    Example: [cyan]afire reproduce all --on phantom --out reproduce[/cyan]

    Kill it and start it again with the same arguments: finished steps are not run again. Settings of one kind of step
    start with its name: --set finetune.training.epochs=3 (also segment, detect, ablate).
    """
    from afire.cli.options import parse_fractions, parse_seeds
    from afire.cli.settings import sorted_settings
    from afire.files import folder_lock
    from afire.studies.recorded import run_planned, step_path
    from afire.studies.reproduce_plan import Request, check_films
    from afire.studies.reproduce_plan import plan as plan_steps
    from afire.studies.reproduce_sets import DATASETS, scale_for
    from afire.studies.steps import log_steps

    scale = scale_for(on, quick).changed(
        preset=preset,
        settings=sorted_settings(overrides),
        seeds=parse_seeds(seeds) if seeds is not None else None,
        fractions=[100 * share for share in parse_fractions(fractions)] if fractions is not None else None,
        folds=folds,
        films=films,
    )
    targets, reasons = _targets(target, on)
    request = Request(
        out=out,
        dataset=DATASETS[on],
        scale=scale,
        targets=targets,
        data=data,
        root=root,
        pretrain_data=pretrain_data,
        weights=weights,
        device=device,
        jobs=jobs,
    )
    check_films(request)
    steps = plan_steps(request)
    if plan:
        show_steps(steps, out)
        return
    with folder_lock(out, "the reproduction in"):
        outcome = run_planned(steps, out, log_steps(len(steps)))
        _write_reproduction(request, outcome, reasons, quiet)
    end(outcome, lambda name: step_path(out, name, "log"))


def _targets(target: TargetOption, on: str) -> tuple[tuple[Target, ...], dict[Target, str]]:
    from afire.errors import UserError
    from afire.studies.reproduce_plan import possible_targets
    from afire.studies.reproduce_sets import DATASETS, TARGETS

    targets, reasons = possible_targets(TARGETS if target == "all" else (target,), DATASETS[on])
    if target != "all" and reasons:
        raise UserError(f"{target} cannot be run on {on}: {reasons[target]}; choose another --on.")
    return targets, reasons


def show_steps(steps: list[PlannedStep], out: Path) -> None:
    from afire.studies.recorded import done_steps, step_hashes

    finished = done_steps(steps, out, step_hashes(steps, out))
    for step in steps:
        state = "  (done)" if step.name in finished else ""
        typer.echo(f"# {step.name}{state}\n{step.command}")


def _write_reproduction(current: Request, outcome: Outcome, reasons: dict[Target, str], quiet: bool) -> None:
    """The page of everything in --out, also of earlier starts; on the terminal only the current targets."""
    from dataclasses import replace

    from afire.cli.options import console
    from afire.report.reproduce_page import show_targets, write_reproduction
    from afire.studies.reproduce_collect import collect
    from afire.studies.reproduce_plan import plan as plan_steps
    from afire.studies.reproduce_plan import with_finished

    request, seconds = with_finished(current, current.out)
    everything = replace(outcome, seconds={**seconds, **outcome.seconds})
    reports = collect(request, everything, reasons)
    commands = [step.command for step in plan_steps(request)]
    page = write_reproduction(request.out, reports, _reproduction_facts(request, everything), commands)
    reports = [report for report in reports if report.target in (*current.targets, *reasons)]
    if not quiet:
        show_targets(console(), reports)
        print_line(page)


def _reproduction_facts(request: Request, outcome: Outcome) -> dict[str, str]:
    from afire.progress import format_seconds
    from afire.studies.reproduce_plan import is_pretrained_once

    scale, total = request.scale, sum(outcome.seconds.values())
    percents = " / ".join(f"{percent:g}" for percent in scale.fractions)
    pretrained = "all on one pre-training" if is_pretrained_once(request) else "each with a pre-training of its own"
    protocol = {"paper": "the paper's", "quick": "scaled down (--quick)", "phantom": "shortened, for drawn films"}
    facts = {
        "films": request.dataset.title,
        "protocol": f"{protocol[scale.name]}; preset `{scale.preset}`",
        "repeated over": f"seeds {', '.join(map(str, scale.seeds))}, {pretrained}; labelling ratios {percents} %; "
        f"{scale.folds or 'no'} folds",
        "steps": f"{len(outcome.seconds)} finished, {len(outcome.failed)} failed; {format_seconds(total)} in all",
    }
    if request.dataset.name == "phantom":
        facts["meaning"] = "a tiny network and minutes: it shows that everything runs, not what the method is worth"
    return facts


def end(outcome: Outcome, logs: Callable[[str], Path]) -> None:
    """Exit codes: 128 + the signal that stopped it, 1 when a step failed; ``logs`` is where the log of a step is."""
    import logging

    logger = logging.getLogger("afire")
    for name, message in outcome.failed.items():
        logger.warning("failed: %s: %s; its log is %s", name, message, logs(name))
    if outcome.signal:
        logger.warning("stopped by a signal; the same command goes on from here")
        raise typer.Exit(128 + outcome.signal)
    if outcome.failed:
        raise typer.Exit(1)

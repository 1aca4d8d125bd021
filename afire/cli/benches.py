"""Methods side by side at an equal budget: ``afire baselines`` of pre-trainings, ``afire detect bench`` of detectors.

Every pre-training, fit and evaluation is a step in a process of its own: killed and started again, a bench goes on
where it was.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from afire.cli.options import (
    Device,
    Plan,
    Preset,
    Quiet,
    Seeds,
    Set,
    SplitFile,
    Verbose,
    console,
    parse_fractions,
    parse_seeds,
    print_line,
)
from afire.cli.studies import end, show_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from afire.studies.baselines import Baselines, By, Length, Training
    from afire.studies.baselines_search import Choice
    from afire.studies.detect_bench import Bench, Fit, LongFit
    from afire.studies.recorded import PlannedStep
    from afire.studies.steps import Outcome


def baselines(
    data: Annotated[Path, typer.Option("--data", help="A pack or a manifest.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the study; started again, it goes on there.")],
    methods: Annotated[
        str, typer.Option("--methods", help="all, or methods separated by commas; see `afire pretrain --help`.")
    ] = "all",
    seeds: Seeds = "0,1,2",
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            min=1e-6,
            help="Counted TFLOP (1e12 operations) of each pre-training. Default 100 without --epochs.",
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, help="The same epochs for all; with --budget a second table.")
    ] = None,
    tasks: Annotated[
        str, typer.Option("--tasks", help="all, or some of probe, knn, finetune, segment, patchcore, gaussian.")
    ] = "all",
    labels: Annotated[
        str, typer.Option("--labels", help="Labels to probe and fine-tune, by commas; abnormal means not normal.")
    ] = "abnormal",
    fractions: Annotated[
        str, typer.Option("--fraction", help="Percent of the labels that the linear probe gets, by commas.")
    ] = "1,10,100",
    split: SplitFile = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also", help="A further set on which the same weights are measured, PATH or NAME=PATH. Repeat for more."
        ),
    ] = None,
    init: Annotated[
        str | None, typer.Option("--init", help="Weights of the row imagenet: a file or a run, as of `afire pretrain`.")
    ] = None,
    init_all: Annotated[
        bool,
        typer.Option("--init-all", help="All methods start from --init; differences are then to the row imagenet."),
    ] = False,
    search: Annotated[
        bool,
        typer.Option("--search", help="First try 3 learning rates x 2 values of an own setting, on development films."),
    ] = False,
    search_share: Annotated[
        float, typer.Option("--search-share", min=0.01, max=1, help="Length of a search's trial, of the whole.")
    ] = 0.25,
    preset: Preset = "small",
    overrides: Set = None,
    method_settings: Annotated[
        list[str] | None,
        typer.Option("--with", help="A setting of one method: mae.options.mask_ratio=0.6.", metavar="METHOD.KEY=VALUE"),
    ] = None,
    in_turn: Annotated[
        bool,
        typer.Option(
            "--in-turn", help="Finish one method with its tasks before the next: for a study of several sittings."
        ),
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Commands side by side, each on one core.")] = 1,
    plan: Plan = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Pre-train with many methods at an equal budget, then probe, fine-tune, segment, detect. Can be killed, resumed.

    Example: [cyan]afire baselines --data packs/nih --methods afire,mae,genesis --budget 100 --out baselines[/cyan]

    --set training.batch_size=32 goes to all pre-trainings that read it; finetune., segment. and detect. before a key
    name another command. Test films are looked at after everything is trained, or, --in-turn, after each method.
    """
    from afire.cli.settings import sorted_settings
    from afire.errors import UserError
    from afire.files import folder_lock
    from afire.studies import baselines as study
    from afire.studies.baselines_sets import open_further_sets, open_study_set
    from afire.studies.detect_bench import settings_by_method
    from afire.studies.recorded import run_planned, step_path
    from afire.studies.steps import log_steps
    from afire.weights import said_by

    if init_all and init is None:
        raise UserError("--init-all: say which weights all methods start from with --init FILE.")
    names, without_weights = study.possible_methods(methods, init)
    lengths = [study.Length("flops", budget if budget is not None else 100.0)] if budget or not epochs else []
    lengths += [study.Length("epochs", epochs)] if epochs else []
    settings = sorted_settings(overrides)
    films = open_study_set(data, out, split)
    further = open_further_sets(also or (), out, films)
    task_names = study.parse_names(tasks, study.TASKS, "--tasks")
    left_out = [message for each in (films, *further) for message in study.possible_tasks(task_names, each)[1]]
    for message in (*without_weights, *left_out):
        logging.getLogger("afire").info("%s", message)
    request = study.Baselines(
        out=out,
        films=films,
        methods=names,
        seeds=parse_seeds(seeds),
        lengths=lengths,
        tasks=task_names,
        labels=labels,
        fractions=[100 * share for share in parse_fractions(fractions)],
        preset=preset or "small",
        settings=settings,
        own=settings_by_method(method_settings or (), names),
        start=init,
        start_all=init_all,
        weights_settings=said_by(init, data, preset) if init is not None else {},
        in_turn=in_turn,
        also=further,
    )
    machine = ("--device", device)
    threads = _one_core_each(jobs)
    trials: Sequence[Choice] = ()
    with folder_lock(out, "the study in"):
        if search:
            shorter = study.Length(lengths[0].by, lengths[0].amount * search_share)
            searched = _search(request, shorter, machine, plan, jobs, threads)
            if searched is None:
                return
            request, trials = searched
        trainings: Mapping[tuple[By, str], Training] = {
            (length.by, name): study.plan_training(request, name, length) for length in lengths for name in names
        }
        steps = study.plan_steps(request, trainings, machine)
        if plan:
            show_steps(steps, out)
            return
        outcome = run_planned(steps, out, log_steps(len(steps)), jobs=jobs, environment=threads)
        _write_baselines(request, trainings, trials, quiet)
    end(outcome, lambda name: step_path(out, name, "log"))


def _one_core_each(jobs: int) -> dict[str, str]:
    """The environment of commands that run side by side."""
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if jobs > 1 else {}


def _search(
    request: Baselines, length: Length, machine: tuple[str, ...], plan: bool, jobs: int, threads: dict[str, str]
) -> tuple[Baselines, Sequence[Choice]] | None:
    """The study with the settings that the search chose; None where only the plan is shown."""
    from dataclasses import replace

    from afire.studies.baselines_search import choose, development, search_steps
    from afire.studies.recorded import run_planned, step_path
    from afire.studies.steps import log_steps

    on_development = development(request)
    steps = search_steps(on_development, length, machine)
    if plan:
        show_steps(steps, request.out)
        return None
    outcome = run_planned(steps, request.out, log_steps(len(steps)), jobs=jobs, environment=threads)
    if outcome.signal:
        end(outcome, lambda name: step_path(request.out, name, "log"))
    settings, trials = choose(on_development, length)
    return replace(request, chosen=settings), trials


def _write_baselines(
    request: Baselines, trainings: Mapping[tuple[By, str], Training], trials: Sequence[Choice], quiet: bool
) -> None:
    from afire.report.baselines import show_baselines, write_baselines
    from afire.studies.baselines_table import collect, facts, traps

    tables = collect(request, trainings)
    if not tables:
        return
    warnings = traps(request, tables)
    page = write_baselines(request.out, tables, facts(request), warnings, trials)
    if not quiet:
        show_baselines(console(), tables, warnings)
        print_line(page)


def bench(
    data: Annotated[
        list[str], typer.Option("--data", help="A pack or a manifest, as PATH or NAME=PATH. Repeat for more sets.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder of the bench; started again, it goes on there.")],
    methods: Annotated[
        str, typer.Option("--methods", help="all, or detectors separated by commas; see `afire detect fit --help`.")
    ] = "all",
    seeds: Seeds = "0,1,2",
    budget: Annotated[
        float, typer.Option("--budget", min=0.001, help="Counted TFLOP (1e12 operations) that each training may take.")
    ] = 10.0,
    length: Annotated[
        Literal["equal", "published", "both"],
        typer.Option(
            help="equal: the budget for all; published: each for the epochs of its own paper; both: equal, and a "
            "second column at published length where --most-hours allows it."
        ),
    ] = "equal",
    most_hours: Annotated[
        float, typer.Option("--most-hours", min=0, help="Core-hours that one fit at published length may take (both).")
    ] = 10.0,
    weights: Annotated[
        str, typer.Option("--weights", help="What detectors that take weights start from; random: with --preset.")
    ] = "random",
    preset: Preset = "small",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="A setting of one method: nsa.train.batch_size=32. Repeat for more.",
            metavar="METHOD.KEY=VALUE",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Fits side by side, each on one core.")] = 1,
    plan: Plan = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fit and evaluate many detectors on many sets, at an equal budget, beside trivial ones. Can be killed and resumed.

    Example: [cyan]afire detect bench --data packs/childcxr --data packs/nih --methods all --out bench[/cyan]

    Nothing is chosen on test films: scores are the published ones, thresholds come from held-out normal films.
    """
    from afire.files import folder_lock
    from afire.studies import detect_bench as study
    from afire.studies.recorded import run_planned, step_path
    from afire.studies.steps import log_steps

    names = study.parse_methods(methods)
    request = study.Bench(
        out=out,
        sets=[study.open_set(text, out) for text in data],
        methods=names,
        seeds=parse_seeds(seeds),
        tera_flops=budget,
        length=length,
        weights=weights,
        preset=preset or "small",
        settings=study.settings_by_method(overrides or (), names),
        most_hours=most_hours,
    )
    fits = {(films.name, name): study.plan_fit(request, films, name) for films in request.sets for name in names}
    machine = ("--device", device)
    steps = study.plan_steps(request, fits, machine)
    if plan:
        show_steps(steps, out)
        if length == "both":
            show_steps(study.plan_long_steps(request, study.plan_long_fits(request, fits), machine), out)
        return

    def run(steps: list[PlannedStep]) -> Outcome:
        return run_planned(steps, out, log_steps(len(steps)), jobs=jobs, environment=_one_core_each(jobs))

    with folder_lock(out, "the bench in"):
        outcome = run(steps)
        longer = study.plan_long_fits(request, fits) if length == "both" else {}
        if longer and not outcome.signal:
            _write_bench(request, fits, longer, quiet=True)
            long_outcome = run(study.plan_long_steps(request, longer, machine))
            outcome.failed.update(long_outcome.failed)
            outcome.signal = long_outcome.signal
        _write_bench(request, fits, longer, quiet)
    end(outcome, lambda name: step_path(out, name, "log"))


def _write_bench(
    request: Bench,
    fits: Mapping[tuple[str, str], Fit],
    longer: Mapping[tuple[str, str], LongFit],
    quiet: bool,
) -> None:
    from afire.report.detect_bench import show_bench, write_bench
    from afire.studies.detect_bench import facts
    from afire.studies.detect_bench_table import collect

    tables = collect(request, fits, longer)
    if not tables:
        return
    page = write_bench(request.out, tables, facts(request))
    if not quiet:
        show_bench(console(), tables)
        print_line(page)

"""``afire baselines``: pre-training methods side by side, at equal compute or equal epochs, in one table."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afire.cli.options import Device, Preset, Quiet, Seeds, Set, SplitFile, Verbose, print_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from afire.studies.baselines import Baselines, By, Length, Training
    from afire.studies.baselines_search import Choice


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
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would be run.")] = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Pre-train with many methods at an equal budget, then probe, fine-tune, segment, detect. Can be killed, resumed.

    Example: [cyan]afire baselines --data packs/nih --methods afire,mae,genesis --budget 100 --out baselines[/cyan]

    --set training.batch_size=32 goes to all pre-trainings that read it; finetune., segment. and detect. before a key
    name another command. Test films are looked at after everything is trained, or, --in-turn, after each method.
    """
    from afire.cli.options import parse_fractions, parse_seeds
    from afire.cli.studies import end, show_steps, sorted_settings
    from afire.errors import UserError
    from afire.files import folder_lock
    from afire.studies import baselines as study
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
    films = study.open_study_set(data, out, split)
    task_names, left_out = study.possible_tasks(study.parse_names(tasks, study.TASKS, "--tasks"), films)
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
    )
    machine = ("--device", device)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if jobs > 1 else {}
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
        _write(request, trainings, trials, quiet)
    end(outcome, lambda name: step_path(out, name, "log"))


def _search(
    request: Baselines, length: Length, machine: tuple[str, ...], plan: bool, jobs: int, threads: dict[str, str]
) -> tuple[Baselines, Sequence[Choice]] | None:
    """The study with the settings that the search chose; None where only the plan is shown."""
    from dataclasses import replace

    from afire.cli.studies import end, show_steps
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


def _write(
    request: Baselines, trainings: Mapping[tuple[By, str], Training], trials: Sequence[Choice], quiet: bool
) -> None:
    from afire.cli.options import console
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

"""``afire reproduce``: the paper's tables and figures, end to end on the films that are there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from afire.cli.options import Device, Preset, Quiet, Set, Verbose

if TYPE_CHECKING:
    from afire.studies.reproduce_plan import Request
    from afire.studies.reproduce_run import PlannedStep
    from afire.studies.reproduce_sets import Target
    from afire.studies.steps import Outcome

Asked = Literal["table1", "table2", "table3", "table4", "fig-tsne", "fig-cam", "fig-restore", "all"]


def reproduce(
    target: Annotated[Asked, typer.Argument(help="A table or a figure of the paper, or all of them.")],
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
    from afire.files import folder_lock
    from afire.studies.reproduce_plan import Request, check_films
    from afire.studies.reproduce_plan import plan as plan_steps
    from afire.studies.reproduce_run import run_planned
    from afire.studies.reproduce_sets import DATASETS, scale_for
    from afire.studies.steps import log_steps

    scale = scale_for(on, quick).changed(
        preset=preset,
        settings=_sorted_settings(overrides),
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
        _show_plan(steps, out)
        return
    with folder_lock(out, "the reproduction in"):
        outcome = run_planned(steps, out, log_steps(len(steps)))
        _write(request, outcome, reasons, quiet)
    _end(outcome, out)


def _sorted_settings(overrides: list[str] | None) -> dict[str, list[str]]:
    """Those of the pre-training, and by their names those of the commands that follow."""
    from dataclasses import replace

    from afire.cli.settings import ABLATE, DETECT, FINETUNE, PRETRAIN, SEGMENT, sort_settings

    owners = [PRETRAIN, *(replace(owner, by_name=True) for owner in (FINETUNE, SEGMENT, DETECT, ABLATE))]
    shares = sort_settings(overrides, *owners)
    return {owner.command: share for owner, share in zip(owners, shares, strict=True)}


def _targets(target: Asked, on: str) -> tuple[tuple[Target, ...], dict[Target, str]]:
    from afire.errors import UserError
    from afire.studies.reproduce_plan import possible_targets
    from afire.studies.reproduce_sets import DATASETS, TARGETS

    targets, reasons = possible_targets(TARGETS if target == "all" else (target,), DATASETS[on])
    if target != "all" and reasons:
        raise UserError(f"{target} cannot be run on {on}: {reasons[target]}; choose another --on.")
    return targets, reasons


def _show_plan(steps: list[PlannedStep], out: Path) -> None:
    from afire.studies.reproduce_run import is_done, read_step, step_hashes

    hashes = step_hashes(steps, out)
    for step in steps:
        state = "  (done)" if is_done(step, read_step(out, step.name), hashes[step.name]) else ""
        typer.echo(f"# {step.name}{state}\n{step.command}")


def _write(asked: Request, outcome: Outcome, reasons: dict[Target, str], quiet: bool) -> None:
    """The page of everything in --out, also of earlier starts; on the terminal what was asked for now."""
    from dataclasses import replace

    from afire.cli.options import console
    from afire.report.reproduce_page import show_targets, write_reproduction
    from afire.studies.reproduce_collect import collect
    from afire.studies.reproduce_plan import plan as plan_steps
    from afire.studies.reproduce_plan import with_finished

    request, seconds = with_finished(asked, asked.out)
    everything = replace(outcome, seconds={**seconds, **outcome.seconds})
    reports = collect(request, everything, reasons)
    commands = [step.command for step in plan_steps(request)]
    page = write_reproduction(request.out, reports, _facts(request, everything), commands)
    reports = [report for report in reports if report.target in (*asked.targets, *reasons)]
    if not quiet:
        screen = console()
        show_targets(screen, reports)
        screen.print(str(page), soft_wrap=True, markup=False, highlight=False)


def _facts(request: Request, outcome: Outcome) -> dict[str, str]:
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


def _end(outcome: Outcome, out: Path) -> None:
    """Exit codes: 128 + the signal that stopped it, 1 when a step failed."""
    import logging

    logger = logging.getLogger("afire")
    for name, message in outcome.failed.items():
        logger.warning("step %s failed: %s; its log is %s", name, message, out / "steps" / f"{name}.log")
    if outcome.signal:
        logger.warning("stopped by a signal; the same command goes on from here")
        raise typer.Exit(128 + outcome.signal)
    if outcome.failed:
        raise typer.Exit(1)

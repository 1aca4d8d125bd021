"""``afire detect run``: a fitted detector over a film or a folder of films."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afire.cli.options import Device, Quiet, Verbose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from afire.tasks.detect.findings import FilmResult, Rule


def run(
    source: Annotated[Path, typer.Argument(metavar="FILE_OR_FOLDER", help="A film or a folder: PNG, JPEG or DICOM.")],
    model: Annotated[Path, typer.Option("--model", help="The folder of a detector, from `afire detect fit`.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for results, pictures and the report.")],
    threshold: Annotated[float | None, typer.Option(help="Your own score to alarm from, stated in the report.")] = None,
    false_alarms: Annotated[
        float | None, typer.Option(help="Your own share of normal films that may alarm, such as 0.01.")
    ] = None,
    pictures: Annotated[bool, typer.Option("--pictures/--no-pictures", help="Draw every film.")] = True,
    dicom: Annotated[
        bool, typer.Option("--dicom", help="Also write overlays as DICOM, in the study of a DICOM film.")
    ] = False,
    recursive: Annotated[bool, typer.Option(help="Look into subfolders.")] = True,
    batch: Annotated[int, typer.Option(help="Films that the networks look at together.", min=1)] = 32,
    workers: Annotated[
        int | None, typer.Option(help="Threads, each with a batch of its own; default: the cores.", min=1)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace results that are already in --out.")] = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Score films: how far each is from normal ones, where, and what normal would look like there.

    Example: [cyan]afire detect run films --model detectors/nih --out results/today[/cyan]

    Writes results.csv, results.json and report.html. Films unlike those of the training are flagged, not scored; files
    that cannot be read are listed.
    """
    from afire.cli.options import console
    from afire.errors import UserError
    from afire.report.detect_page import write_detect_page
    from afire.report.detect_pictures import LEGEND, Painter, heat_legend
    from afire.tasks.backbone import pick_device
    from afire.tasks.detect.detector import Detector
    from afire.tasks.detect.findings import header_of, rule_of, write_results
    from afire.tasks.detect.run import RunTask, detector_hash, run_detector

    if resume and force:
        raise UserError("--resume goes on with the results in --out and --force replaces them; give one of them.")
    if dicom and not pictures:
        raise UserError("--dicom writes pictures; leave out --no-pictures.")
    detector = Detector.load(model).to(pick_device(device))
    rule = rule_of(detector, threshold, false_alarms)
    about = {"name": model.resolve().name, "hash": detector_hash(model)}
    painter = Painter(out, detector.scale, detector.config.image.fit, about["hash"], dicom) if pictures else None
    task = RunTask(
        detector=detector,
        model_hash=about["hash"],
        source=source,
        out=out,
        draw=painter,
        picture_settings=f"pictures {pictures}, dicom {dicom}",
        batch=batch,
        workers=workers,
        recursive=recursive,
        resume=resume,
        force=force,
    )
    results = run_detector(task)
    write_results(out, results, rule, header_of(detector, rule, about))
    if pictures:
        _save_legend(out / LEGEND, heat_legend(detector.scale))
    page = write_detect_page(out, results, rule, detector, about)
    if not quiet:
        _show(console(), results, rule, page)


def _save_legend(path: Path, image: Any) -> None:
    from afire.files import write_atomic

    write_atomic(path, image.save)


def _show(screen: Console, results: Sequence[FilmResult], rule: Rule, page: Path) -> None:
    from rich.table import Table
    from rich.text import Text

    from afire.report.detect_page import visible
    from afire.tasks.detect.detector import DISCLAIMER
    from afire.tasks.detect.findings import SCORED, counts, ranked

    table = Table(box=None, pad_edge=False)
    for name in ("score", "percentile", "p"):
        table.add_column(name, justify="right")
    for name in ("", "film", "most deviating region"):
        table.add_column(name, overflow="fold")
    in_order = ranked(results)
    for result in [one for one in in_order if one.status == SCORED][:5]:
        judged = rule.judge(result)
        assert judged is not None and result.score is not None
        alarm = Text("alarm", "bold yellow") if judged.alarm else Text("")
        numbers = (f"{result.score:.2f}", f"{judged.percentile:.1f} %", f"{judged.p_value:.4f}")
        table.add_row(*numbers, alarm, Text(visible(result.file)), Text(result.region))
    if table.row_count:
        screen.print(table)
    for result in [one for one in in_order if one.status != SCORED][:5]:
        said = visible(f"{result.file}: {'; '.join(result.objections)}")
        screen.print(Text.assemble((f"{result.status}: ", "yellow"), said), soft_wrap=True)
    words = ", ".join(f"{count:,} {name}" for name, count in counts(results, rule).items())
    screen.print(f"{len(results):,} films: {words}", highlight=False, markup=False)
    screen.print(f"A film alarms at a {rule.words}.", highlight=False, markup=False)
    screen.print(DISCLAIMER, highlight=False, markup=False)
    screen.print(str(page), soft_wrap=True, markup=False, highlight=False)

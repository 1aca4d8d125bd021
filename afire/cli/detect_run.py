"""``afire detect run``: a detector over a folder of films, or over a pack in shards, here or on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afire.cli.options import Address, Device, Engine, Finish, Quiet, ShardOf, Shards, Verbose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from afire.cluster.shards import Do, Shard, Where
    from afire.detect.base import AnomalyDetector
    from afire.detect.findings import FilmResult, Rule
    from afire.detect.packed import PackedRun


def run(
    source: Annotated[
        Path | None, typer.Argument(metavar="FILE_OR_FOLDER", help="A film or a folder: PNG, JPEG or DICOM.")
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder for results, pictures and the report.")],
    model: Annotated[
        Path,
        typer.Option(
            "--model", help="A detector of `afire detect fit`, or a bundle with one; without it the one built in."
        ),
    ] = Path("builtin"),
    data: Annotated[Path | None, typer.Option("--data", help="Instead of a folder: a pack, in shards.")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Your own score to flag films from, stated in the report.")
    ] = None,
    false_alarms: Annotated[
        float | None, typer.Option(help="Your own share of normal films that may be flagged, such as 0.01.")
    ] = None,
    pictures: Annotated[bool, typer.Option("--pictures/--no-pictures", help="Draw every film.")] = True,
    dicom_out: Annotated[
        str, typer.Option("--dicom-out", help="Also write DICOM objects for each DICOM film, of sc, sr, seg, gsps.")
    ] = "",
    dicom: Annotated[bool, typer.Option("--dicom", help="The old name of --dicom-out sc.", hidden=True)] = False,
    recursive: Annotated[bool, typer.Option(help="Look into subfolders.")] = True,
    batch: Annotated[int, typer.Option(help="Films that the networks look at together.", min=1)] = 32,
    workers: Annotated[
        int | None, typer.Option(help="Threads, each with a batch of its own; default: the cores.", min=1)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace results that are already in --out.")] = False,
    shards: Shards = None,
    shard: ShardOf = None,
    finish: Finish = False,
    engine: Engine = "local",
    address: Address = None,
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
    from afire.cluster.shards import Where, shards_asked
    from afire.detect.base import detector_folder, load_detector
    from afire.detect.findings import rule_of
    from afire.detect.run import RunTask, detector_hash, run_detector
    from afire.errors import UserError
    from afire.pacs.objects import draw_with_objects
    from afire.report.detect_pictures import Painter
    from afire.weights import pick_device

    if resume and force:
        raise UserError("--resume goes on with the results in --out and --force replaces them; give one of them.")
    if dicom:
        console(stderr=True).print(
            "--dicom is now --dicom-out sc, which also writes sr, seg and gsps.", highlight=False
        )
        dicom_out = dicom_out or "sc"
    if (source is None) == (data is None):
        raise UserError("give either films to score, a file or a folder, or --data with a pack.")
    if data is None and (shards or shard or finish or engine == "ray"):
        raise UserError("--shards, --shard, --finish and --engine are for packs; give one with --data.")
    folder = detector_folder(model)
    detector = load_detector(folder).to(pick_device(device))
    rule = rule_of(detector, threshold, false_alarms)
    about = {"name": model.resolve().name, "hash": detector_hash(folder)}
    if data is not None:
        if dicom_out:
            raise UserError("--dicom-out needs DICOM files, and a pack has none; give their folder instead of --data.")
        packed = PackOptions(model, data, out, pictures, batch, workers, device)
        shard_choice = shards_asked(shards, shard, finish)
        results = run_pack(
            packed, detector, shard_choice, Where(engine, address, workers), finish, force and not resume
        )
        if results is None:
            return
        _report(out, results, detector, rule, about, pictures, quiet)
        return
    painter = Painter(out, detector.scale, detector.config.image.fit) if pictures else None
    task = RunTask(
        detector=detector,
        model_hash=about["hash"],
        source=source,  # type: ignore[arg-type]
        out=out,
        draw=draw_with_objects(painter, dicom_out, out, detector, rule, about["hash"]),
        restore=pictures,
        picture_settings=f"pictures {pictures}, dicom {dicom_out or False}",
        batch=batch,
        workers=workers,
        recursive=recursive,
        resume=resume,
        force=force,
    )
    _report(out, run_detector(task), detector, rule, about, pictures, quiet)


def _report(
    out: Path,
    results: Sequence[FilmResult],
    detector: AnomalyDetector,
    rule: Rule,
    about: dict[str, str],
    pictures: bool,
    quiet: bool,
) -> None:
    """Write the results' files and the page, and show a summary."""
    from afire.cli.options import console
    from afire.detect.findings import counts, header_of, warnings_of, write_results
    from afire.report.detect_page import write_detect_page
    from afire.report.detect_pictures import LEGEND, heat_legend

    groups = counts(results, rule)
    write_results(out, results, rule, header_of(detector, rule, about, groups))
    if pictures:
        _save_legend(out / LEGEND, heat_legend(detector.scale))
    page = write_detect_page(out, results, rule, detector, about)
    if not quiet:
        _show(console(), results, rule, page, groups, warnings_of(detector, groups, rule))


def _save_legend(path: Path, image: Any) -> None:
    from afire.files import write_atomic

    write_atomic(path, image.save)


def _show(
    screen: Console,
    results: Sequence[FilmResult],
    rule: Rule,
    page: Path,
    groups: Mapping[str, int],
    warnings: Sequence[str],
) -> None:
    from rich.table import Table
    from rich.text import Text

    from afire.detect.base import DISCLAIMER
    from afire.detect.findings import SCORED, ranked
    from afire.detect.normals import CALIBRATE, OTHER_SOURCE
    from afire.report.detect_files import visible

    table = Table(box=None, pad_edge=False)
    for name in ("score", "percentile", "p"):
        table.add_column(name, justify="right")
    for name in ("", "film", "most deviating region"):
        table.add_column(name, overflow="fold")
    in_order = ranked(results)
    for result in [film for film in in_order if film.status == SCORED][:5]:
        judged = rule.judge(result)
        assert judged is not None and result.score is not None
        flag = Text("flagged", "bold yellow") if judged.alarm else Text("")
        numbers = (f"{result.score:.2f}", f"{judged.percentile:.1f} %", f"{judged.p_value:.4f}")
        table.add_row(*numbers, flag, Text(visible(result.file)), Text(result.region))
    if table.row_count:
        screen.print(table)
    for result in [film for film in in_order if film.status != SCORED][:5]:
        message = visible(f"{result.file}: {'; '.join(result.objections)}")
        screen.print(Text.assemble((f"{result.status}: ", "yellow"), message), soft_wrap=True)
    titles = {"alarm": "flagged", "no alarm": "not flagged"}
    parts = ", ".join(f"{count:,} {titles.get(name, name)}" for name, count in groups.items())
    films = f"{len(results):,} film{'s' if len(results) != 1 else ''}"
    screen.print(f"{films}: {parts}", highlight=False, markup=False)
    screen.print(f"A film is flagged at a {rule.words}.", highlight=False, markup=False)
    for warning in warnings:
        screen.print(f"Note: {warning}.", highlight=False, markup=False)
    warned = sum(any(note.startswith(OTHER_SOURCE) for note in film.notes) for film in results)
    if warned:
        screen.print(f"{warned:,} films are {OTHER_SOURCE}; {CALIBRATE}.", highlight=False, markup=False)
    screen.print(DISCLAIMER, highlight=False, markup=False)
    screen.print(str(page), soft_wrap=True, markup=False, highlight=False)


@dataclass(frozen=True)
class PackOptions:
    """The options of `afire detect run` with a pack."""

    model: Path
    data: Path
    out: Path
    pictures: bool
    batch: int
    workers: int | None
    device: str


def open_run(options: PackOptions, detector: AnomalyDetector | None = None) -> PackedRun:
    """The run, with detector and films open."""
    from functools import partial

    from afire.data.pack import PackedFilms
    from afire.detect.base import detector_folder, load_detector
    from afire.detect.packed import PackedRun
    from afire.detect.run import detector_hash
    from afire.report.detect_pictures import Painter
    from afire.weights import pick_device

    folder = detector_folder(options.model)
    if detector is None:
        detector = load_detector(folder).to(pick_device(options.device))
    return PackedRun(
        detector=detector,
        model_hash=detector_hash(folder),
        films=PackedFilms(options.data),
        out=options.out,
        # A packed film is square, whatever made it so.
        draw_in=partial(Painter, scale=detector.scale, fit="squash") if options.pictures else None,
        restore=options.pictures,
        picture_settings=f"pictures {options.pictures}",
        batch=options.batch,
        workers=options.workers,
    )


def run_pack(
    options: PackOptions,
    detector: AnomalyDetector,
    shard_choice: tuple[int | None, Shard | None],
    where: Where,
    finish: bool,
    force: bool,
) -> list[FilmResult] | None:
    """Score all shards, or one, or none; the results of all films, or None for a single shard."""
    from afire.cli.options import print_line
    from afire.cluster.engine import do_shards
    from afire.cluster.shards import Work, all_shards
    from afire.detect.base import detector_folder
    from afire.detect.findings import JOURNAL
    from afire.detect.packed import begun_run, check_out, finish_run, score_shard, shards_of
    from afire.files import require_own

    count, single = shard_choice
    require_own(options.out, JOURNAL)
    check_out(options.out, force and single is None and not finish)
    run = open_run(options, detector)
    count = shards_of(len(run.films), count) if count is not None or not finish else begun_run(options.out)

    def here(_: Mapping[str, Any]) -> Do:
        return lambda shard, _: score_shard(run, shard)

    if not finish:
        on_ray = where.engine == "ray"
        paths = {"model": detector_folder(options.model), "data": options.data, "out": options.out}
        absolute_paths = {name: path.absolute() for name, path in paths.items()}
        settings = {**vars(options), **absolute_paths, "workers": 1} if on_ray else {}
        work = Work("detecting", scorer if on_ray else here, settings, keeps=True, gpus=int(options.device == "cuda"))
        scored = do_shards(work, [single] if single is not None else all_shards(count), where)
    if single is not None:
        print_line(f"shard {single}: {f'{scored:,} films scored' if scored else 'nothing to do'}: {options.out}")
        return None
    return finish_run(run, count)


def scorer(settings: Mapping[str, Any]) -> Do:
    """The function that scores a shard on another machine, with detector and films open."""
    from afire.detect.packed import score_shard

    run = open_run(PackOptions(**settings))
    return lambda shard, _: score_shard(run, shard)

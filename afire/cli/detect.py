"""``afire detect``: fit a detector on normal films, evaluate it on films with findings, run it over new films."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from afire.cli.options import (
    Address,
    ConfigFile,
    Data,
    Device,
    Engine,
    Finish,
    Force,
    Name,
    Preset,
    Quiet,
    Root,
    Set,
    ShardOf,
    Shards,
    Verbose,
)
from afire.cli.studies import bench
from afire.detect import DETECTORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from afire.config import Config
    from afire.data.pack import Films
    from afire.data.splits import Split
    from afire.detect.base import AnomalyDetector
    from afire.detect.findings import FilmResult, Rule


def fit(
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Folder for the detector.")],
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help=f"The kind of detector: {', '.join(DETECTORS)}. Default: taught, which starts from the built-in one; "
            "with --weights: afire.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            help="What it starts from: a run, a bundle, hf://owner/name, a file of a ViT, or random. Some take none.",
            metavar="WEIGHTS",
        ),
    ] = None,
    root: Root = None,
    split: Annotated[
        Path | None,
        typer.Option(
            "--split", help="A split file: normals of train fit, normals of val choose and calibrate, test is not seen."
        ),
    ] = None,
    protocol: Annotated[
        Literal["chexpert250"] | None,
        typer.Option(help="Instead of --split: set aside what `afire detect eval --protocol` will test."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Every random choice follows from it.", min=0)] = None,
    score: Annotated[
        str | None, typer.Option("--score", help="auto, or the name of a score, or several joined by +.")
    ] = None,
    procedure: Annotated[
        Literal["afire", "paper"],
        typer.Option(help="paper: SLM lesions, no lesion classifier, the restoration score; of --method afire."),
    ] = "afire",
    preset: Preset = None,
    config_file: ConfigFile = None,
    overrides: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a fit that was stopped.")] = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fit a detector on normal films, choose its score on drawn lesions, calibrate it on held-out normals.

    Example: [cyan]afire detect fit --weights runs/nih --data packs/nih --out detectors/nih[/cyan]

    No film with a finding is used. The choice and the numbers behind it are written to OUT/choice.md.
    """
    from afire.cli.settings import PRETRAIN, Owner, sort_settings
    from afire.cli.tasks import stops_on_signal
    from afire.data.pack import config_for, open_films
    from afire.detect.base import FitTask
    from afire.detect.fit import detect_settings, fit_detector, networks_for
    from afire.report.detect_tables import show_choice, write_choice

    method = method or ("taught" if weights is None and procedure == "afire" else "afire")
    own_settings, networks_own = sort_settings(overrides, Owner("detect", DETECTORS[method].Settings), PRETRAIN)
    arguments = [
        *own_settings,
        *([f"seed={seed}"] if seed is not None else []),
        *([f"score={score}"] if score is not None else []),
    ]
    networks = networks_for(method, weights, data, preset, config_file, networks_own)
    config = config_for(networks.config, data)
    settings = detect_settings(arguments, method, _choices(procedure, method, config))
    image = config.image
    films = open_films(data, root, image.size, image.fit, image.voi)
    task = FitTask(
        config=config,
        settings=settings,
        films=films,
        out=out,
        pretrained=networks.pretrained,
        run=networks.run,
        init=networks.init,
        split=_split(films, split, protocol),
        source=data.name,
        device=device,
        resume=resume,
        method=method,
        procedure=procedure,
    )
    with stops_on_signal():
        detector = fit_detector(task)
    page = write_choice(out, detector)
    if not quiet:
        from afire.cli.options import console

        screen = console()
        show_choice(screen, detector)
        screen.print(str(page), soft_wrap=True, markup=False, highlight=False)


def _choices(procedure: str, method: str, config: Config) -> dict[str, Any] | None:
    """The settings of a procedure."""
    from afire.detect.fit import paper_procedure
    from afire.errors import UserError

    if procedure == "afire":
        return None
    if method != "afire":
        raise UserError(f"--procedure paper is of the detector afire; leave it out with --method {method}.")
    return paper_procedure(config)


def _split(films: Films, file: Path | None, protocol: str | None) -> Split | None:
    """The split of a file or of a protocol; a protocol may also narrow what counts as a normal film."""
    from afire.data.splits import read_split
    from afire.detect.protocol import chexpert_split, pa_only
    from afire.errors import UserError

    if protocol is None:
        return read_split(file) if file is not None else None
    if file is not None:
        raise UserError("--protocol brings its own split; leave out --split.")
    films.manifest = pa_only(films.manifest)
    return chexpert_split(films.manifest)


def evaluate(
    models: Annotated[
        list[Path], typer.Option("--model", help="A detector, or a bundle with one. Repeat for the seeds of one row.")
    ],
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Folder for the result.")],
    root: Root = None,
    split: Annotated[
        Path | None, typer.Option("--split", help="A split file, the one of the fit; its test films are tested.")
    ] = None,
    protocol: Annotated[
        Literal["auto", "official", "chexpert250", "all"],
        typer.Option(help="official: the lists, else drawn; chexpert250: as in SQUID; all: every labelled film."),
    ] = "auto",
    balance: Annotated[
        Literal["view"] | None,
        typer.Option(
            help="view: as many normal as abnormal test films of each view (AP, PA), so that it tells nothing."
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option("--labels", help="marks.csv of a report's page: agree, disagree and unsure instead of labels."),
    ] = None,
    name: Name = None,
    draws: Annotated[int, typer.Option("--bootstrap", help="Draws of patients for the intervals.", min=10)] = 1000,
    force: Force = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Evaluate detectors: every score and the trivial detectors on the same test films, places where they are known.

    Example: [cyan]afire detect eval --model detectors/nih --data packs/nih --out results/detect-nih[/cyan]

    Thresholds come from held-out normal films; what the best threshold on the test films would give is marked oracle.
    """
    from afire.data.pack import open_films
    from afire.data.splits import read_split
    from afire.detect.base import detector_folder, image_settings
    from afire.detect.evaluate import EvalTask, evaluate_detectors
    from afire.detect.marks import read_marks
    from afire.tasks.results import check_out, write_result

    check_out(out, force)
    marks = read_marks(labels) if labels is not None else None
    image = image_settings(detector_folder(models[0]))
    task = EvalTask(
        models=models,
        films=open_films(data, root, image.size, image.fit, image.voi),
        source=data.name,
        split=read_split(split) if split is not None else None,
        protocol=protocol,
        name=name,
        device=device,
        draws=draws,
        balance=balance,
        labels=marks,
    )
    evaluated = evaluate_detectors(task)
    from afire.report.detect_pictures import picture_names, write_detection_figures
    from afire.report.detect_tables import PAGE, show_detection, write_detection

    write_detection(out, evaluated, picture_names(write_detection_figures(out, evaluated)))
    write_result(out, evaluated.result, evaluated.predictions)
    if not quiet:
        from afire.cli.options import console

        screen = console()
        show_detection(screen, evaluated)
        screen.print(str(out / PAGE), soft_wrap=True, markup=False, highlight=False)


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
    from afire.cli.detect_shards import PackOptions, run_pack
    from afire.cli.options import console
    from afire.cluster.shards import shards_asked
    from afire.cluster.work import Where
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
        raise UserError("give films to score: a file or a folder, or --data with a pack.")
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
    from afire.detect.findings import header_of, write_results
    from afire.report.detect_page import write_detect_page
    from afire.report.detect_pictures import LEGEND, heat_legend

    write_results(out, results, rule, header_of(detector, rule, about))
    if pictures:
        _save_legend(out / LEGEND, heat_legend(detector.scale))
    page = write_detect_page(out, results, rule, detector, about)
    if not quiet:
        _show(console(), results, rule, page, detector.origin.get("notes") or [])


def calibrate(
    normals: Annotated[
        Path, typer.Option("--normals", help="Normal films of the place: a folder, a manifest or a pack; 20 or more.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the calibrated detector.")],
    model: Annotated[
        Path, typer.Option("--model", help="A detector, or a bundle with one; without it the one built in.")
    ] = Path("builtin"),
    root: Root = None,
    false_alarms: Annotated[
        float | None, typer.Option(help="Share of normal films that may be flagged; default: the detector's own.")
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Set a detector's threshold, standards and domain anew by local normal films. Nothing is trained.

    Example: [cyan]afire detect calibrate --normals our/normal/films --out detectors/here[/cyan]

    For films of another scanner or of other patients than the detector was made from: its networks stay as they are.
    """
    from afire.data.pack import open_films
    from afire.detect.base import detector_folder, image_settings, load_detector
    from afire.detect.calibrate import calibrate_here
    from afire.weights import pick_device

    folder = detector_folder(model)
    image = image_settings(folder)
    films = open_films(normals, root, image.size, image.fit, image.voi)
    detector = load_detector(folder).to(pick_device(device))
    notes = calibrate_here(detector, folder, films, out, source=normals.name, false_alarms=false_alarms)
    if not quiet:
        from afire.cli.options import console

        screen = console()
        for note in notes:
            screen.print(f"note: {note}", highlight=False, markup=False)
        count, rate = len(detector.calibration), detector.false_alarms
        screen.print(
            f"calibrated on {count:,} normal films: flagged from a score of {detector.threshold:.3g} on, which "
            f"at most {100 * rate:.3g} % of them reach",
            highlight=False,
            markup=False,
        )
        screen.print(str(out), soft_wrap=True, markup=False, highlight=False)


def _save_legend(path: Path, image: Any) -> None:
    from afire.files import write_atomic

    write_atomic(path, image.save)


def _show(screen: Console, results: Sequence[FilmResult], rule: Rule, page: Path, notes: Sequence[str] = ()) -> None:
    from rich.table import Table
    from rich.text import Text

    from afire.detect.base import DISCLAIMER
    from afire.detect.findings import SCORED, counts, ranked
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
    groups = ", ".join(f"{count:,} {titles.get(name, name)}" for name, count in counts(results, rule).items())
    screen.print(f"{len(results):,} films: {groups}", highlight=False, markup=False)
    screen.print(f"A film is flagged at a {rule.words}.", highlight=False, markup=False)
    for note in notes:
        screen.print(f"Note: {note}.", highlight=False, markup=False)
    warned = sum(any(note.startswith(OTHER_SOURCE) for note in film.notes) for film in results)
    if warned:
        screen.print(f"{warned:,} films are {OTHER_SOURCE}; {CALIBRATE}.", highlight=False, markup=False)
    screen.print(DISCLAIMER, highlight=False, markup=False)
    screen.print(str(page), soft_wrap=True, markup=False, highlight=False)


app = typer.Typer(
    no_args_is_help=True,
    help="Find abnormal films with a detector that has seen normal ones only.",
    epilog="Research software, not a medical device.",
)
app.command("fit")(fit)
app.command("eval")(evaluate)
app.command("run")(run)
app.command("calibrate")(calibrate)
app.command("bench")(bench)

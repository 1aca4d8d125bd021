"""``afire detect``: fit a detector on normal films, evaluate it on films with findings, calibrate it on local ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from afire.cli.benches import bench
from afire.cli.detect_run import run
from afire.cli.options import (
    ConfigFile,
    Data,
    Device,
    Force,
    Minutes,
    Name,
    Preset,
    Quiet,
    Root,
    Set,
    Verbose,
)
from afire.detect import DETECTORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from afire.config import Config
    from afire.data.pack import Films
    from afire.data.splits import Split
    from afire.detect.fit import Networks


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
    minutes: Minutes = None,
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
    if minutes is not None:
        group = _timed_group(method, networks, [*own_settings, *networks_own])
        if group == "training":
            config = config.model_copy(update={group: config.training.model_copy(update={"minutes": minutes})})
        else:
            arguments.append(f"{group}.minutes={minutes}")
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


def _timed_group(method: str, networks: Networks, settings: Sequence[str]) -> str:
    """The recipe that ``--minutes`` is for; refused where there is none, or where a setting says another length."""
    from afire.cli.settings import refuse_two_lengths
    from afire.errors import UserError

    length: str | None = DETECTORS[method].length(pretrained=networks.pretrained is not None)
    if length is None:
        raise UserError(f"the detector {method} trains nothing; leave out --minutes.")
    group = length.partition(".")[0]
    refuse_two_lengths(settings, group)
    return group


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
    from afire.report.detect_pictures import write_detection_figures
    from afire.report.detect_tables import PAGE, show_detection, write_detection
    from afire.report.table import picture_names

    write_detection(out, evaluated, picture_names(write_detection_figures(out, evaluated)))
    write_result(out, evaluated.result, evaluated.predictions)
    if not quiet:
        from afire.cli.options import console

        screen = console()
        show_detection(screen, evaluated)
        screen.print(str(out / PAGE), soft_wrap=True, markup=False, highlight=False)


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

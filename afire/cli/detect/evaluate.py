"""``afire detect eval``: a detector on films with findings, beside detectors that need no learning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from afire.cli.options import Device, Quiet, Root, Verbose
from afire.cli.task_options import Data, Force, Name


def evaluate(
    models: Annotated[
        list[Path], typer.Option("--model", help="Folder of a detector. Repeat for the seeds of one row.")
    ],
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Folder for the result.")],
    root: Root = None,
    split: Annotated[
        Path | None, typer.Option("--split", help="A split file, the one of the fit; its test part is tested.")
    ] = None,
    protocol: Annotated[
        Literal["auto", "official", "chexpert250", "all"],
        typer.Option(help="official: the lists, else drawn; chexpert250: as in SQUID; all: every labelled film."),
    ] = "auto",
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
    from afire.data.dataset import open_films
    from afire.data.splits import read_split
    from afire.tasks.detect.evaluate import EvalTask, evaluate_detectors
    from afire.tasks.detect.networks import image_settings
    from afire.tasks.results import check_out, write_result

    check_out(out, force)
    image = image_settings(models[0])
    task = EvalTask(
        models=models,
        films=open_films(data, root, image.size, image.fit, image.voi),
        source=data.name,
        split=read_split(split) if split is not None else None,
        protocol=protocol,
        name=name,
        device=device,
        draws=draws,
    )
    found = evaluate_detectors(task)
    from afire.report.detect_figures import picture_names, write_detection_figures
    from afire.report.detect_tables import PAGE, show_detection, write_detection

    write_detection(out, found, picture_names(write_detection_figures(out, found)))
    write_result(out, found.result, found.predictions)
    if not quiet:
        from afire.cli.options import console

        screen = console()
        show_detection(screen, found)
        screen.print(str(out / PAGE), soft_wrap=True, markup=False, highlight=False)

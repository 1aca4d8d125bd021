"""``afire detect fit``: a detector from normal films alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from afire.cli.options import ConfigFile, Device, Preset, Quiet, Root, Verbose
from afire.cli.task_options import Data, Weights

if TYPE_CHECKING:
    from afire.data.dataset import Films
    from afire.data.splits import Split


def fit(
    weights: Weights,
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Folder for the detector.")],
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
    preset: Preset = None,
    config_file: ConfigFile = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting of the detector (adapt.epochs=5, false_alarms=0.05) or of the networks. Repeat."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a fit that was stopped.")] = False,
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Adapt the networks to normal films, choose a score on drawn lesions, calibrate it on held-out normals.

    Example: [cyan]afire detect fit --weights runs/nih --data packs/nih --out detectors/nih[/cyan]

    No film with a finding is used. The choice and the numbers behind it are written to OUT/choice.md.
    """
    from afire.cli.trained import stops_on_signal
    from afire.data.dataset import open_films
    from afire.report.detect_choice import show_choice, write_choice
    from afire.tasks.detect.fit import FitTask, fit_detector
    from afire.tasks.detect.networks import detect_overrides, detect_settings, open_networks

    own, networks_own = detect_overrides(overrides or ())
    asked = [*own, *([f"seed={seed}"] if seed is not None else []), *([f"score={score}"] if score is not None else [])]
    settings = detect_settings(asked)
    networks = open_networks(weights, preset, config_file, networks_own)
    image = networks.config.image
    films = open_films(data, root, image.size, image.fit, image.voi)
    task = FitTask(
        config=networks.config,
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
    )
    with stops_on_signal():
        detector = fit_detector(task)
    page = write_choice(out, detector)
    if not quiet:
        from afire.cli.options import console

        screen = console()
        show_choice(screen, detector)
        screen.print(str(page), soft_wrap=True, markup=False, highlight=False)


def _split(films: Films, file: Path | None, protocol: str | None) -> Split | None:
    """The split of a file or of a protocol; a protocol may also narrow what counts as a normal film."""
    from afire.data.splits import read_split
    from afire.errors import UserError
    from afire.tasks.detect.protocol import chexpert_split, pa_only

    if protocol is None:
        return read_split(file) if file is not None else None
    if file is not None:
        raise UserError("--protocol brings its own split; leave out --split.")
    films.manifest = pa_only(films.manifest)
    return chexpert_split(films.manifest)

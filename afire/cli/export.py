"""``afire export``: weights as a bundle that explains and checks itself, or in the format of another library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from afire.cli.options import ConfigFile, Preset, Quiet, Set, Verbose

if TYPE_CHECKING:
    from afire.bundle.convert import Conversion


def export(
    weights: Annotated[
        str, typer.Argument(help="A run, a checkpoint of it, a bundle or hf://owner/name.", metavar="RUN")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; it appears whole or not at all.")],
    form: Annotated[
        Literal["bundle", "timm", "hf", "onnx", "torch"],
        typer.Option("--format", help="A bundle with everything, or the encoder for another library."),
    ] = "bundle",
    detector: Annotated[
        Path | None, typer.Option(help="Folder of `afire detect fit`, to go into the bundle or the graph.")
    ] = None,
    results: Annotated[
        list[Path] | None, typer.Option(help="Folder with results of these weights, for the card. Repeat for more.")
    ] = None,
    licence: Annotated[str, typer.Option(help="Licence of the weights, for the card.")] = "unspecified: fill in",
    name: Annotated[str | None, typer.Option(help="What the card calls the model. Default: the run's folder.")] = None,
    preprocess: Annotated[
        Literal["none", "normalise", "resize"],
        typer.Option(help="What onnx and torch graphs do before the encoder; resize takes films of any size."),
    ] = "normalise",
    network: Annotated[
        Literal["teacher", "student"], typer.Option(help="Which network another library gets.")
    ] = "teacher",
    preset: Preset = None,
    config_file: ConfigFile = None,
    overrides: Set = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an export that is already in --out.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Export weights. Other libraries' outputs are compared with ours before anything is handed over.

    Example: [cyan]afire export runs/nih --out nih-bundle --results results/nih --licence cc-by-4.0[/cyan]

    For onnxruntime: afire export nih-bundle --format onnx --out nih-onnx
    """
    from afire.cli.options import console

    screen = console()
    if form == "bundle":
        from afire.bundle import export_bundle

        bundle = export_bundle(
            weights, out, licence=licence, results=results or (), detector=detector, name=name, force=force
        )
        if not quiet:
            parts = ", ".join([*bundle.about["parts"], *(["detector"] if bundle.detector else [])])
            screen.print(f"{out}: {parts}; hash {bundle.hash[:16]}", soft_wrap=True, markup=False, highlight=False)
        return
    from afire.bundle.convert import convert
    from afire.bundle.detector import find_detector
    from afire.bundle.formats import FORMATS
    from afire.cli.task_options import asked_config
    from afire.tasks.backbone import load_backbone

    backbone = load_backbone(weights, asked_config(preset, config_file, overrides), network=network)
    with_detector = detector is not None or (form == "onnx" and preprocess != "none")
    finder = find_detector(weights, detector) if with_detector else None
    done = convert(backbone, out, FORMATS[form], detector=finder, preprocess=preprocess, force=force)
    if not quiet:
        for line in _lines(done, FORMATS[form].backend):
            screen.print(line, soft_wrap=True, markup=False, highlight=False)
        screen.print(f"{out}: {', '.join(done.files)}", soft_wrap=True, markup=False, highlight=False)


def _lines(done: Conversion, backend: str) -> list[str]:
    if done.note:
        return [done.note]
    return [
        f"{one.output} of {backend}: largest difference {one.largest:.1e}, allowed {one.bound:.1e}"
        for one in done.differences
    ]

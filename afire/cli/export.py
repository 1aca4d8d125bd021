"""Weights for others. ``afire export``: a bundle that explains and checks itself, or the format of another library.
``afire verify``: is a bundle complete, and are its outputs the same here as where it was exported? ``afire push``: a
bundle to the Hugging Face hub, or into this machine's cache of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from afire.cli.options import ConfigFile, Network, Preset, Quiet, Set, Verbose, print_line

if TYPE_CHECKING:
    from afire.export.verify import Check, Difference
    from afire.export.write import Conversion


def export(
    weights: Annotated[
        str, typer.Argument(help="A run, a checkpoint of it, a detector, a bundle or hf://owner/name.", metavar="RUN")
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
    network: Network = None,
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
    if form == "bundle":
        from afire.export.write import export_bundle

        bundle = export_bundle(
            weights, out, licence=licence, results=results or (), detector=detector, name=name, force=force
        )
        if not quiet:
            inside = ", ".join([*bundle.components, *(["detector"] if bundle.detector else [])])
            print_line(f"{out}: {inside}; hash {bundle.hash[:16]}")
        return
    from afire.cli.settings import config_from_options
    from afire.export.facts import find_detector
    from afire.export.formats import FORMATS
    from afire.export.write import convert
    from afire.weights import open_weights

    opened = open_weights(
        weights, config_from_options(preset, config_file, overrides, weights=weights), network=network
    )
    with_detector = detector is not None or not opened.holds_vit or (form == "onnx" and preprocess != "none")
    fitted = find_detector(opened, detector) if with_detector else None
    conversion = convert(opened, out, FORMATS[form], detector=fitted, preprocess=preprocess, force=force)
    if not quiet:
        for line in _lines(conversion, FORMATS[form].backend):
            print_line(line)
        print_line(f"{out}: {', '.join(conversion.files)}")


def _lines(conversion: Conversion, backend: str) -> list[str]:
    if conversion.note:
        return [conversion.note]
    return [
        f"{difference.output} of {backend}: largest difference {difference.largest:.1e}, allowed {difference.bound:.1e}"
        for difference in conversion.differences
    ]


def verify(
    bundle: Annotated[str, typer.Argument(help="A bundle, or hf://owner/name.", metavar="BUNDLE")],
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check every hash of a bundle, then recompute its expected outputs with each library that is installed.

    Ends with 0 when all are equal, 1 when one is not, 2 when the bundle is not whole.

    Example: [cyan]afire verify nih-bundle[/cyan]
    """
    from afire.export.verify import verify_bundle
    from afire.weights.bundle import open_bundle, unlisted_files
    from afire.weights.hub import local_path

    folder: Path = local_path(bundle)
    opened = open_bundle(folder)

    def say(line: str) -> None:
        if not quiet:
            print_line(line)

    say(f"files: every SHA-256 as exported by afire {opened.about['afire']}; hash {opened.hash[:16]}")
    beside = unlisted_files(folder)
    if beside:
        say(f"not part of the bundle, and read by nothing: {', '.join(beside[:5])}")
    checks = []
    for check in verify_bundle(opened):
        checks.append(check)
        say(_line(check, verbose))
    wrong = [check.backend for check in checks if check.equal is False]
    if wrong:
        typer.echo(f"not equal: {', '.join(wrong)}", err=True)
        raise typer.Exit(1)
    say("equal")


def _line(check: Check, verbose: bool) -> str:
    if check.note:
        return f"{check.backend}: {check.note}"
    worst = max(check.differences, key=lambda difference: difference.largest / difference.bound)
    verdict = "equal" if check.equal else "NOT EQUAL"
    line = f"{check.backend}: {verdict}, largest difference {_size(worst)}"
    if verbose or not check.equal:
        line += "".join(f"\n    {_size(difference)}" for difference in check.differences)
    return line


def _size(difference: Difference) -> str:
    return f"{difference.largest:.1e} ({difference.output}, allowed {difference.bound:.1e})"


def push(
    bundle: Annotated[Path, typer.Argument(help="A bundle that `afire export` wrote.", metavar="BUNDLE")],
    target: Annotated[str, typer.Argument(help="hf://owner/name, with @branch for another branch.", metavar="TARGET")],
    cache: Annotated[
        bool, typer.Option("--cache", help="No network: put it into this machine's cache, where hf:// finds it.")
    ] = False,
    public: Annotated[
        bool, typer.Option("--public", help="A new repository is for everybody; default: private.")
    ] = False,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Upload a whole bundle; its hashes are checked first. Log in before with `hf auth login`.

    Example: [cyan]afire push nih-bundle hf://my-hospital/afire-nih[/cyan]

    Then, anywhere: afire probe --weights hf://my-hospital/afire-nih --data pack --out results/nih
    """
    import logging

    from afire.export.card import UNSPECIFIED
    from afire.weights import hub
    from afire.weights.bundle import open_bundle

    name = hub.parse_hub_name(target)
    opened = open_bundle(bundle)
    if opened.about.get("licence") == UNSPECIFIED:
        logging.getLogger("afire").warning("the card says no licence; export again with --licence to say one")
    if cache:
        address = str(hub.install(bundle, name, opened.hash))
    else:
        address = hub.push(bundle, name, private=not public, message=message)
    if not quiet:
        print_line(f"{name}: {address}")

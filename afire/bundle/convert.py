"""An encoder in the format of another library, compared with ours before it is handed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from afire.bundle import preprocessing, sample
from afire.bundle.detector import detector_outputs, facts
from afire.bundle.folder import new_folder
from afire.bundle.formats import Format, detector_graph, missing, onnx, torch_export
from afire.bundle.formats.graph import Preprocess
from afire.bundle.readme import format_readme
from afire.bundle.sample import Difference
from afire.errors import UserError
from afire.files import write_json, write_text
from afire.tasks.backbone import Backbone
from afire.tasks.detect.detector import Detector
from afire.weights.bundle import CARD, PREPROCESSING, SAMPLE

_GRAPHS = {"onnx": onnx.write, "torch": torch_export.write}


@dataclass(frozen=True)
class Conversion:
    """What was written, and how far it is from ours; ``note`` says why it was not compared."""

    files: list[str]
    differences: list[Difference]
    note: str = ""


def convert(
    backbone: Backbone,
    out: Path,
    form: Format,
    *,
    detector: Detector | None = None,
    preprocess: Preprocess = "normalise",
    force: bool = False,
) -> Conversion:
    """Write ``backbone`` to the folder ``out``. Outputs that are not ours are an error, and nothing is left behind.

    A ``detector`` goes with it as a graph of its own; only ONNX has one.
    """
    _check(form, detector, preprocess)
    absent = missing(form.needs_to_run)
    with new_folder(out, force) as folder:
        _write(folder, backbone, form, detector, preprocess)
        expected = _write_sample(folder, backbone, detector)
        differences = [] if absent else _compare(folder, backbone, form, detector, preprocess, expected)
        wrong = [one for one in differences if not one.equal]
        if wrong:
            raise UserError(
                f"{form.backend} gives other {wrong[0].output} than afire (by {wrong[0].largest:.2g}, more than "
                f"{wrong[0].bound:.2g}); nothing was written. Please report it with the versions of both."
            )
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return Conversion(files, differences, f"not compared, not installed: {', '.join(absent)}" if absent else "")


def _check(form: Format, detector: Detector | None, preprocess: Preprocess) -> None:
    if detector is not None and form.name != "onnx":
        raise UserError(f"--detector goes into a bundle or --format onnx; {form.name} has no place for it.")
    if form.name not in _GRAPHS and preprocess != "normalise":
        raise UserError(f"--preprocess is for --format {' and '.join(_GRAPHS)}; {form.name} keeps its own settings.")
    form.require_writer()


def _write(folder: Path, backbone: Backbone, form: Format, detector: Detector | None, preprocess: Preprocess) -> None:
    if form.name in _GRAPHS:
        _GRAPHS[form.name](folder, backbone, preprocess)
    else:
        form.write(folder, backbone)
    if detector is not None:
        detector_graph.write(folder, detector, preprocess)
    write_json(folder / PREPROCESSING, preprocessing.describe(backbone.config.image))
    about = facts(detector) if detector is not None else None
    write_text(folder / CARD, format_readme(backbone, form, preprocess, about))


def _compare(
    folder: Path,
    backbone: Backbone,
    form: Format,
    detector: Detector | None,
    preprocess: Preprocess,
    expected: Mapping[str, Tensor],
) -> list[Difference]:
    films = _their_input(folder, expected["input"], backbone, preprocess)
    found = form.run(folder, backbone, films)
    if detector is not None:
        found |= detector_graph.run(folder, films)
    return sample.compare(expected, found)


@torch.no_grad()
def _write_sample(folder: Path, backbone: Backbone, detector: Detector | None) -> dict[str, Tensor]:
    """The sample film and what our networks say about it, beside the export."""
    image = backbone.config.image
    film = sample.read_input(sample.write_film(folder, image.size), image)
    tokens = backbone.encoder(backbone.normalise(film))[:, 1:]
    expected = {"input": film, "tokens": tokens, "embedding": tokens.mean(dim=1)}
    expected |= detector_outputs(detector, film) if detector is not None else {}
    sample.write_expected(folder, expected)
    return expected


def _their_input(folder: Path, film: Tensor, backbone: Backbone, preprocess: Preprocess) -> Tensor:
    """The sample film as far as the graph does not prepare it itself."""
    if preprocess == "resize":
        return sample.read_whole(folder / SAMPLE / sample.FILM)
    prepared: Tensor = film if preprocess == "normalise" else backbone.normalise(film).contiguous()
    return prepared

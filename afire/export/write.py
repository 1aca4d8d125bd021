"""From weights to a folder: a bundle, or the format of another library, compared with ours before it is released.

The folder appears whole or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from afire.detect.base import AnomalyDetector
from afire.errors import UserError
from afire.export.card import UNSPECIFIED, card, format_readme
from afire.export.facts import check_origin, detector_facts, find_detector, measured, source_facts, without_traces
from afire.export.formats import (
    Format,
    Preprocess,
    input_settings,
    missing,
    preprocessing,
    run_detector_graph,
    write_detector_graph,
    write_onnx,
    write_torch_export,
)
from afire.export.verify import (
    FILM,
    Difference,
    compare,
    detector_outputs,
    outputs,
    read_input,
    read_whole,
    trunk_outputs,
    write_expected,
    write_film,
)
from afire.files import write_json, write_text
from afire.weights import BundleWeights, RunWeights, Weights, open_weights
from afire.weights.bundle import (
    CARD,
    CONFIG,
    DETECTOR,
    ENCODER,
    MANIFEST,
    PREPROCESSING,
    SAMPLE,
    Bundle,
    component_file,
    describe,
    list_files,
    open_bundle,
    split_components,
)
from afire.weights.files import write_tensors

_MARKERS = ("manifest.json", "preprocessing.json")  # what every export leaves: only such a folder is replaced


def check_target(out: Path, force: bool) -> None:
    """Refuse a place that holds something, and with ``force`` still one that no export made."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; --out needs a folder.")
    if not out.exists() or not any(out.iterdir()):
        return
    if not force:
        raise UserError(f"{out} already holds something; add --force to replace an export, or choose another --out.")
    if not any((out / marker).is_file() for marker in _MARKERS):
        raise UserError(f"{out} holds something that afire did not export, and --force does not delete it.")


@contextmanager
def new_folder(out: Path, force: bool) -> Iterator[Path]:
    """A folder beside ``out`` to write into; it becomes ``out`` when the body ends well, else it is gone."""
    check_target(out, force)
    final = out.resolve()
    unfinished, previous = final.with_name(f".part-{final.name}"), final.with_name(f".old-{final.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if final.exists():
            shutil.rmtree(previous, ignore_errors=True)
            final.replace(previous)
        unfinished.replace(final)
        shutil.rmtree(previous, ignore_errors=True)
    except SafetensorError as error:  # a full disk, reported in its own way
        raise UserError(f"cannot write {out}: {error}; free space or choose another folder.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


_GRAPHS = {"onnx": write_onnx, "torch": write_torch_export}


@dataclass(frozen=True)
class Conversion:
    """What was written, and how far it is from ours; ``note`` says why it was not compared."""

    files: list[str]
    differences: list[Difference]
    note: str = ""


def convert(
    backbone: Weights,
    out: Path,
    form: Format,
    *,
    detector: AnomalyDetector | None = None,
    preprocess: Preprocess = "normalise",
    force: bool = False,
) -> Conversion:
    """Write ``backbone`` to the folder ``out``. Outputs that are not ours are an error, and nothing is left behind.

    A ``detector`` goes with it as a graph of its own; only ONNX has one. It is all there is where its networks are its
    own.
    """
    _check(backbone, form, detector, preprocess)
    absent = missing(form.needs_to_run)
    with new_folder(out, force) as folder:
        _write(folder, backbone, form, detector, preprocess)
        expected = _write_format_sample(folder, backbone, detector)
        differences = [] if absent else _compare(folder, backbone, form, detector, preprocess, expected)
        wrong = [difference for difference in differences if not difference.equal]
        if wrong:
            raise UserError(
                f"{form.backend} gives other {wrong[0].output} than afire (by {wrong[0].largest:.2g}, more than "
                f"{wrong[0].bound:.2g}); nothing was written. Please report it with the versions of both."
            )
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return Conversion(files, differences, f"not compared, not installed: {', '.join(absent)}" if absent else "")


def _check(backbone: Weights, form: Format, detector: AnomalyDetector | None, preprocess: Preprocess) -> None:
    if backbone.holds_method and not (form.has_detectors and detector is not None):
        backbone.check_vit()
    if not (backbone.holds_vit or form.has_detectors):
        raise UserError(
            f"{backbone.name} holds the detector {backbone.config.method} alone, and --format {form.name} takes an "
            "encoder; use --format onnx, or export a bundle."
        )
    if backbone.holds_vit and backbone.config.encoder.stem != "patch" and form.patches_only:
        raise UserError(
            f"{form.backend} knows no encoder with a convolutional stem (encoder.stem conv), so that --format "
            f"{form.name} cannot hold {backbone.name}; use --format {' or '.join(_GRAPHS)}, or export a bundle."
        )
    if detector is not None and not form.has_detectors:
        raise UserError(f"--detector goes into a bundle or --format onnx; {form.name} has no place for it.")
    if form.name not in _GRAPHS and preprocess != "normalise":
        raise UserError(f"--preprocess is for --format {' and '.join(_GRAPHS)}; {form.name} keeps its own settings.")
    form.require_writer()


def _write(
    folder: Path, backbone: Weights, form: Format, detector: AnomalyDetector | None, preprocess: Preprocess
) -> None:
    if backbone.holds_vit:
        _write_encoder(folder, backbone, form, preprocess)
    if detector is not None:
        write_detector_graph(folder, detector, preprocess)
    write_json(folder / PREPROCESSING, preprocessing(input_settings(backbone)))
    about = detector_facts(detector) if detector is not None else None
    write_text(folder / CARD, format_readme(backbone, form, preprocess, about))


def _write_encoder(folder: Path, backbone: Weights, form: Format, preprocess: Preprocess) -> None:
    if form.name in _GRAPHS:
        _GRAPHS[form.name](folder, backbone, preprocess)
    else:
        form.write(folder, backbone)


def _compare(
    folder: Path,
    backbone: Weights,
    form: Format,
    detector: AnomalyDetector | None,
    preprocess: Preprocess,
    expected: Mapping[str, Tensor],
) -> list[Difference]:
    images = _their_input(folder, expected["input"], backbone, preprocess)
    theirs = form.run(folder, backbone, images) if backbone.holds_vit else {}
    if detector is not None:
        theirs |= run_detector_graph(folder, images)
    return compare(expected, theirs)


def _write_format_sample(folder: Path, backbone: Weights, detector: AnomalyDetector | None) -> dict[str, Tensor]:
    """The sample film and our networks' outputs for it, beside the export."""
    image = backbone.config.image
    film = read_input(write_film(folder, image.size), image)
    expected = {"input": film, **(trunk_outputs(backbone, film) if backbone.holds_vit else {})}
    expected |= detector_outputs(detector, film) if detector is not None else {}
    write_expected(folder, expected)
    return expected


def _their_input(folder: Path, film: Tensor, backbone: Weights, preprocess: Preprocess) -> Tensor:
    """The sample film as far as the graph does not prepare it itself."""
    if preprocess == "resize":
        return read_whole(folder / SAMPLE / FILM)
    prepared: Tensor = film if preprocess == "normalise" else backbone.normalise(film).contiguous()
    return prepared


def export_bundle(
    source: str | Path,
    out: Path,
    *,
    licence: str = UNSPECIFIED,
    results: Sequence[Path] = (),
    detector: Path | None = None,
    name: str | None = None,
    force: bool = False,
) -> Bundle:
    """Write the bundle ``out`` of a run, a checkpoint of it, a fitted detector, or another bundle.

    ``detector`` is the folder of a detector fitted from these weights; one that lies with them comes along by itself.
    """
    check_target(out, force)
    weights = open_weights(source)
    fitted = find_detector(weights, detector)
    if not weights.holds_method and weights.detector is None:
        _ = weights.method  # raises an error that says why, and what to give
    assert isinstance(weights, RunWeights | BundleWeights)
    if fitted is not None:
        check_origin(fitted, weights)
    config, components = weights.config, _components(weights)
    about = describe(
        config,
        weights.holds,
        list(components),
        name=name or weights.name,
        schedule=dict(weights.schedule) if weights.holds_method else {},
        weights_hash=_weights_hash(weights, fitted),
        licence=licence,
        source=source_facts(weights),
        results=measured(results, weights, fitted),
        detector=None if fitted is None else detector_facts(fitted),
    )
    with new_folder(out, force) as folder:
        for component, tensors in components.items():
            write_tensors(component_file(folder, component), tensors)
        write_json(folder / CONFIG, about)
        write_json(folder / PREPROCESSING, preprocessing(input_settings(weights)))
        if fitted is not None:
            without_traces(fitted).save(folder / DETECTOR)
        _write_sample(folder, weights, fitted)
        write_text(folder / CARD, card(about["name"], about, config, _parameters(components)))
        write_json(folder / MANIFEST, list_files(folder))
    return open_bundle(out)


def _components(weights: Weights) -> dict[str, dict[str, Tensor]]:
    """Files of tensors beside the detector: those of a method, the encoder of a detector, or none."""
    if weights.holds_method:
        return split_components(weights.method.state_dict(), weights.kind)
    return {ENCODER: dict(weights.trunk.state_dict())} if weights.holds_vit else {}


def _weights_hash(weights: Weights, detector: AnomalyDetector | None) -> str:
    if weights.holds_method:
        return weights.method_hash
    assert detector is not None  # what holds no method is a detector
    return detector.weights_hash


def _write_sample(folder: Path, weights: Weights, detector: AnomalyDetector | None) -> None:
    """The sample film and the outputs of the networks in memory for it, on the CPU."""
    image = weights.config.image
    film = read_input(write_film(folder, image.size), image)
    expected = {"input": film, **outputs(weights, film)}
    write_expected(folder, {**expected, **(detector_outputs(detector, film) if detector is not None else {})})


def _parameters(components: Mapping[str, Mapping[str, Tensor]]) -> dict[str, int]:
    return {name: sum(tensor.numel() for tensor in tensors.values()) for name, tensors in components.items()}

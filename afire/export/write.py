"""A folder that appears whole or not at all.

What is known about weights besides the numbers in them: the run, its films, its losses, and measured results.

Nothing that names a person, a machine or a path on it goes into a bundle.

An encoder in the format of another library, compared with ours before it is handed over.

From a run to a bundle.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from afire.detect.detector import Detector
from afire.errors import UserError
from afire.export import formats as preprocessing
from afire.export import onnx
from afire.export import verify as sample
from afire.export.card import UNSPECIFIED, card, format_readme
from afire.export.formats import Format, missing, write_torch_export
from afire.export.onnx import Preprocess, check_origin, detector_outputs, facts, find_detector, scrubbed
from afire.export.verify import Difference
from afire.files import read_json, write_json, write_text
from afire.methods.afire import AFiRe
from afire.tasks.results import Result, find_results, read_result
from afire.training.checkpoint import STATE
from afire.training.run_folder import DATA, ENVIRONMENT, SUMMARY
from afire.weights.bundle import (
    CARD,
    CONFIG,
    DETECTOR,
    MANIFEST,
    PARTS,
    PREPROCESSING,
    SAMPLE,
    Bundle,
    describe,
    list_files,
    open_bundle,
    part_file,
    split_parts,
)
from afire.weights.files import tensor_hash, write_tensors
from afire.weights.open import BundleWeights, Weights, open_weights

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
    part, old = final.with_name(f".part-{final.name}"), final.with_name(f".old-{final.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.replace(old)
        part.replace(final)
        shutil.rmtree(old, ignore_errors=True)
    except SafetensorError as error:  # a full disk, reported in its own way
        raise UserError(f"cannot write {out}: {error}; free space or choose another folder.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


_SUMMARY = ("status", "step", "steps", "epoch", "losses", "health", "parameters", "processes", "bad_films")
_DATA = ("source", "films", "used", "hash")


def source_facts(weights: Weights) -> dict[str, Any]:
    """Where weights come from: a run's data, counts, end and environment; those of a bundle are passed on."""
    if isinstance(weights, BundleWeights):
        return dict(weights.bundle.about["source"])
    run, state = weights.run, weights.file.parent / STATE
    assert run is not None  # weights alone hold no method
    environment = _optional(run / ENVIRONMENT)
    git = environment.get("git") or {}
    return {
        "run": run.resolve().name,
        "step": _optional(state).get("step"),
        "data": _chosen(_optional(run / DATA), _DATA),
        "summary": _chosen(_optional(run / SUMMARY), _SUMMARY),
        "trained_with": {
            "afire": environment.get("afire"),
            "commit": git.get("commit"),
            "changed": git.get("changed"),
            "torch": (environment.get("packages") or {}).get("torch"),
            "started": environment.get("started"),
        },
    }


def measured(folders: Iterable[Path], weights: Weights) -> list[dict[str, Any]]:
    """Results in ``folders`` as rows of the card; those of other weights are refused."""
    branches = (weights.method.teacher, weights.method.student)
    own = {weights.method_hash, *(tensor_hash(branch.encoder.state_dict()) for branch in branches)}
    rows = []
    for folder in folders:
        for found in find_results(folder):
            result = read_result(found)
            if result.weights.get("hash") not in own:
                raise UserError(
                    f"the results in {found} were measured with other weights ({result.weights.get('name')}); "
                    "a card quotes only those of the weights in the bundle."
                )
            rows.append(_row(result))
    return rows


def _row(result: Result) -> dict[str, Any]:
    films = result.runs[0].films if result.runs else {}
    return {
        "task": result.task,
        "method": result.method,
        "data": result.data.get("name"),
        "labels": result.labels,
        "fraction": result.fraction,
        "runs": len(result.runs),
        "test_films": films.get("test"),
        "split_hash": result.split_hash,
        "metrics": {
            name: {key: _number(getattr(value, key)) for key in ("mean", "sd", "low", "high")}
            for name, value in result.metrics.items()
        },
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _chosen(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _optional(file: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = read_json(file) if file.is_file() else {}
    return found


_GRAPHS = {"onnx": onnx.write_onnx, "torch": write_torch_export}


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
        expected = _write_format_sample(folder, backbone, detector)
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


def _write(folder: Path, backbone: Weights, form: Format, detector: Detector | None, preprocess: Preprocess) -> None:
    if form.name in _GRAPHS:
        _GRAPHS[form.name](folder, backbone, preprocess)
    else:
        form.write(folder, backbone)
    if detector is not None:
        onnx.write_detector_graph(folder, detector, preprocess)
    write_json(folder / PREPROCESSING, preprocessing.describe(backbone.config.image))
    about = facts(detector) if detector is not None else None
    write_text(folder / CARD, format_readme(backbone, form, preprocess, about))


def _compare(
    folder: Path,
    backbone: Weights,
    form: Format,
    detector: Detector | None,
    preprocess: Preprocess,
    expected: Mapping[str, Tensor],
) -> list[Difference]:
    films = _their_input(folder, expected["input"], backbone, preprocess)
    found = form.run(folder, backbone, films)
    if detector is not None:
        found |= onnx.run_detector_graph(folder, films)
    return sample.compare(expected, found)


@torch.no_grad()
def _write_format_sample(folder: Path, backbone: Weights, detector: Detector | None) -> dict[str, Tensor]:
    """The sample film and what our networks say about it, beside the export."""
    image = backbone.config.image
    film = sample.read_input(sample.write_film(folder, image.size), image)
    tokens = backbone.trunk(backbone.normalise(film))[:, 1:]
    expected = {"input": film, "tokens": tokens, "embedding": tokens.mean(dim=1)}
    expected |= detector_outputs(detector, film) if detector is not None else {}
    sample.write_expected(folder, expected)
    return expected


def _their_input(folder: Path, film: Tensor, backbone: Weights, preprocess: Preprocess) -> Tensor:
    """The sample film as far as the graph does not prepare it itself."""
    if preprocess == "resize":
        return sample.read_whole(folder / SAMPLE / sample.FILM)
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
    model, config = weights.method, weights.config
    finder = find_detector(weights, detector)
    if finder is not None:
        check_origin(finder, weights)
    rows = measured(results, weights)
    found = split_parts(model.state_dict())
    parts = {part: found[part] for part in PARTS if part in found}
    about = describe(
        config,
        list(parts),
        name=name or weights.name,
        teacher_temperature=model.teacher_temperature,
        weights_hash=weights.method_hash,
        licence=licence,
        source=source_facts(weights),
        results=rows,
        detector=None if finder is None else facts(finder),
    )
    with new_folder(out, force) as folder:
        for part, tensors in parts.items():
            write_tensors(part_file(folder, part), tensors)
        write_json(folder / CONFIG, about)
        write_json(folder / PREPROCESSING, preprocessing.describe(config.image))
        if finder is not None:
            scrubbed(finder).save(folder / DETECTOR)
        _write_sample(folder, model, finder)
        write_text(folder / CARD, card(about["name"], about, config, _parameters(parts)))
        write_json(folder / MANIFEST, list_files(folder))
    return open_bundle(out)


def _write_sample(folder: Path, model: AFiRe, detector: Detector | None) -> None:
    """The sample film and what the model in memory says about it, on the CPU."""
    image = model.config.image
    film = sample.read_input(sample.write_film(folder, image.size), image)
    expected = {"input": film, **sample.outputs(model, film)}
    sample.write_expected(folder, {**expected, **(detector_outputs(detector, film) if detector is not None else {})})


def _parameters(parts: dict[str, dict[str, Any]]) -> dict[str, int]:
    return {part: sum(tensor.numel() for tensor in tensors.values()) for part, tensors in parts.items()}

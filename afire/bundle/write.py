"""From a run to a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afire.bundle import preprocessing, sample
from afire.bundle.card import UNSPECIFIED, card
from afire.bundle.detector import check_origin, detector_outputs, facts, find_detector, scrubbed
from afire.bundle.facts import measured, source_facts
from afire.bundle.folder import check_target, new_folder
from afire.files import write_json, write_text
from afire.model import AFiRe
from afire.tasks.detect.detector import Detector
from afire.tasks.pretrained import load_pretrained
from afire.weights.bundle import (
    CARD,
    CONFIG,
    DETECTOR,
    MANIFEST,
    PARTS,
    PREPROCESSING,
    Bundle,
    describe,
    list_files,
    open_bundle,
    part_file,
    split_parts,
)
from afire.weights.tensors import write_tensors


def export_bundle(
    weights: str | Path,
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
    pretrained = load_pretrained(weights)
    finder = find_detector(weights, detector)
    if finder is not None:
        check_origin(finder, pretrained)
    model, config = pretrained.model, pretrained.model.config
    rows = measured(results, pretrained)
    found = split_parts(model.state_dict())
    parts = {part: found[part] for part in PARTS if part in found}
    about = describe(
        config,
        list(parts),
        name=name or pretrained.name,
        teacher_temperature=model.teacher_temperature,
        weights_hash=pretrained.hash,
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

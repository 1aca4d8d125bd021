"""The facts of an export: where the weights come from, what was measured with them, what the detector is.

Nothing that names a person, a machine or a path on it goes into a bundle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from afire.detect.base import ADAPT, AnomalyDetector, load_detector
from afire.errors import UserError
from afire.files import read_json
from afire.tasks.results import Result, find_results, read_result
from afire.training.run_folder import DATA, ENVIRONMENT, STATE, SUMMARY
from afire.weights import BundleWeights, RunWeights, Weights
from afire.weights.files import tensor_hash

_SUMMARY = ("status", "step", "steps", "epoch", "losses", "health", "parameters", "processes", "bad_films")
_DATA = ("source", "films", "used", "hash")


def source_facts(weights: Weights) -> dict[str, Any]:
    """Where weights come from: a run's data, counts, end and environment; those of a bundle are passed on."""
    if isinstance(weights, BundleWeights):
        return dict(weights.bundle.about["source"])
    assert isinstance(weights, RunWeights)  # others hold neither a method nor a detector
    # A detector's own networks were trained in a folder of it; any other training there began from given weights.
    run = weights.run if weights.holds_networks else weights.run / ADAPT
    environment = _read_if_there(run / ENVIRONMENT)
    return {
        "run": weights.run.resolve().name,
        "step": _read_if_there(weights.file.parent / STATE).get("step"),
        "data": _chosen(_read_if_there(run / DATA), _DATA),
        "summary": _chosen(_read_if_there(run / SUMMARY), _SUMMARY),
        "trained_with": {**_versions(environment), "started": environment.get("started")},
    }


def _versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    git = environment.get("git") or {}
    return {
        "afire": environment.get("afire"),
        "commit": git.get("commit"),
        "changed": git.get("changed"),
        "torch": (environment.get("packages") or {}).get("torch"),
    }


def measured(folders: Iterable[Path], weights: Weights, detector: AnomalyDetector | None) -> list[dict[str, Any]]:
    """Results in ``folders`` as rows of the card; those of other weights are refused."""
    hashes = _own_hashes(weights, detector)
    rows = []
    for folder in folders:
        for place in find_results(folder):
            result = read_result(place)
            if result.weights.get("hash") not in hashes:
                raise UserError(
                    f"the results in {place} were measured with other weights ({result.weights.get('name')}); "
                    "a card quotes only those of the weights in the bundle."
                )
            rows.append(_row(result))
    return rows


def _own_hashes(weights: Weights, detector: AnomalyDetector | None) -> set[str]:
    """Hashes that results quote for the networks of a bundle."""
    hashes = set() if detector is None else {detector.weights_hash}
    if weights.holds_method:
        trunks = (weights.method.trunk(network) for network in weights.method.networks)
        hashes |= {weights.method_hash, *(tensor_hash(trunk.state_dict()) for trunk in trunks)}
    elif weights.holds_vit:
        hashes.add(weights.hash)
    return hashes


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
        "drawn_over": result.drawn_over,
        "seen": result.seen,
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


def _read_if_there(file: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = read_json(file) if file.is_file() else {}
    return content


def find_detector(weights: Weights, detector_folder: Path | None) -> AnomalyDetector | None:
    """The user's detector, else the one beside the weights: in a bundle, or a detector's folder."""
    if detector_folder is not None and weights.detector is not None and not weights.holds_method:
        raise UserError(f"{weights.name} is a detector itself and takes no other one; leave out --detector.")
    folder = detector_folder or weights.detector
    return None if folder is None else load_detector(folder)


def check_origin(detector: AnomalyDetector, weights: Weights) -> None:
    """A bundle's detector was fitted from the bundle's weights, or is them."""
    if not weights.holds_method:  # the detector is what was given
        return
    fitted_from = detector.origin.get("weights") or {}
    if weights.method_hash not in (fitted_from.get("hash"), detector.weights_hash):
        raise UserError(
            f"the detector was fitted from other weights ({fitted_from.get('name')}) than {weights.name}; "
            "export those, or give the detector's folder itself in place of the run."
        )


def without_traces(detector: AnomalyDetector) -> AnomalyDetector:
    """Without the command and its paths and without pieces of training films, which are private."""
    detector.atlas = detector.atlas.without_patches() if detector.atlas is not None else None
    environment = detector.origin.get("environment") or {}
    versions = {name: environment[name] for name in ("afire", "python", "packages", "git") if name in environment}
    detector.origin = {**detector.origin, "environment": versions}
    return detector


def detector_facts(detector: AnomalyDetector) -> dict[str, Any]:
    """What ``config.json`` and the card say about it."""
    data = detector.origin.get("data") or {}
    threshold = detector.threshold if np.isfinite(detector.threshold) else None
    films = detector.origin.get("parts") or {}
    return {
        "method": detector.method,
        "settings": detector.settings.model_dump(),
        "weights": (detector.origin.get("weights") or {}).get("name"),
        "networks_hash": detector.weights_hash,
        "networks_numbers": sum(tensor.numel() for tensor in detector.model.state_dict().values()),
        "score": detector.choice.name,
        "false_alarms": detector.false_alarms,
        "threshold": threshold,
        "calibration_films": len(detector.calibration),
        "fitted_on": films.get("fit"),
        "data": data.get("name"),
        "films": data.get("films"),
        "data_hash": data.get("hash"),
        "fitted_with": _versions(detector.origin.get("environment") or {}),
        "notes": detector.origin.get("notes") or [],
        "heat_scale": {"low": detector.scale.low, "high": detector.scale.high},
    }

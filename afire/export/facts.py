"""What a bundle tells about weights besides their numbers: the run, its films and end, measured results, the detector.

Nothing that names a person, a machine or a path on it goes into a bundle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from afire.detect.base import AnomalyDetector, load_detector
from afire.errors import UserError
from afire.files import read_json
from afire.tasks.results import Result, find_results, read_result
from afire.training.run_folder import DATA, ENVIRONMENT, STATE, SUMMARY
from afire.weights import BundleWeights, RunWeights, Weights, tensor_hash

_SUMMARY = ("status", "step", "steps", "epoch", "losses", "health", "parameters", "processes", "bad_films")
_DATA = ("source", "films", "used", "hash")


def source_facts(weights: Weights) -> dict[str, Any]:
    """Where weights come from: a run's data, counts, end and environment; those of a bundle are passed on."""
    if isinstance(weights, BundleWeights):
        return dict(weights.bundle.about["source"])
    assert isinstance(weights, RunWeights)  # others hold no method
    run, state = weights.run, weights.file.parent / STATE
    environment = _read_if_there(run / ENVIRONMENT)
    git = environment.get("git") or {}
    return {
        "run": run.resolve().name,
        "step": _read_if_there(state).get("step"),
        "data": _chosen(_read_if_there(run / DATA), _DATA),
        "summary": _chosen(_read_if_there(run / SUMMARY), _SUMMARY),
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
    trunks = (weights.method.trunk(network) for network in weights.method.networks)
    own = {weights.method_hash, *(tensor_hash(trunk.state_dict()) for trunk in trunks)}
    rows = []
    for folder in folders:
        for place in find_results(folder):
            result = read_result(place)
            if result.weights.get("hash") not in own:
                raise UserError(
                    f"the results in {place} were measured with other weights ({result.weights.get('name')}); "
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


def find_detector(weights: Weights, asked: Path | None) -> AnomalyDetector | None:
    """The detector that was asked for, else the one that lies with the weights: in a bundle, or a detector's folder."""
    folder = asked or weights.detector
    return None if folder is None else load_detector(folder)


def check_origin(detector: AnomalyDetector, weights: Weights) -> None:
    """A bundle's detector was fitted from the bundle's weights, or is them."""
    fitted_from = detector.origin.get("weights") or {}
    if weights.method_hash not in (fitted_from.get("hash"), detector.weights_hash):
        raise UserError(
            f"the detector was fitted from other weights ({fitted_from.get('name')}) than {weights.name}; "
            "export those, or give the detector's folder itself in place of the run."
        )


def without_traces(detector: AnomalyDetector) -> AnomalyDetector:
    """Without the command and its paths, which are nobody else's business."""
    environment = detector.origin.get("environment") or {}
    kept = {name: environment[name] for name in ("afire", "python", "packages", "git") if name in environment}
    detector.origin = {**detector.origin, "environment": kept}
    return detector


def detector_facts(detector: AnomalyDetector) -> dict[str, Any]:
    """What ``config.json`` and the card say about it."""
    data = detector.origin.get("data") or {}
    threshold = detector.threshold if np.isfinite(detector.threshold) else None
    films = detector.origin.get("parts") or {}
    return {
        "method": detector.method,
        "score": detector.choice.name,
        "false_alarms": detector.false_alarms,
        "threshold": threshold,
        "calibration_films": len(detector.calibration),
        "fitted_on": films.get("fit"),
        "data": data.get("name"),
        "notes": detector.origin.get("notes") or [],
        "heat_scale": {"low": detector.scale.low, "high": detector.scale.high},
    }

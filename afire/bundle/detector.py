"""A fitted detector inside a bundle: its folder without what tells of the machine it was fitted on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from afire.errors import UserError
from afire.tasks.detect.detector import SETTINGS, Detector
from afire.tasks.pretrained import Pretrained, model_hash
from afire.weights.bundle import DETECTOR, is_bundle
from afire.weights.hub import local_path


def find_detector(weights: str | Path, asked: Path | None) -> Detector | None:
    """The detector that was asked for, else the one that lies with the weights: in a bundle, or a detector's folder."""
    if asked is not None:
        return Detector.load(asked)
    path = local_path(weights)
    folder = path / DETECTOR if is_bundle(path) else path
    return Detector.load(folder) if (folder / SETTINGS).is_file() else None


def check_origin(detector: Detector, pretrained: Pretrained) -> None:
    """A bundle's detector was fitted from the bundle's weights, or is them."""
    fitted_from = detector.origin.get("weights") or {}
    if pretrained.hash not in (fitted_from.get("hash"), model_hash(detector.model)):
        raise UserError(
            f"the detector was fitted from other weights ({fitted_from.get('name')}) than {pretrained.name}; "
            "export those, or give the detector's folder itself in place of the run."
        )


def scrubbed(detector: Detector) -> Detector:
    """Without the command and its paths, which are nobody else's business."""
    environment = detector.origin.get("environment") or {}
    kept = {name: environment[name] for name in ("afire", "python", "packages", "git") if name in environment}
    detector.origin = {**detector.origin, "environment": kept}
    return detector


def facts(detector: Detector) -> dict[str, Any]:
    """What ``config.json`` and the card say about it."""
    data = detector.origin.get("data") or {}
    threshold = detector.threshold if np.isfinite(detector.threshold) else None
    films = detector.origin.get("parts") or {}
    return {
        "score": detector.choice.name,
        "false_alarms": detector.false_alarms,
        "threshold": threshold,
        "calibration_films": len(detector.calibration),
        "fitted_on": films.get("fit"),
        "data": data.get("name"),
        "notes": detector.origin.get("notes") or [],
        "heat_scale": {"low": detector.scale.low, "high": detector.scale.high},
    }


@torch.no_grad()
def detector_outputs(detector: Detector, film: Tensor) -> dict[str, Tensor]:
    """``score`` and ``p_value`` (1,), ``heatmap`` (1, rows, columns) of a film (1, 1, S, S) in [0, 1]."""
    found = detector.score(film, restore=False)
    return {
        "score": torch.from_numpy(found.score).float(),
        "p_value": torch.from_numpy(detector.calibration.p_values(found.score)).float(),
        "heatmap": torch.from_numpy(found.heat),
    }

"""A detector of the smallest networks on the drawn films of the tasks' tests; read only."""

from __future__ import annotations

from pathlib import Path

import pytest

from afire.data.pack import PackedFilms
from afire.detect.base import AnomalyDetector, FitTask, load_detector
from afire.detect.fit import detect_settings, fit_detector, open_networks
from tests.tasks.conftest import films, packed, smallest

__all__ = ["films", "packed", "smallest"]

SMALLEST = ["image.size=32", "encoder.width=16", "encoder.depth=1", "encoder.heads=2", "encoder.patch_size=8"]
QUICK = ["held_out=0.4", "false_alarms=0.2"]


def fit_smallest(films: PackedFilms, out: Path, seed: int = 0, *settings: str) -> AnomalyDetector:
    networks = open_networks("random", "tiny", None, [*SMALLEST, "training.epochs=1", "run.picture_epochs=0"])
    task = FitTask(
        networks.config, detect_settings([*QUICK, f"seed={seed}", *settings]), films, out, source="drawn", device="cpu"
    )
    return fit_detector(task)


@pytest.fixture(scope="session")
def model(films: PackedFilms, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fitted detector, seed 0."""
    folder = tmp_path_factory.mktemp("detector") / "model"
    fit_smallest(films, folder)
    return folder


@pytest.fixture(scope="session")
def detector(model: Path) -> AnomalyDetector:
    return load_detector(model)

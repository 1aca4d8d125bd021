"""A detector of the smallest networks on the drawn films of the tasks' tests; read only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from afire.data.pack import PackedFilms
from afire.detect.base import AnomalyDetector, FitTask, load_detector
from afire.detect.fit import detect_settings, fit_detector, open_networks
from afire.training import run_folder
from tests.tasks.conftest import films, packed, smallest

__all__ = ["films", "packed", "smallest"]

SMALLEST = ["image.size=32", "encoder.width=16", "encoder.depth=1", "encoder.heads=2", "encoder.patch_size=8"]
QUICK = ["held_out=0.4", "false_alarms=0.2"]


class Killed(BaseException):
    """As a kill between two checkpoints."""


@contextmanager
def killed_after_a_checkpoint() -> Iterator[None]:
    """A training in it ends when its second checkpoint is due, as by a kill."""
    saved: list[Path] = []
    save = run_folder.save_checkpoint

    def save_one_and_die(*arguments: object, **named: object) -> Path:
        if saved:
            raise Killed
        saved.append(save(*arguments, **named))  # type: ignore[arg-type]
        return saved[-1]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(run_folder, "save_checkpoint", save_one_and_die)
        yield


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

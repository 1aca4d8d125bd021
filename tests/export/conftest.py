"""The smallest run, a detector fitted from it, and bundles of both; made once, read only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from afire.config import Config
from afire.data.manifest import make_manifest
from afire.data.pack import PackedFilms, PackSettings, pack
from afire.detect import DETECTORS
from afire.detect.base import AnomalyDetector, FitTask, Subsets
from afire.detect.calibrate import calibrate
from afire.detect.fit import detect_settings, fit_detector, networks_for
from afire.detect.learned import LearnedDetector
from afire.detect.maps import MapDetector
from afire.detect.patchcore import MemoryConfig, PatchCore, PatchCoreConfig
from afire.export.write import export_bundle
from afire.methods import make_method
from afire.methods.afire import AFiRe
from afire.settings import load_config, to_yaml
from afire.tasks.settings import DetectConfig
from afire.training.run_folder import save_checkpoint
from afire.weights import Weights, open_weights
from tests.tasks.conftest import draw_films

SMALLEST = [
    *("image.size=32", "encoder.width=16", "encoder.depth=1", "encoder.heads=2", "encoder.patch_size=8"),
    *("head.hidden=16", "head.bottleneck=8", "head.clusters=8", "decoder.width=16", "losses.lesion=0.5"),
]
EVERY_MAP = "restoration+student_surprise+surprise_peak+gaussian_peak+two_pass+lesion"


def smallest(*overrides: str) -> Config:
    return load_config("tiny", overrides=[*SMALLEST, *overrides])


def make_run(folder: Path, config: Config) -> Path:
    """A run folder with one checkpoint whose parts all differ from their initial values."""
    model = make_method(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        if isinstance(model, AFiRe) and model.bank is not None:
            model.bank.prototypes.copy_(torch.rand(model.bank.prototypes.shape, generator=generator).softmax(dim=-1))
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "data.json").write_text(json.dumps({"source": "films", "films": 20, "used": 12, "hash": "ab" * 32}))
    environment = {"afire": "0.1.0", "git": None, "packages": {"torch": "2"}, "command": ["afire", "/home/someone/x"]}
    (folder / "environment.json").write_text(json.dumps(environment))
    state = {"step": 5, "steps_per_epoch": 2}
    save_checkpoint(folder, model, [torch.optim.AdamW(model.parameters())], state, keep=1)
    return folder


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "smallest", smallest())


@pytest.fixture(scope="session")
def bundle_folder(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_bundle(run_folder, tmp_path_factory.mktemp("bundles") / "plain").folder


@pytest.fixture(scope="session")
def normal_films(tmp_path_factory: pytest.TempPathFactory) -> PackedFilms:
    folder = tmp_path_factory.mktemp("films")
    table = draw_films(folder / "films", 48)
    pack(make_manifest(table, folder / "films"), folder / "pack", PackSettings(size=32), workers=1)
    return PackedFilms(folder / "pack")


def save_calibrated(detector: AnomalyDetector, films: PackedFilms, weights: Weights | None, folder: Path) -> Path:
    """As ``afire detect fit`` does it after the networks are there; without ``weights`` from random ones."""
    came_from = {"name": "random"} if weights is None else {"name": weights.name, "hash": weights.method_hash}
    rows = np.arange(48)
    calibrate(detector, films, Subsets(rows[:20], rows[20:28], rows[28:], "drawn"))
    detector.origin = {
        "data": {"name": "films", "hash": "ab" * 32, "films": 48},
        "parts": {"fit": 20, "choose": 8, "calibrate": 20},
        "weights": came_from,
        "notes": [],
        "environment": {"afire": "0.1.0", "command": ["afire", "/home/someone/x"]},
    }
    detector.save(folder)
    return folder


@pytest.fixture(scope="session")
def detector_folder(run_folder: Path, normal_films: PackedFilms, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector whose score reads every map there is."""
    weights = open_weights(run_folder)
    assert isinstance(weights.method, AFiRe)
    detector = MapDetector(weights.method, DetectConfig(score=EVERY_MAP))
    return save_calibrated(detector, normal_films, weights, tmp_path_factory.mktemp("detectors") / "detector")


@pytest.fixture(scope="session")
def patchcore_folder(run_folder: Path, normal_films: PackedFilms, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector that looks through the teacher's trunk; nothing else of AFiRe is in its folder."""
    weights = open_weights(run_folder)
    settings = PatchCoreConfig(patchcore=MemoryConfig(share=0.5))
    detector = PatchCore(weights.trunk, weights.config, settings)
    return save_calibrated(detector, normal_films, weights, tmp_path_factory.mktemp("detectors") / "patchcore")


@pytest.fixture(scope="session")
def aeu_folder(normal_films: PackedFilms, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector that has trained networks of its own, as `afire detect fit` leaves it."""
    out = tmp_path_factory.mktemp("detectors") / "aeu"
    settings = detect_settings(["train.epochs=1", "aeu.width=4", "held_out=0.4", "false_alarms=0.3"], "aeu")
    config = networks_for("aeu", None, normal_films.folder).config
    fit_detector(FitTask(config, settings, normal_films, out, source="films", device="cpu", method="aeu"))
    return out


def learned_folder(method: str, settings: list[str], films: PackedFilms, folder: Path) -> Path:
    """A detector with networks of its own that were never trained: what is compared is arithmetic."""
    kind, chosen = DETECTORS[method], detect_settings(settings, method)
    assert issubclass(kind, LearnedDetector)
    detector = kind.build(kind.config_of(smallest(), chosen, 20), chosen)
    return save_calibrated(detector, films, None, folder)


@pytest.fixture(scope="session")
def aeu_bundle(aeu_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a detector alone."""
    return export_bundle(aeu_folder, tmp_path_factory.mktemp("bundles") / "aeu", licence="mit").folder


@pytest.fixture(scope="session")
def patchcore_bundle(patchcore_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a detector and the encoder it looks through."""
    return export_bundle(patchcore_folder, tmp_path_factory.mktemp("bundles") / "patchcore").folder


@pytest.fixture(scope="session")
def full_bundle(run_folder: Path, detector_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a detector inside."""
    out = tmp_path_factory.mktemp("bundles") / "full"
    return export_bundle(run_folder, out, detector=detector_folder, licence="cc-by-4.0").folder


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a folder, to be spoilt."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))

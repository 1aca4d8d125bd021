"""The detector `afire` on other methods: it has the maps that their networks can make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from afire.data.pack import PackedFilms
from afire.detect.base import AnomalyDetector, FitTask, NormalFilms, load_detector
from afire.detect.fit import detect_settings, fit_detector, open_networks
from afire.detect.maps import MapDetector, possible_maps
from afire.export.formats import run_detector_graph, write_detector_graph
from afire.files import read_json
from afire.methods import make_method
from afire.settings import load_config
from tests.detect.conftest import SMALLEST


@pytest.mark.parametrize(
    ("settings", "maps"),
    [
        (["losses.lesion=1"], {"restoration", "surprise", "student_surprise", "gaussian", "two_pass", "lesion"}),
        (["losses.restoration=0"], {"surprise", "student_surprise", "gaussian"}),
        (["losses.contrast=feature"], {"restoration", "gaussian"}),
        (["losses.structure=0", "losses.category=0"], {"restoration", "gaussian"}),
        (["prototypes.enabled=false"], {"restoration", "gaussian"}),
        (["method=mae"], {"restoration", "gaussian"}),
    ],
)
def test_maps_are_those_the_networks_can_make(films: PackedFilms, settings: list[str], maps: set[str]) -> None:
    method = make_method(load_config("tiny", overrides=[*SMALLEST, *settings]))
    assert {patch_map.name for patch_map in possible_maps(method)} == maps
    detector = MapDetector(method)
    detector.fit(NormalFilms(films, np.arange(12)))
    found = detector.score(films.batch([0, 1]), all_scores=True)
    assert all(np.isfinite(values).all() for values in found.scores.values())
    assert (found.restored is None) == ("restoration" not in maps)


@pytest.fixture(scope="module")
def of_mae(films: PackedFilms, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, AnomalyDetector]:
    """A detector adapted from a short run of MAE."""
    folder = tmp_path_factory.mktemp("mae")
    small = [*SMALLEST, "method=mae", "training.epochs=1", "run.picture_epochs=0"]
    scratch = open_networks("random", "tiny", None, small)
    quick = ["held_out=0.4", "false_alarms=0.2"]
    first = FitTask(scratch.config, detect_settings(quick), films, folder / "run", source="drawn", device="cpu")
    fit_detector(first)
    networks = open_networks(str(folder / "run"))
    settings = detect_settings([*quick, "adapt.epochs=1", "score=gaussian+restoration"])
    task = FitTask(networks.config, settings, films, folder / "out", networks.pretrained, networks.run, device="cpu")
    return folder / "out", fit_detector(task)


def test_a_run_of_mae_is_adapted_by_its_own_losses(of_mae: tuple[Path, AnomalyDetector]) -> None:
    folder, detector = of_mae
    assert detector.config.method == "mae" and set(detector.choice.table) == {
        *("restoration", "paper", "gaussian", "gaussian_peak")
    }
    adapt = load_config(file=folder / "adapt" / "config.yaml")
    assert adapt.method == "mae" and adapt.training.weight_decay == 0 and adapt.losses == load_config("tiny").losses
    assert read_json(folder / "adapt" / "summary.json")["status"] == "finished"


@pytest.mark.slow
def test_and_becomes_a_graph_with_a_free_batch_size(
    of_mae: tuple[Path, AnomalyDetector], films: PackedFilms, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    write_detector_graph(tmp_path, of_mae[1])
    images = films.batch([3, 4, 5])
    np.testing.assert_allclose(
        run_detector_graph(tmp_path, images)["score"].numpy(), of_mae[1].score(images).score, rtol=1e-3
    )


def test_and_survives_the_disk(of_mae: tuple[Path, AnomalyDetector], films: PackedFilms) -> None:
    folder, detector = of_mae
    images = films.batch([3, 4, 5])
    first, again = detector.score(images), load_detector(folder).score(images)
    np.testing.assert_allclose(first.score, again.score, rtol=1e-5)
    np.testing.assert_allclose(first.heat, again.heat, rtol=1e-4, atol=1e-5)
    assert again.restored is not None and again.restored.shape == (3, 32, 32)
    assert torch.isfinite(torch.from_numpy(again.restored)).all() and detector.cost() > 0

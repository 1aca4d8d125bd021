"""Detectors whose lesion classifier tells parts of tokens apart: heatmaps at cells, saved, loaded, and in a graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.detect.base import FitTask, load_detector
from afire.detect.fit import _take_over, detect_settings, fit_detector, for_detection, open_networks
from afire.detect.maps import SCORES, Evidence, Lesion, MapDetector, fit_maps, peak
from afire.errors import UserError
from afire.export.formats import run_detector_graph, write_detector_graph
from afire.methods.afire import AFiRe
from afire.settings import load_config
from afire.tasks.settings import DetectConfig
from tests.detect.conftest import QUICK, fit_smallest

SMALL = ["image.size=32", "encoder.patch_size=8", "losses.lesion=1"]


def config(finer: int) -> Config:
    return load_config("tiny", overrides=[*SMALL, f"losses.lesion_finer={finer}"])


def drawn(count: int = 12) -> Tensor:
    coarse = torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)


def fitted(finer: int) -> MapDetector:
    detector = MapDetector(AFiRe(config(finer)))
    for patch_map in detector._maps.values():
        fit_maps([patch_map], lambda _: [Evidence(detector.model, drawn(), detector.surprising)])
    return detector


@pytest.mark.parametrize("finer", [1, 2, 4])
def test_the_score_and_the_heatmap_read_the_cells(finer: int) -> None:
    detector = fitted(finer)
    side = 4 * finer
    assert detector.grid == (side, side)
    model = detector.model
    assert isinstance(model, AFiRe)
    with torch.no_grad():
        cells = torch.logit(model.lesion_maps(drawn()).double()).float().flatten(1)
        look = detector.look(drawn(), ["lesion", "gaussian"], restore=False)
    torch.testing.assert_close(look.scores["lesion"].float(), peak(cells), atol=1e-4, rtol=1e-4)
    assert look.heat.shape == (12, side * side)
    (name,) = detector.choice.names
    tokens = detector._maps[SCORES[name].map]
    with torch.no_grad():
        coarse = tokens.standard(tokens(Evidence(model, drawn()))).view(12, 4, 4)
    expected = torch.from_numpy(np.kron(coarse.numpy(), np.ones((1, finer, finer), np.float32)))
    torch.testing.assert_close(look.heat.view(12, side, side), expected)
    lesion = detector._maps[Lesion.name]
    assert lesion.standard.mean.shape == (side * side,)
    torch.testing.assert_close(lesion.standard.mean, cells.mean(0), atol=1e-4, rtol=1e-4)


def test_tokens_and_cells_are_joined_in_the_heatmap() -> None:
    detector = fitted(2)
    values = torch.arange(16.0).view(1, 16)
    spread = detector._on_cells(values).view(8, 8)
    assert spread[:2, :2].tolist() == [[0, 0], [0, 0]] and spread[2, 4:].tolist() == [6, 6, 7, 7]
    cells = torch.rand(3, 64)
    assert torch.equal(detector._on_cells(cells), cells)


def test_a_fit_saves_loads_and_becomes_a_graph(films: PackedFilms, tmp_path: Path) -> None:
    folder = tmp_path / "detector"
    settings = ("adapt.lesion_finer=2", "adapt.lesions.pasted=0.5", "adapt.lesions.opacities=0.2")
    fit_smallest(films, folder, 0, *settings, "score=lesion + gaussian")
    detector = load_detector(folder)
    assert detector.grid == (8, 8) and detector.config.losses.lesion_finer == 2
    assert detector.config.lesions.pasted == 0.5 and not any("donor" in name for name in detector.state_dict())
    images = films.batch([0, 1, 2])
    first, second = detector.score(images), load_detector(folder).score(images)
    assert first.heat.shape == (3, 8, 8) and np.array_equal(first.heat, second.heat)
    assert np.array_equal(first.score, second.score)
    pytest.importorskip("onnxruntime")
    write_detector_graph(tmp_path, detector)
    graph = run_detector_graph(tmp_path, images)
    np.testing.assert_allclose(graph["heatmap"], first.heat, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(graph["score"], first.score, rtol=1e-3, atol=1e-3)


def test_cells_that_do_not_fill_a_patch_are_refused_by_the_name_of_their_setting() -> None:
    settings = DetectConfig.model_validate({"adapt": {"lesion_finer": 3}})
    with pytest.raises(UserError, match=r"3 x 3 cells; choose adapt\.lesion_finer among its divisors"):
        for_detection(config(2), settings)
    assert for_detection(load_config("tiny", overrides=["method=mae", *SMALL]), settings).method == "mae"


def test_weights_as_they_are_have_the_cells_they_have(model: Path, films: PackedFilms, tmp_path: Path) -> None:
    networks = open_networks(str(model))
    finer = ("adapt.epochs=0", "adapt.lesion_finer=2")
    task = FitTask(networks.config, detect_settings([*QUICK, *finer]), films, tmp_path / "out", networks.pretrained)
    with pytest.raises(UserError, match=r"as they are, with lesion_finer 1; leave out adapt\.lesion_finer"):
        fit_detector(task)
    assert not (tmp_path / "out" / "detector.json").exists()


def test_adaptation_takes_over_a_classifier_that_fits_and_else_begins_anew() -> None:
    settings = DetectConfig.model_validate({"adapt": {"lesion_finer": 4}})
    assert for_detection(config(2), DetectConfig()).losses.lesion_finer == 2
    changed = for_detection(config(2), settings)
    assert changed.losses.lesion_finer == 4
    before = AFiRe(config(2)).state_dict()
    before = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in before.items()}
    anew, same = AFiRe(changed), AFiRe(config(2))
    fresh = {name: tensor.clone() for name, tensor in anew.state_dict().items()}
    _take_over(before, anew)
    _take_over(before, same)
    assert torch.equal(anew.state_dict()["lesion_classifier.weight"], fresh["lesion_classifier.weight"])
    assert torch.equal(same.state_dict()["lesion_classifier.weight"], before["lesion_classifier.weight"])
    assert torch.equal(anew.state_dict()["student.encoder.cls_token"], before["student.encoder.cls_token"])

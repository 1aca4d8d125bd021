"""The detector that comes with the package: it is there, small, opens by name, and sees what it was taught."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

import afire
from afire.cli import app
from afire.data.phantom import draw_batch
from afire.detect.base import AnomalyDetector, detector_folder, load_detector
from afire.detect.taught import DRAWN_NORMALS, FINE, Finder
from afire.files import read_json
from afire.weights.hub import BUILTIN


@pytest.fixture(scope="module")
def detector() -> AnomalyDetector:
    return load_detector(detector_folder(BUILTIN))


def test_it_is_small_and_says_where_it_comes_from(detector: AnomalyDetector) -> None:
    files = list(detector_folder(BUILTIN).iterdir())
    assert sum(file.stat().st_size for file in files) < 10 * 2**20
    assert detector.method == "taught" and DRAWN_NORMALS in detector.origin["notes"]
    command = " ".join(detector.origin["environment"]["command"])
    script = (Path(__file__).parent.parent.parent / "scripts" / "builtin.sh").read_text().replace("\\\n", "")
    for setting in ("taught.start=nothing", "taught.films=8000", "train.epochs=120", "train.learning_rate=2e-3"):
        assert setting in command and setting in script, "the script is the command that made it"
    assert isinstance(detector.model, Finder) and not set(FINE) & set(detector.model.options.kinds)


def test_it_sees_findings_of_phantoms_that_it_has_not_met(detector: AnomalyDetector) -> None:
    kinds = ("Consolidation", "Effusion", "Mass", "Edema")
    healthy = draw_batch(77, range(40), 128, diseases=()).images
    ill = draw_batch(77, range(40, 80), 128, normal_share=0.0, among=kinds, severity=0.8)
    normal = detector.score(torch.from_numpy(healthy)).score
    found = detector.score(torch.from_numpy(ill.images))
    assert roc_auc_score(np.r_[np.zeros(40), np.ones(40)], np.r_[normal, found.score]) > 0.8
    masks = torch.from_numpy(ill.findings.any(axis=1)[:, None].astype(np.float32))
    cells = torch.nn.functional.adaptive_avg_pool2d(masks, detector.grid)[:, 0].numpy()
    hottest = found.heat.reshape(40, -1).argmax(axis=1)
    inside = (cells.reshape(40, -1)[np.arange(40), hottest] > 0).mean()
    assert inside > 3 * (cells > 0).mean() * 0.5 and inside > 0.4, "and points at them"


def test_it_opens_by_name_in_python() -> None:
    model = afire.load("builtin", device="cpu")
    found = model.detect(torch.from_numpy(draw_batch(78, range(2), 128).images))
    assert found.score.shape == (2,) and found.heatmap.shape == (2, 16, 16) and found.warnings == [[], []]


def test_a_run_without_a_model_takes_it(tmp_path: Path) -> None:
    films = tmp_path / "films"
    films.mkdir()
    for number, image in enumerate(draw_batch(79, range(3), 160).images):
        Image.fromarray((255 * image[0]).round().astype(np.uint8)).save(films / f"{number}.png")
    result = CliRunner().invoke(app, ["detect", "run", str(films), "--out", str(tmp_path / "report")])
    assert result.exit_code == 0, result.output
    about = read_json(tmp_path / "report" / "results.json")
    assert about["model"]["name"] == "builtin" and about["warnings"] == [DRAWN_NORMALS]
    assert sum(about["counts"].values()) == 3 and (tmp_path / "report" / "report.html").is_file()
    assert "afire detect calibrate" in result.output

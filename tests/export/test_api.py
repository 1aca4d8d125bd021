"""afire from Python: the ten lines of the README, and what it takes and refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import afire
from afire.data.phantom.film import draw_film
from tests.export.conftest import make_run, smallest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(full_bundle: Path) -> afire.Model:
    return afire.load(full_bundle, device="cpu")


def test_the_lines_of_the_readme_run(full_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = next(block for block in blocks if "afire.load" in block)
    assert len([line for line in lines.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundle").symlink_to(full_bundle)
    for index in (1, 2):
        film = draw_film(0, index, 48).image
        Image.fromarray((film * 255).astype(np.uint8)).save(f"film{index}.png")
    names: dict[str, object] = {}
    exec(lines, names)
    assert names["tokens"].shape == (2, 16, 16) and names["vector"].shape == (2, 16)  # type: ignore[attr-defined]
    assert names["restored"].shape == (2, 1, 32, 32)  # type: ignore[attr-defined]
    assert np.isfinite(names["score"]).all() and names["score"].shape == (2,)  # type: ignore[call-overload,attr-defined]


def test_every_form_of_films_gives_the_same(model: afire.Model, tmp_path: Path) -> None:
    pixels = np.linspace(0, 1, 32 * 32, dtype=np.float32).reshape(32, 32)
    Image.fromarray(np.rint(pixels * 65535).astype(np.uint16)).save(tmp_path / "film.png")
    expected = model.embed(torch.from_numpy(pixels)[None, None])
    assert torch.equal(model.embed(pixels), expected)
    assert torch.equal(model.embed(pixels[None].astype(np.float64)), expected)
    for paths in (tmp_path / "film.png", str(tmp_path / "film.png"), [tmp_path / "film.png"]):
        torch.testing.assert_close(model.embed(paths), expected, atol=1e-3, rtol=0)


def test_long_batches_are_cut_and_joined(model: afire.Model) -> None:
    films = torch.rand(70, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.encode(films)[65], model.encode(films[65:66])[0])
    assert model.detect(films).score.shape == (70,) and model.restore(films).shape == (70, 1, 32, 32)


def test_a_detection_is_calibrated_and_doubts_strange_films(model: afire.Model) -> None:
    films = torch.rand(3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    films[2] = 0.5
    found = model.detect(films)
    assert found.heatmap.shape == (3, 4, 4) and found.restored is not None and found.restored.shape == (3, 32, 32)
    assert ((found.p_value > 0) & (found.p_value <= 1)).all()
    assert model.detector is not None and (found.alarm == (found.score >= model.detector.threshold)).all()
    assert found.objections[2] == ["blank: one grey level"]


def test_maps_of_lesions(model: afire.Model, tmp_path: Path) -> None:
    films = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    assert model.method is not None
    torch.testing.assert_close(model.lesion_maps(films).flatten(1), model.method.lesion_logits(films).sigmoid())
    finer = afire.load(make_run(tmp_path / "finer", smallest("losses.lesion=1", "losses.lesion_finer=2")), device="cpu")
    assert finer.lesion_maps(films).shape == (2, 1, 8, 8)
    without = afire.load(make_run(tmp_path / "without", smallest("losses.lesion=0")), device="cpu")
    with pytest.raises(afire.UserError, match="no lesion classifier"):
        without.lesion_maps(films)


def test_a_run_opens_too_and_says_that_it_cannot_detect(run_folder: Path, model: afire.Model) -> None:
    run = afire.load(run_folder)
    films = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(run.encode(films), model.encode(films))
    assert "no detector" in repr(run) and "a detector inside" in repr(model)
    with pytest.raises(afire.UserError, match="afire detect fit"):
        run.detect(films)


def test_a_run_of_another_method(tmp_path: Path) -> None:
    model = afire.load(make_run(tmp_path / "run", smallest("method=mae")))
    films = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    assert model.encode(films).shape == (2, 16, 16) and model.restore(films).shape == (2, 1, 32, 32)
    with pytest.raises(afire.UserError, match="MAE has no network 'teacher'"):
        model.encode(films, "teacher")


def test_a_detectors_folder_opens(detector_folder: Path) -> None:
    films = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    assert afire.load(detector_folder).detect(films).score.shape == (2,)


def test_a_detector_on_an_encoder_alone_opens(patchcore_folder: Path, run_folder: Path) -> None:
    model, run = afire.load(patchcore_folder), afire.load(run_folder)
    images = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.encode(images), run.encode(images))
    assert model.detect(images).score.shape == (2,) and model.method is None
    with pytest.raises(afire.UserError, match="restores nothing"):
        model.restore(images)
    with pytest.raises(afire.UserError, match="no network 'student'"):
        model.encode(images, "student")
    with pytest.raises(afire.UserError, match="should lie in"):
        model.encode(images * 200)


@pytest.mark.parametrize(
    ("films", "message"),
    [
        (torch.zeros(2, 1, 32, 32, dtype=torch.uint8), "floating point"),
        (torch.full((1, 1, 32, 32), 200.0), r"should lie in \[0, 1\]"),
        (torch.zeros(1, 2, 32, 32), "have shape"),
        (torch.zeros(0, 1, 32, 32), "empty batch"),
        (torch.zeros(1, 1, 33, 32), "multiple of the patch size"),
        ([], "no films were given"),
    ],
)
def test_films_that_are_none_are_refused(model: afire.Model, films: object, message: str) -> None:
    with pytest.raises(afire.UserError, match=message):
        model.encode(films)  # type: ignore[arg-type]


def test_missing_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(afire.UserError, match="do not exist"):
        afire.load(tmp_path / "none")


def test_importing_afire_is_light() -> None:
    code = "import sys, afire; assert 'torch' not in sys.modules and 'numpy' not in sys.modules; afire.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "has no attribute 'nothing'" in done.stderr


def test_the_package_is_typed() -> None:
    assert (ROOT / "afire" / "py.typed").is_file()

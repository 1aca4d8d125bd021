"""The network of the built-in detector as an encoder: every task takes `--weights builtin`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import afire
from afire.config import Config
from afire.data.manifest import make_manifest
from afire.data.pack import PackSettings, pack
from afire.detect.base import detector_folder, load_detector
from afire.detect.taught import Finder
from afire.errors import UserError
from afire.methods import METHODS, make_method
from afire.nn.residual import ResidualTrunk
from afire.nn.vit import VisionTransformer, initialise
from afire.settings import load_config
from afire.tasks.finetune import load_classifier
from afire.tasks.gradcam import TokenMap, gradcam
from afire.tasks.representation import describe_backbone, load_backbones
from afire.weights import open_weights, said_by_start, start_from
from afire.weights.hub import BUILTIN
from tests.tasks.conftest import draw_films
from tests.tasks.drawn import draw_spots
from tests.tasks.test_cli import afire as run_afire

QUICK = ("training.epochs=1", "training.batch_size=16", "training.min_epoch_steps=1", "bootstrap=20")
SETTINGS = [word for setting in QUICK for word in ("--set", setting)]


@pytest.fixture(scope="module")
def spots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_spots(tmp_path_factory.mktemp("spots"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Films of the size that the built-in detector takes."""
    folder = tmp_path_factory.mktemp("large")
    table = draw_films(folder / "films", 120, size=128)
    pack(make_manifest(table, folder / "films"), folder / "pack", PackSettings(size=128), workers=1)
    return folder / "pack"


def test_its_tokens_are_the_features_of_the_detector() -> None:
    weights, detector = open_weights(BUILTIN), load_detector(detector_folder(BUILTIN))
    assert isinstance(detector.model, Finder) and isinstance(weights.trunk, ResidualTrunk)
    theirs = detector.model.network.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights.trunk.state_dict().items())
    assert weights.config.encoder.width == 448 and weights.config.image.normalise == "none" and not weights.holds_vit
    images = torch.rand(2, 1, 128, 128)
    model = afire.load(BUILTIN, device="cpu")
    tokens = model.encode(images)
    assert tokens.shape == (2, 256, 448)
    torch.testing.assert_close(model.embed(images), tokens.mean(dim=1))
    with pytest.raises(UserError, match="no decoder; it restores nothing"):
        model.restore(images)
    np.testing.assert_allclose(model.detect(images).score, detector.score(images).score, rtol=1e-5)


def test_pre_training_of_a_residual_network_starts_from_it(smallest: Config) -> None:
    config = load_config("residual", weights=said_by_start(BUILTIN))
    assert config.encoder.kind == "residual" and config.encoder.width == 448 and config.image.size == 128
    method = make_method(config)
    start_from(BUILTIN)(method)
    given, taken = open_weights(BUILTIN).trunk.state_dict(), method.trunk().state_dict()
    assert given.keys() == taken.keys() and all(torch.equal(given[name], taken[name]) for name in given)
    with pytest.raises(UserError, match="builtin holds a residual network, and a ViT is needed"):
        start_from(BUILTIN)(make_method(smallest))
    narrow = load_config("residual", overrides=["encoder.width=56"], weights=said_by_start(BUILTIN))
    with pytest.raises(UserError, match=r"builtin has encoder.width 448 and encoder.depth 5; leave both out"):
        start_from(BUILTIN)(make_method(narrow))


def test_a_vit_is_no_start_for_a_residual_network(tmp_path: Path) -> None:
    vit = VisionTransformer(width=56, depth=3, heads=2, patch_size=8, image_size=32)
    initialise(vit, torch.Generator().manual_seed(0))
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    with pytest.raises(UserError, match="vit holds a ViT, and a residual network is needed"):
        start_from(tmp_path / "vit.safetensors")(make_method(load_config("residual")))


@pytest.mark.parametrize("method", [name for name in METHODS if name != "phantom"])
def test_other_methods_refuse_a_residual_network(method: str) -> None:
    config = load_config("residual", overrides=[f"method={method}", "image.size=32"])
    with pytest.raises(UserError, match=f"the method {method} pre-trains vision transformers"):
        make_method(config)


def test_embed_and_probe(packed: Path, tmp_path: Path) -> None:
    run_afire("embed", "--weights", BUILTIN, "--data", packed, "--out", tmp_path / "f.npz", "--quiet")
    features = np.load(tmp_path / "f.npz")["features"]
    assert features.shape == (120, 448) and np.isfinite(features).all()
    words = ("--data", packed, "--labels", "Blob", "--no-cache", "--quiet")
    run_afire("probe", "--weights", BUILTIN, *words, "--out", tmp_path / "probe")
    result = json.loads((tmp_path / "probe" / "result.json").read_text())
    assert result["config"]["encoder"]["kind"] == "residual"
    assert result["metrics"]["auc"]["mean"] > 0.9, "a bright blob is easily told"


@pytest.mark.slow
def test_fine_tuning_comes_back_and_shows_its_map(spots: Path, tmp_path: Path) -> None:
    words = ("--weights", BUILTIN, "--data", spots, "--seeds", "0", *SETTINGS, "--device", "cpu", "--quiet")
    run_afire("finetune", *words, "--out", tmp_path / "out")
    trained = load_classifier(tmp_path / "out")
    assert isinstance(trained.model.encoder, ResidualTrunk)
    assert gradcam(trained.model, torch.rand(2, 1, 32, 32), 0).shape == (2, 32, 32)
    with pytest.raises(UserError, match="behind its last stage only"):
        TokenMap(trained.model, after=1)


@pytest.mark.slow
def test_segmentation_and_patchcore(spots: Path, large: Path, tmp_path: Path) -> None:
    words = ("--weights", BUILTIN, "--data", spots, *SETTINGS, "--device", "cpu", "--quiet")
    run_afire("segment", *words, "--seeds", "0", "--set", "decoder.finest=4", "--out", tmp_path / "masks")
    assert json.loads((tmp_path / "masks" / "result.json").read_text())["metrics"]["dice"]["mean"] >= 0
    words = ("detect", "fit", "--method", "patchcore", "--weights", BUILTIN, "--data", large, "--out", tmp_path / "pc")
    run_afire(*words, "--set", "false_alarms=0.3", "--device", "cpu", "--quiet")
    detector = load_detector(tmp_path / "pc")
    assert detector.config.encoder.kind == "residual"
    again = load_detector(tmp_path / "pc")
    images = torch.rand(2, 1, 128, 128)
    models = [afire.load(weights, "cpu") for weights in (tmp_path / "pc", BUILTIN)]
    assert torch.equal(*(model.encode(images) for model in models)), "it looks through the same network"
    np.testing.assert_array_equal(detector.score(images).score, again.score(images).score)


def test_random_weights_of_its_kind_are_a_row_beside_it(smallest: Config) -> None:
    residual = smallest.encoder.model_copy(update={"kind": "residual", "width": 56, "depth": 5, "heads": 1})
    config = smallest.model_copy(update={"encoder": residual})
    first, again = (open_weights("random", config, seed=3) for _ in range(2))
    assert isinstance(first.trunk, ResidualTrunk) and first.hash == again.hash
    assert first.hash != open_weights("random", config, seed=4).hash


def test_it_stands_beside_a_vit_in_a_figure(tmp_path: Path, smallest: Config) -> None:
    """Its settings are not lent to what is compared with it: a file says its own, random weights are asked for."""
    vit = VisionTransformer(width=56, depth=3, heads=2, patch_size=8, image_size=32)
    initialise(vit, torch.Generator().manual_seed(0))
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    both = load_backbones({"builtin": BUILTIN, "vit": tmp_path / "vit.safetensors"})
    assert isinstance(both["builtin"].trunk, ResidualTrunk) and isinstance(both["vit"].trunk, VisionTransformer)
    assert both["vit"].config.method in METHODS
    assert [describe_backbone(backbone)["width"] for backbone in both.values()] == [448, 56]
    with pytest.raises(UserError, match="add --preset"):
        _ = load_backbones({"builtin": BUILTIN, "random": "random"})["random"].trunk
    beside = load_backbones({"builtin": BUILTIN, "random": "random"}, smallest)
    assert describe_backbone(beside["random"])["width"] == smallest.encoder.width


def test_it_has_one_network() -> None:
    assert open_weights(BUILTIN, network="network").network == "network"
    with pytest.raises(UserError, match="holds one network, and no student; leave out --network"):
        _ = open_weights(BUILTIN, network="student").network


def test_methods_that_need_a_vit_say_so(large: Path, tmp_path: Path) -> None:
    words = ("detect", "fit", "--method", "fae", "--weights", BUILTIN, "--data", large, "--out", tmp_path / "out")
    assert "the detector fae needs a ViT, and builtin holds a residual network" in run_afire(*words, "--quiet")

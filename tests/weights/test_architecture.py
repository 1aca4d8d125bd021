"""ViT files of others start without further words: what tensors say, what is turned into ours, what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from afire.data.pack import read_summary
from afire.errors import UserError
from afire.methods import make_method
from afire.nn.vit import VisionTransformer
from afire.settings import load_config
from afire.weights import open_weights, said_by, start_from
from afire.weights.architecture import timm_model, usual_heads
from afire.weights.files import to_huggingface
from tests.weights.test_files import LAYOUTS, prefixed, vit

Tensors = dict[str, Tensor]
RGB = {"channels": 3, "positions": "learned"}


def images(channels: int = 3) -> Tensor:
    return torch.rand(2, channels, 32, 32, generator=torch.Generator().manual_seed(5))


def saved(folder: Path, tensors: Tensors, name: str = "vit.safetensors") -> str:
    folder.mkdir(exist_ok=True)
    save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, folder / name)
    return str(folder / name)


def same_network(source: str | Path, expected: VisionTransformer, channels: int = 3) -> str:
    """That the weights at ``source``, opened alone, compute what ``expected`` does; the report."""
    opened = open_weights(source, None)
    config = opened.config
    if config.encoder.heads != 2:  # tensors do not tell
        opened = open_weights(source, load_config(overrides=["encoder.heads=2"], weights=said_by(source)))
    with torch.no_grad():
        torch.testing.assert_close(opened.trunk(images(channels)), expected(images(channels)), rtol=1e-4, atol=1e-5)
    return opened.report


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_says_its_architecture(tmp_path: Path, layout: str) -> None:
    network = vit(1, depth=3, patch_size=16, image_size=64)
    torch.save(LAYOUTS[layout](network), tmp_path / "weights.pth")
    config = open_weights(tmp_path / "weights.pth").config
    encoder, image = config.encoder, config.image
    assert (encoder.width, encoder.depth, encoder.patch_size, encoder.stem) == (16, 3, 16, "patch")
    assert (encoder.positions, image.size, image.channels) == ("sincos", 64, 1)


@pytest.mark.parametrize("settings", [RGB, {"stem": "conv"}, {}])
def test_a_file_alone_is_the_network(tmp_path: Path, settings: dict[str, object]) -> None:
    network = vit(1, **settings)
    report = same_network(saved(tmp_path, prefixed(network, "")), network, 3 if settings is RGB else 1)
    kind = settings.get("positions", "sincos")
    assert f"width 16, depth 2, patch 8{', convolutional stem' if 'stem' in settings else ''}, {kind} pos" in report
    assert "positions on 4x4" in report and "2 heads (as was asked for)" in report


def test_colours_mean_imagenets_normalisation(tmp_path: Path) -> None:
    said = said_by(saved(tmp_path, prefixed(vit(1, **RGB), "")))
    assert load_config("small", weights=said).image.normalise == "imagenet"
    grey = said_by(saved(tmp_path, prefixed(vit(1), "")))
    assert load_config("small", weights=grey).image.normalise == "film"  # nobody but the preset says


def test_settings_that_were_asked_for_count_more_than_tensors_and_a_preset_less(tmp_path: Path) -> None:
    said = said_by(saved(tmp_path, prefixed(vit(1, **RGB), "")))
    config = load_config("paper", None, ["encoder.heads=4", "image.channels=1"], said)
    assert (config.encoder.size, config.encoder.width, config.encoder.depth) == (None, 16, 2)
    assert config.encoder.heads == 4 and config.image.channels == 1 and config.training.epochs == 800


@pytest.mark.parametrize(("width", "heads"), [(192, 3), (384, 6), (768, 12), (1024, 16), (1280, 16), (16, 1), (96, 2)])
def test_heads_are_those_of_the_known_widths(width: int, heads: int) -> None:
    assert usual_heads(width) == heads and width % heads == 0


def test_a_preset_of_the_same_width_knows_the_heads(tmp_path: Path) -> None:
    file = saved(tmp_path, prefixed(vit(1, width=64), ""))
    assert said_by(file)["encoder"]["heads"] == said_by(file, None, "small")["encoder"]["heads"] == 1
    assert said_by(file, None, "tiny")["encoder"]["heads"] == load_config("tiny").encoder.heads == 2


def test_what_was_taken_for_the_heads_is_said(tmp_path: Path) -> None:
    weights = open_weights(saved(tmp_path, prefixed(vit(1, width=128), "")))
    assert weights.config.encoder.heads == 2
    assert "2 heads (width / 64; tensors do not tell, --set encoder.heads= says otherwise)" in weights.report


def test_a_pack_is_taken_as_it_is(tmp_path: Path, packed: Path) -> None:
    file = saved(tmp_path, prefixed(vit(1, image_size=64), ""))
    size = read_summary(packed).settings.size
    assert said_by(file)["image"]["size"] == 64 != size
    assert said_by(file, packed)["image"]["size"] == size
    assert said_by("random") == {}


@pytest.mark.parametrize("method", ["afire", "mae"])
def test_a_run_starts_from_a_file_with_a_preset_of_another_architecture(tmp_path: Path, method: str) -> None:
    network = vit(1, **RGB)
    file = saved(tmp_path, prefixed(network, ""))
    config = load_config("small", None, [f"method={method}", "encoder.heads=2"], said_by(file))
    model = make_method(config)
    start_from(file)(model)
    for name in model.networks:
        state = model.trunk(name).state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in network.state_dict().items())


# Little things that are turned into ours


def scaled(tensors: Tensors, names: tuple[str, str]) -> Tensors:
    """The same network with scales beside its branches: the matrices divided by them."""
    generator = torch.Generator().manual_seed(3)
    for block in range(2):
        for name, matrix in zip(names, ("attn.proj", "mlp.fc2"), strict=True):
            gamma = 0.5 + torch.rand(16, generator=generator)
            tensors[f"blocks.{block}.{name}"] = gamma
            tensors[f"blocks.{block}.{matrix}.weight"] /= gamma[:, None]
            tensors[f"blocks.{block}.{matrix}.bias"] /= gamma
    return tensors


@pytest.mark.parametrize("names", [("ls1.gamma", "ls2.gamma"), ("gamma_1", "gamma_2")])
def test_scales_of_branches_are_multiplied_in(tmp_path: Path, names: tuple[str, str]) -> None:
    network = vit(1, **RGB)
    report = same_network(saved(tmp_path, scaled(prefixed(network, ""), names)), network)
    assert "4 scales of branches multiplied into their matrices" in report


def test_dinov2_of_hugging_face(tmp_path: Path) -> None:
    network = vit(1, **RGB)
    theirs: Tensors = {}
    for name, tensor in to_huggingface(network.state_dict()).items():
        name = name.replace("layernorm_before", "norm1").replace("layernorm_after", "norm2")
        name = name.replace("intermediate.dense", "mlp.fc1")
        theirs[name if "attention.output" in name else name.replace("output.dense", "mlp.fc2")] = tensor
    for block in range(2):
        for number, matrix in ((1, "attention.output.dense"), (2, "mlp.fc2")):
            theirs[f"encoder.layer.{block}.layer_scale{number}.lambda1"] = torch.full((16,), 2.0)
            for kind in ("weight", "bias"):
                theirs[f"encoder.layer.{block}.{matrix}.{kind}"] = theirs[f"encoder.layer.{block}.{matrix}.{kind}"] / 2
    assert "Hugging Face layout" in same_network(saved(tmp_path, theirs), network)


def test_positions_without_one_for_the_class_token(tmp_path: Path) -> None:
    network = vit(1, **RGB)
    with torch.no_grad():
        network.pos_embed[:, 0] = 0
    tensors = prefixed(network, "")
    tensors["pos_embed"] = tensors["pos_embed"][:, 1:]
    assert "no position for the class token" in same_network(saved(tmp_path, tensors), network)


def test_a_distillation_token_is_left_out(tmp_path: Path) -> None:
    network = vit(1, **RGB)
    tensors = prefixed(network, "")
    tensors["dist_token"] = torch.ones(1, 1, 16)
    tensors["pos_embed"] = torch.cat(
        [tensors["pos_embed"][:, :1], torch.ones(1, 1, 16), tensors["pos_embed"][:, 1:]], 1
    )
    assert "the distillation token left out" in same_network(saved(tmp_path, tensors), network)


def test_a_folder_of_transformers_says_heads_and_normalisation(tmp_path: Path) -> None:
    network = vit(1, **RGB)
    saved(tmp_path, to_huggingface(network.state_dict()), "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2}))
    half = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(half))
    weights = open_weights(tmp_path)
    films = images(1)
    with torch.no_grad():
        torch.testing.assert_close(
            weights.trunk(weights.normalise(films)),
            network((films.expand(-1, 3, -1, -1) - 0.5) / 0.5),
            rtol=1e-4,
            atol=1e-5,
        )
    assert "2 heads (as its settings say)" in weights.report and "turned into ImageNet's" in weights.report
    (tmp_path / "config.json").write_text("[not JSON")
    assert open_weights(tmp_path).config.encoder.heads == 1


# What cannot be


REFUSED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "class token": (lambda tensors: tensors.pop("cls_token"), r"has no class token"),
    "registers": (lambda tensors: tensors.update(reg_token=torch.zeros(1, 4, 16)), r"has register tokens"),
    "positions": (lambda tensors: tensors.pop("pos_embed"), r"holds no positions"),
    "narrow MLPs": (
        lambda tensors: tensors.update({"blocks.0.mlp.fc1.weight": torch.zeros(48, 16)}),
        r"MLPs 3 times as wide as its tokens",
    ),
    "another block": (
        lambda tensors: tensors.update({"blocks.1.attn.q_norm.weight": torch.zeros(8)}),
        r"another kind than ours: it has blocks\.1\.attn\.q_norm\.weight",
    ),
    "no bias": (lambda tensors: tensors.pop("blocks.1.attn.qkv.bias"), r"it lacks blocks\.1\.attn\.qkv\.bias"),
    "a linear projection": (
        lambda tensors: tensors.update({"patch_embed.proj.weight": torch.zeros(16, 192)}),
        r"no projection of square patches",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_kinds_are_refused_in_words(tmp_path: Path, what: str) -> None:
    change, message = REFUSED[what]
    tensors = prefixed(vit(1, **RGB), "")
    change(tensors)
    with pytest.raises(UserError, match=message):
        _ = open_weights(saved(tmp_path, tensors)).config


# timm, which need not be installed


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A module with the three things of timm that are used."""
    network = vit(1, **RGB)
    network.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}  # type: ignore[assignment]
    for block in network.blocks:
        block.attn.num_heads = 2

    def create_model(name: str, pretrained: bool, num_classes: int) -> VisionTransformer:
        assert pretrained and num_classes == 0
        if name == "vit_offline":
            raise ConnectionError("no route\nto host")
        return network

    fake = SimpleNamespace(
        is_model=lambda name: name.startswith("vit_"), create_model=create_model, network=network, __spec__=object()
    )
    monkeypatch.setitem(sys.modules, "timm", fake)  # type: ignore[arg-type]
    timm_model.cache_clear()
    yield fake
    timm_model.cache_clear()


def test_timm_by_name(timm: SimpleNamespace) -> None:
    weights = open_weights("timm:vit_test")
    assert weights.name == "vit_test" and weights.config.encoder.heads == 2
    assert said_by("timm:vit_test")["encoder"]["width"] == 16
    films = images(1)
    with torch.no_grad():
        expected = timm.network((films.expand(-1, 3, -1, -1) - 0.5) / 0.5)
        torch.testing.assert_close(weights.trunk(weights.normalise(films)), expected, rtol=1e-4, atol=1e-5)


def test_timm_without_the_model_the_network_or_the_extra(
    timm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"timm has no model 'resnet50'"):
        _ = open_weights("timm:resnet50").config
    with pytest.raises(
        UserError, match=r"cannot give the weights of vit_offline \(ConnectionError: no route\); go onl"
    ):
        _ = open_weights("timm:vit_offline").config
    monkeypatch.setitem(sys.modules, "timm", None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"timm:vit_test needs timm; install it with pip install 'afire\[timm\]'"):
        _ = open_weights("timm:vit_test").config

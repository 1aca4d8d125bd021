"""Weights from elsewhere: every layout, what does not fit, and files that must not be opened."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from afire.errors import UserError
from afire.nn.vit import VisionTransformer, initialise
from afire.weights.files import LoadReport, fill_encoder, find_encoder, read_tensors, tensor_hash, to_huggingface


def vit(seed: int, **settings: object) -> VisionTransformer:
    options: dict[str, object] = {"image_size": 32, "patch_size": 8, "channels": 1, "width": 16, "depth": 2, "heads": 2}
    network = VisionTransformer(**{**options, **settings})  # type: ignore[arg-type]
    initialise(network, torch.Generator().manual_seed(seed))
    return network


def prefixed(network: VisionTransformer, prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor.clone() for name, tensor in network.state_dict().items()}


def load_encoder(encoder: VisionTransformer, file: Path) -> LoadReport:
    return fill_encoder(encoder, *find_encoder(read_tensors(file), file), file)


LAYOUTS = {
    "timm": lambda net: {**prefixed(net, ""), "head.weight": torch.zeros(3, 16)},
    "AFiRe, ours": lambda net: {**prefixed(net, "teacher.encoder."), **prefixed(vit(9), "student.encoder.")},
    "AFiRe, original": lambda net: {"teacher": prefixed(net, "encoder."), "student": prefixed(vit(9), "encoder.")},
    "AFiRe, original in DDP": lambda net: {"teacher": prefixed(net, "module.encoder."), "epoch": 3},
    "DINO": lambda net: {"student": prefixed(vit(9), "module.backbone."), "teacher": prefixed(net, "backbone.")},
    "MAE": lambda net: {
        "model": {**prefixed(net, ""), "decoder_embed.weight": torch.zeros(2, 16), "mask_token": torch.zeros(1)}
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path: Path, layout: str) -> None:
    source, target = vit(1), vit(2)
    torch.save(LAYOUTS[layout](source), tmp_path / "weights.pth")
    report = load_encoder(target, tmp_path / "weights.pth")
    assert report.layout == layout.split(",")[0] and not report.missing and not report.unexpected
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)
    assert f"{len(report.loaded)} tensors loaded ({report.layout} layout)" in report.message()


def test_safetensors(tmp_path: Path) -> None:
    source, target = vit(1), vit(2)
    save_file(prefixed(source, ""), tmp_path / "weights.safetensors")
    load_encoder(target, tmp_path / "weights.safetensors")
    assert torch.equal(target.blocks[1].mlp.fc2.weight, source.blocks[1].mlp.fc2.weight)  # type: ignore[union-attr,arg-type]


def test_missing_and_unexpected_are_reported(tmp_path: Path) -> None:
    content = prefixed(vit(1), "")
    del content["norm.bias"]
    content["blocks.0.attn.q_norm.weight"] = torch.zeros(4)
    torch.save(content, tmp_path / "w.pth")
    report = load_encoder(vit(2), tmp_path / "w.pth")
    assert report.missing == ["norm.bias"] and report.unexpected == ["blocks.0.attn.q_norm.weight"]
    assert "1 missing (norm.bias)" in report.message()


def test_grey_films_see_what_three_equal_channels_saw(tmp_path: Path) -> None:
    colour, grey = vit(1, channels=3), vit(2)
    torch.save(prefixed(colour, ""), tmp_path / "w.pth")
    report = load_encoder(grey, tmp_path / "w.pth")
    films = torch.rand(2, 1, 32, 32)
    torch.testing.assert_close(grey(films), colour(films.expand(-1, 3, -1, -1)))
    assert "3 input channels summed into 1" in report.message()
    back = vit(3, channels=3)
    torch.save(prefixed(grey, ""), tmp_path / "g.pth")
    load_encoder(back, tmp_path / "g.pth")
    torch.testing.assert_close(back(films.expand(-1, 3, -1, -1)), grey(films))


def test_learned_positions_are_resized(tmp_path: Path) -> None:
    source, target = vit(1, positions="learned"), vit(2, positions="learned", image_size=64)
    torch.save(prefixed(source, ""), tmp_path / "w.pth")
    report = load_encoder(target, tmp_path / "w.pth")
    assert target.pos_embed.shape == (1, 65, 16) and "positions resized from 4x4 to 8x8" in report.message()
    assert torch.equal(target.pos_embed[:, 0], source.pos_embed[:, 0])


def test_learned_positions_do_not_slip_into_a_sincos_encoder(tmp_path: Path) -> None:
    torch.save(prefixed(vit(1, positions="learned"), ""), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"--set encoder\.positions=learned"):
        load_encoder(vit(2), tmp_path / "w.pth")


def test_sincos_positions_fit_any_size(tmp_path: Path) -> None:
    torch.save(prefixed(vit(1), ""), tmp_path / "w.pth")
    target = vit(2, image_size=64)
    before = target.pos_embed.clone()
    load_encoder(target, tmp_path / "w.pth")
    assert torch.equal(target.pos_embed, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"width": 32}, "another architecture"), ({"patch_size": 16}, "another architecture")],
)
def test_another_architecture_is_refused(tmp_path: Path, settings: dict[str, int], message: str) -> None:
    torch.save(prefixed(vit(1, **settings), ""), tmp_path / "w.pth")
    with pytest.raises(UserError, match=message):
        load_encoder(vit(2), tmp_path / "w.pth")


class Harmful:
    """What a hostile file would run when unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch harmed",)


def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Harmful()}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="pickled code"):
        read_tensors(tmp_path / "w.pth")
    (tmp_path / "raw.pth").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(UserError):
        read_tensors(tmp_path / "raw.pth")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("content", [b"", b"not weights", b"PK\x03\x04truncated"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_truncated_files_are_refused(tmp_path: Path, content: bytes, suffix: str) -> None:
    (tmp_path / f"w{suffix}").write_bytes(content)
    with pytest.raises(UserError, match=rf"w\{suffix} is .*truncated"):
        read_tensors(tmp_path / f"w{suffix}")


def test_files_without_a_vit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no ViT in timm's or Hugging Face's naming.*conv1\.weight"):
        find_encoder({"conv1.weight": torch.zeros(1)}, tmp_path / "resnet.pth")
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    with pytest.raises(UserError, match="holds a list"):
        read_tensors(tmp_path / "list.pth")
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    with pytest.raises(UserError, match="holds no tensors"):
        read_tensors(tmp_path / "empty.pth")


@pytest.mark.parametrize("prefix", ["", "vit."])
def test_hugging_face(tmp_path: Path, prefix: str) -> None:
    """The older names, as transformers before 5 wrote them; those of the installed one are in test_formats."""
    source, target = vit(1), vit(2)
    content = {prefix + name: tensor for name, tensor in to_huggingface(source.state_dict()).items()}
    content |= {"classifier.weight": torch.zeros(2, 16), f"{prefix}pooler.dense.weight": torch.zeros(16, 16)}
    torch.save(content, tmp_path / "w.pth")
    report = load_encoder(target, tmp_path / "w.pth")
    assert report.layout == "Hugging Face" and not report.missing and not report.unexpected
    films = torch.rand(2, 1, 32, 32)
    assert torch.equal(source(films), target(films))


def test_newer_hugging_face_names(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.ViTConfig(
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
        **{"image_size": 32, "patch_size": 8, "num_channels": 1, "layer_norm_eps": 1e-6},
    )
    theirs = transformers.ViTModel(settings, add_pooling_layer=False).eval()
    save_file({name: tensor.clone() for name, tensor in theirs.state_dict().items()}, tmp_path / "w.safetensors")
    target = vit(2, positions="learned")
    report = load_encoder(target, tmp_path / "w.safetensors")
    assert not report.missing and not report.unexpected
    films = torch.rand(2, 1, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(target(films), theirs(films).last_hidden_state, atol=1e-5, rtol=0)


def test_a_truncated_hugging_face_file_is_reported(tmp_path: Path) -> None:
    content = to_huggingface(vit(1).state_dict())
    del content["encoder.layer.0.attention.attention.key.weight"]
    torch.save(content, tmp_path / "w.pth")
    assert load_encoder(vit(2), tmp_path / "w.pth").missing == ["blocks.0.attn.qkv.weight"]


def test_the_hash_of_tensors_is_what_it_always_was() -> None:
    """Results, detectors and bundles name weights by it: another value would make them strangers."""
    tensors = {"b": torch.arange(6).view(2, 3), "a_x": torch.linspace(-1, 1, 4)}
    expected = "e05b5c485cd5ec6dcfc27226670511398d607020d5dd965994a87f4076fb4e26"
    assert tensor_hash(tensors) == tensor_hash(dict(reversed(tensors.items()))) == expected
    assert tensor_hash({**tensors, "b": torch.arange(6).view(3, 2)}) != expected
    assert tensor_hash({**tensors, "b": torch.arange(6, dtype=torch.int32).view(2, 3)}) != expected

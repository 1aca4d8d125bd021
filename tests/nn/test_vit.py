"""The encoder equals timm's and Hugging Face's on the same weights, takes any size, and trains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from afire.config import VIT_SIZES, EncoderConfig, ImageConfig
from afire.errors import UserError
from afire.nn.vit import VisionTransformer, initialise, patchify, resize_positions, sincos_positions, unpatchify


def make(seed: int = 0, **settings: object) -> VisionTransformer:
    defaults = {"image_size": 32, "patch_size": 8, "channels": 1, "width": 24, "depth": 3, "heads": 2}
    vit = VisionTransformer(**{**defaults, **settings})  # type: ignore[arg-type]
    initialise(vit, torch.Generator().manual_seed(seed))
    return vit


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def disturb(vit: nn.Module) -> None:
    """Move every parameter off its initial value: zero biases and unit norms would hide a wrong mapping."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_patchify_is_row_by_row_and_undone_by_unpatchify() -> None:
    images = torch.arange(2 * 3 * 8 * 12, dtype=torch.float32).view(2, 3, 8, 12)
    patches = patchify(images, 4)
    assert patches.shape == (2, 6, 48)
    assert torch.equal(patches[1, 4].view(3, 4, 4), images[1, :, 4:8, 4:8])  # second row, second column
    assert torch.equal(unpatchify(patches, 4, (2, 3)), images)


@pytest.mark.parametrize("channels", [1, 3])
def test_equals_hugging_face(channels: int) -> None:
    transformers = pytest.importorskip("transformers")
    ours = make(channels=channels, positions="learned").eval()
    disturb(ours)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=2, intermediate_size=96, layer_norm_eps=1e-6,
        hidden_act="gelu", image_size=32, patch_size=8, num_channels=channels, qkv_bias=True,
    )  # fmt: skip
    theirs = transformers.ViTModel(config, add_pooling_layer=False).eval()
    copy_to_hugging_face(ours, theirs)
    images = noise(2, channels, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images).last_hidden_state, rtol=1e-4, atol=1e-5)


def copy_to_hugging_face(ours: VisionTransformer, theirs: nn.Module) -> None:
    with torch.no_grad():
        theirs.embeddings.cls_token.copy_(ours.cls_token)
        theirs.embeddings.position_embeddings.copy_(ours.pos_embed)
        theirs.embeddings.patch_embeddings.projection.load_state_dict(ours.patch_embed.proj.state_dict())
        theirs.layernorm.load_state_dict(ours.norm.state_dict())
        layers = theirs.layers if hasattr(theirs, "layers") else theirs.encoder.layer  # transformers 5 and 4
        for block, layer in zip(ours.blocks, layers, strict=True):
            pairs = [(block.norm1, "layernorm_before"), (block.norm2, "layernorm_after")]
            pairs += [(block.attn.proj, ("o_proj", "attention.output.dense"))]
            pairs += [(block.mlp.fc1, ("fc1", "intermediate.dense")), (block.mlp.fc2, ("fc2", "output.dense"))]
            for module, names in pairs:
                named(layer, names).load_state_dict(module.state_dict())
            weights, biases = block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3)
            for names, weight, bias in zip(
                (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")), weights, biases, strict=True
            ):
                named(layer, names).load_state_dict({"weight": weight, "bias": bias})


def named(layer: nn.Module, endings: str | tuple[str, ...]) -> nn.Module:
    """The part of a layer by the end of its name; the outermost where several fit."""
    found = [(name.count("."), module) for name, module in layer.named_modules() if name.endswith(endings)]
    return min(found, key=lambda pair: pair[0])[1]


def test_equals_timm() -> None:
    timm = pytest.importorskip("timm")
    ours = make(channels=3, positions="learned").eval()
    disturb(ours)
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=0
    ).eval()
    theirs.load_state_dict(ours.state_dict())
    images = noise(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs.forward_features(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", ["sincos", "learned"])
def test_parameter_names_are_timms(positions: str) -> None:
    block = [
        f"{part}.{kind}"
        for part in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
        for kind in ("weight", "bias")
    ]
    expected = {
        "cls_token",
        "pos_embed",
        "patch_embed.proj.weight",
        "patch_embed.proj.bias",
        "norm.weight",
        "norm.bias",
    }
    expected |= {f"blocks.{number}.{name}" for number in range(3) for name in block}
    state = make(positions=positions).state_dict()
    assert set(state) == expected
    assert state["patch_embed.proj.weight"].shape == (24, 1, 8, 8)


@pytest.mark.parametrize("patch_size", [8, 14, 16])
@pytest.mark.parametrize("size", list(VIT_SIZES))
def test_named_sizes_and_patches(size: str, patch_size: int) -> None:
    config = EncoderConfig(size=size, patch_size=patch_size)
    with torch.device("meta"):  # shapes only
        vit = VisionTransformer.from_config(config, ImageConfig(size=112))
        tokens = vit(torch.rand(2, 1, 112, 112))
    assert tokens.shape == (2, 1 + (112 // patch_size) ** 2, VIT_SIZES[size][0])


def test_base_has_the_known_number_of_parameters() -> None:
    with torch.device("meta"):
        vit = VisionTransformer(positions="learned")
    assert sum(parameter.numel() for parameter in vit.parameters()) == 85_798_656  # ViT-B/16 without classifier


def test_sincos_positions_know_row_and_column() -> None:
    positions = sincos_positions(16, (3, 5)).view(3, 5, 16)
    assert torch.equal(positions[0, :, :8], positions[2, :, :8])  # the first half tells the column only
    assert torch.equal(positions[:, 0, 8:], positions[:, 4, 8:])  # the second the row only
    assert torch.equal(positions[0, 0], torch.tensor([0.0] * 4 + [1.0] * 4).repeat(2))
    torch.testing.assert_close(positions[0, 2, 0], torch.tensor(2.0).sin())
    assert len(torch.unique(positions.view(15, 16), dim=0)) == 15


def test_a_finer_grid_keeps_the_place_in_the_film() -> None:
    coarse, fine = sincos_positions(16, (4, 4)).view(4, 4, 16), sincos_positions(16, (12, 12), (4, 4)).view(12, 12, 16)
    torch.testing.assert_close(
        fine[1::3, 1::3], coarse
    )  # the middle one of three small patches is the large one's centre
    assert torch.equal(sincos_positions(16, (4, 4), (4, 4)).view(4, 4, 16), coarse)


def test_learned_positions_are_interpolated() -> None:
    positions = torch.cat(
        [
            torch.full((1, 1, 2), 9.0),
            torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1).view(1, 16, 2),
        ],
        1,
    )
    resized = resize_positions(positions, (4, 4), (8, 8))
    assert resized.shape == (1, 65, 2) and torch.equal(resized[:, 0], positions[:, 0])
    middle = resized[0, 1:].view(8, 8, 2)[2:6, 2:6]
    torch.testing.assert_close(
        middle[..., 0], torch.tensor([0.75, 1.25, 1.75, 2.25])[:, None].expand(4, 4), atol=0.05, rtol=0
    )
    assert resize_positions(positions, (4, 4), (4, 4)) is positions


@pytest.mark.parametrize("positions", ["sincos", "learned"])
def test_any_size_that_the_patch_divides(positions: str) -> None:
    vit = make(positions=positions)
    assert vit(noise(2, 1, 48, 24)).shape == (2, 1 + 6 * 3, 24)
    with pytest.raises(UserError, match="33 x 32 pixels is not a multiple of the patch size 8"):
        vit(noise(2, 1, 33, 32))


def test_every_parameter_receives_a_gradient() -> None:
    vit = make(positions="learned")
    vit(noise(2, 1, 32, 32)).square().sum().backward()
    for name, parameter in vit.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
def test_gradient_checkpointing_changes_nothing(drop_path: float) -> None:
    results = []
    for checkpointing in (False, True):
        vit = make(gradient_checkpointing=checkpointing, drop_path=drop_path).train()
        out = vit(noise(4, 1, 32, 32), depth(4, 3))
        out.square().sum().backward()
        results.append((out.detach(), vit.blocks[0].mlp.fc1.weight.grad))
    torch.testing.assert_close(results[0], results[1])


def depth(images: int, seed: int) -> Tensor:
    return torch.rand(images, 3, 2, generator=torch.Generator().manual_seed(seed))


def test_stochastic_depth_follows_its_numbers_and_keeps_the_mean() -> None:
    vit = make(drop_path=0.4).train()
    images = noise(1, 1, 32, 32).expand(3, -1, -1, -1)
    first, again, other = (vit(images, depth(3, seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(vit.eval()(images), make()(images))  # off outside training
    scales = vit.train()._depth_scales(torch.zeros(4000, 1, 1), depth(4000, 0))
    assert scales is not None and scales[0].min() == 1  # the first block is never dropped
    assert abs(scales[-1].mean().item() - 1) < 0.05
    assert abs((scales[-1] == 0).float().mean().item() - 0.4) < 0.03


def test_initial_weights_follow_the_generator() -> None:
    assert all(torch.equal(a, b) for a, b in zip(make(1).parameters(), make(1).parameters(), strict=True))
    assert not torch.equal(make(1).blocks[0].attn.qkv.weight, make(2).blocks[0].attn.qkv.weight)
    weight = make(width=240, depth=1).blocks[0].attn.proj.weight
    assert weight.abs().max() <= (6 / 480) ** 0.5 and weight.std() > 0.06  # Xavier-uniform


def test_a_film_is_dropped_alike_in_any_batch() -> None:
    vit = make(drop_path=0.5).train()
    images, numbers = noise(4, 1, 32, 32), depth(4, 1)
    torch.testing.assert_close(vit(images, numbers)[2:], vit(images[2:], numbers[2:]))


def test_kept_patches_keep_their_places() -> None:
    vit = make().eval()
    images = noise(2, 1, 32, 32)
    everything = torch.arange(vit.grid[0] * vit.grid[1]).expand(2, -1)
    torch.testing.assert_close(vit(images, keep=everything), vit(images))
    kept = torch.tensor([[0, 3], [1, 2]])
    tokens = vit(images, keep=kept)
    assert tokens.shape == (2, 3, vit.width)
    embedded = vit._embed(images, None)
    for film in range(2):
        assert torch.equal(vit._embed(images, kept)[film, 1:], embedded[film, 1 + kept[film]])

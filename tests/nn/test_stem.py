"""The convolutional stem: one token for each patch, films apart from each other, nothing of a dropped patch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from afire.config import EncoderConfig, ImageConfig
from afire.errors import UserError
from afire.methods import make_method
from afire.methods.base import Keys
from afire.nn.stem import ConvStem
from afire.nn.vit import VisionTransformer, initialise
from afire.settings import load_config
from tests.nn.test_vit import make, noise


def reference(stem: ConvStem, images: Tensor) -> Tensor:
    """The same with one pixel's channels normalised at a time."""
    for conv, norm in zip(stem.convs, stem.norms, strict=True):
        images = F.conv2d(images, conv.weight, stride=2, padding=1)
        out = torch.zeros_like(images)
        for row in range(images.shape[2]):
            for column in range(images.shape[3]):
                pixel = images[:, :, row, column]
                mean, variance = pixel.mean(1, keepdim=True), pixel.var(1, correction=0, keepdim=True)
                out[:, :, row, column] = (pixel - mean) / (variance + 1e-6).sqrt() * norm.weight + norm.bias
        images = F.gelu(out)
    return F.conv2d(images, stem.proj.weight, stem.proj.bias).flatten(2).transpose(1, 2)


def test_the_stem_equals_the_reference_in_value_and_gradient() -> None:
    stem = make(stem="conv").patch_embed
    assert isinstance(stem, ConvStem)
    images = noise(2, 1, 16, 24)
    fast, slow = stem(images), reference(stem, images)
    assert fast.shape == (2, 6, 24)
    torch.testing.assert_close(fast, slow)
    for parameter in stem.parameters():
        got, wanted = (torch.autograd.grad(out.square().sum(), parameter, retain_graph=True)[0] for out in (fast, slow))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("patch_size", [8, 16])
def test_the_grid_is_that_of_the_patches(patch_size: int) -> None:
    conv, patch = (make(image_size=64, patch_size=patch_size, stem=stem) for stem in ("conv", "patch"))
    assert len(conv.patch_embed.convs) == {8: 3, 16: 4}[patch_size]
    for size in (64, 96):  # also at another size than it was made for
        assert conv(noise(2, 1, size, size)).shape == patch(noise(2, 1, size, size)).shape
    assert torch.equal(conv.pos_embed, patch.pos_embed)
    conv(noise(2, 1, 64, 64)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in conv.patch_embed.parameters())


def test_a_film_means_the_same_alone_and_in_a_batch() -> None:
    vit, images = make(stem="conv").train(), noise(5, 1, 32, 32)
    torch.testing.assert_close(vit(images)[2:3], vit(images[2:3]))


def test_kept_tokens_know_nothing_of_dropped_patches() -> None:
    vit = make(stem="conv")
    images, keep = noise(1, 1, 32, 32), torch.tensor([[0, 5, 6]])
    other = images.clone()
    other[..., 8:16, 0:8] = 7.0  # patch 4: below patch 0 and left of patch 5
    assert torch.equal(vit(images, keep=keep), vit(other, keep=keep))
    assert not torch.equal(vit(images)[:, [1, 6, 7]], vit(other)[:, [1, 6, 7]])
    seen = other.clone()
    seen[..., 0:8, 0:8] = 7.0  # patch 0
    assert not torch.equal(vit(images, keep=keep), vit(seen, keep=keep))


@pytest.mark.parametrize("method", ["afire", "mae"])
def test_methods_train_on_it(method: str) -> None:
    settings = [f"method={method}", "image.size=32", "encoder.patch_size=8", "encoder.stem=conv"]
    model = make_method(load_config("tiny", overrides=settings)).train()
    images = noise(2, 1, 32, 32)
    model.losses(model(model.views(images, Keys(0, 0, 0, torch.tensor([0, 1]))))).total.backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    stem = [name for name in trained if ".patch_embed." in name or name.startswith("encoder.patch_embed.")]
    assert len(stem) == 3 * 3 + 2
    assert all(model.get_parameter(name).grad is not None for name in trained)
    assert model.restore(images).shape == (2, 16, 64)
    plain = make_method(load_config("tiny", overrides=[*settings[:-1], "encoder.stem=patch"]))
    assert model.flops() > plain.flops()


def test_a_patch_that_cannot_be_halved_to_a_pixel_is_refused() -> None:
    with pytest.raises(UserError, match="stem conv halves films and needs a patch_size such as 8 or 16, not 14"):
        load_config(overrides=["encoder.stem=conv", "encoder.patch_size=14"])


def test_settings_make_it_and_initial_weights_follow_from_the_seed() -> None:
    config = EncoderConfig(width=32, depth=1, heads=2, patch_size=8, stem="conv")
    first, second = (VisionTransformer.from_config(config, ImageConfig(size=32, channels=1)) for _ in range(2))
    for vit in (first, second):
        initialise(vit, torch.Generator().manual_seed(4))
    state = second.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in first.state_dict().items())
    assert first.patch_embed.convs[0].weight.std() > 0

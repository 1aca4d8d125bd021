"""MAE: its loss against a slow reference, its masks, what it restores, and that it learns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afire.config import Config
from afire.errors import UserError
from afire.methods import METHODS, check_overrides, complete, make_method
from afire.methods.base import Keys
from afire.methods.mae import MAE, masked_loss
from afire.settings import load_config


def config(*overrides: str) -> Config:
    return load_config("tiny", overrides=["method=mae", "image.size=32", "encoder.patch_size=8", *overrides])


def films(count: int = 4, seed: int = 0, size: int = 32) -> Tensor:
    coarse = torch.rand(count, 1, 5, 5, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)


def keys(rows: list[int], epoch: int = 0, seed: int = 0) -> Keys:
    return Keys(seed, epoch, 0, torch.tensor(rows))


@pytest.mark.parametrize("normalised", [True, False])
def test_the_loss_equals_the_reference_in_value_and_gradient(normalised: bool) -> None:
    model = MAE(config(f"options.normalise_patches={normalised}")).train()
    images = films()
    views = model.views(images, keys([3, 1, 4, 1]))
    outputs = model(views)
    loss = model.losses(outputs).total
    pixels = (images - images.mean((1, 2, 3), keepdim=True)) / images.std((1, 2, 3), correction=0, keepdim=True)
    terms = []
    for film in range(4):
        for place in range(16):
            if place in views["kept"][film].tolist():
                continue
            row, column = divmod(place, 4)
            target = pixels[film, 0, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].flatten()
            if normalised:
                target = (target - target.mean()) / (target.var() + 1e-6).sqrt()
            terms += [(outputs["drawn"][film, place] - target).square().mean()]
    expected = torch.stack(terms).mean()
    torch.testing.assert_close(loss, expected)
    parameter = model.encoder.blocks[0].mlp.fc1.weight
    fast, slow = (torch.autograd.grad(value, parameter, retain_graph=True)[0] for value in (loss, expected))
    torch.testing.assert_close(fast, slow)


def test_masks_follow_from_film_and_epoch_alone() -> None:
    model = MAE(config("options.mask_ratio=0.75"))
    images = films()
    kept = model.views(images, keys([5, 6, 7, 5]))["kept"]
    assert kept.shape == (4, 4) and torch.equal(kept[0], kept[3]) and not torch.equal(kept[0], kept[1])
    assert all(len(set(row.tolist())) == 4 and sorted(row.tolist()) == row.tolist() for row in kept)
    assert torch.equal(model.views(images[1:], keys([6, 7, 5]))["kept"], kept[1:])
    assert not torch.equal(model.views(images, keys([5, 6, 7, 5], epoch=1))["kept"], kept)
    many = torch.cat([model.views(images, keys([0, 1, 2, 3], epoch))["kept"].flatten() for epoch in range(250)])
    share = torch.bincount(many, minlength=16) / len(many)
    assert (share - 1 / 16).abs().max() < 0.01  # every place is kept equally often


def test_the_encoder_sees_the_kept_patches_only() -> None:
    model = MAE(config()).eval()
    images = films()
    views = model.views(images, keys([0, 1, 2, 3]))
    drawn = model(views)["drawn"]
    sizes: list[int] = []
    handle = model.encoder.blocks[0].register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[1]))
    model(views)
    handle.remove()
    assert sizes == [1 + 4]
    assert drawn.shape == (4, 16, 64)


def test_dropped_pixels_change_nothing() -> None:
    model = MAE(config("image.normalise=none")).eval()
    images = films()
    kept = torch.tensor([[0, 5, 10, 15]]).expand(4, -1)
    hidden = torch.ones(4, 16).scatter(1, kept, 0.0).bool()
    patches = model.patches(images)
    patches[hidden] = torch.rand(int(hidden.sum()), 64, generator=torch.Generator().manual_seed(0))
    other = model.picture(patches, images)
    assert not torch.equal(other, images)
    torch.testing.assert_close(model._draw(images, kept), model._draw(other, kept))


def test_restoring_with_and_without_a_mask() -> None:
    model = MAE(config("options.normalise_patches=false")).eval()
    images = films()
    hidden = torch.zeros(4, 16, dtype=torch.bool)
    hidden[:, ::3] = True
    restored = model.restore(images, hidden)
    assert restored.shape == model.patches(images).shape == (4, 16, 64)
    kept = (~hidden[0]).nonzero()[:, 0].expand(4, -1)
    drawn_hidden = model._draw(model.normalise(images), kept)
    torch.testing.assert_close(restored, torch.where(hidden[..., None], drawn_hidden, model.patches(images)))
    everywhere = model.restore(images)
    quarters = [
        [place for place in range(16) if (place // 4 % 2, place % 2) == corner]
        for corner in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    for place in (0, 6, 15):
        drawn = [
            model._draw(model.normalise(images), torch.tensor(quarter).expand(4, -1))[:, place]
            for quarter in quarters
            if place not in quarter
        ]
        assert len(drawn) == 3
        torch.testing.assert_close(everywhere[:, place], torch.stack(drawn).mean(0))
    uneven = hidden.clone()
    uneven[0, 1], uneven[1], uneven[2] = True, False, True  # the last sees no token at all
    together = model.restore(images, uneven)
    for film in range(4):  # each as if it were alone
        one = slice(film, film + 1)
        torch.testing.assert_close(together[one], model.restore(images[one], uneven[one]))
    assert model.restore(films(size=64)).shape == (4, 64, 64)  # another size


def test_bad_settings_are_messages() -> None:
    for override, message in (
        ("options.mask_ratio=0.99", "leaves 0 of 16 patches"),
        ("options.mask_ratio=2", "mask_ratio"),
        ("options.masks=1", "unknown setting masks; did you mean mask_ratio"),
        ("decoder.mask_token=false", "needs decoder.mask_token=true"),
    ):
        with pytest.raises(UserError, match=message):
            make_method(config(override))
    with pytest.raises(UserError, match="does not read losses"):
        check_overrides("mae", ["losses.temperature=0.3"])
    with pytest.raises(UserError, match=r"no method 'mea'; did you mean mae\?"):
        make_method(load_config("tiny", overrides=["method=mea"]))
    assert complete(config(), MAE).options == {"mask_ratio": 0.75, "normalise_patches": True}
    assert set(METHODS) >= {"afire", "mae"}


def test_sixty_steps_lower_the_loss_and_health_says_so() -> None:
    model = MAE(config("options.normalise_patches=false", "options.mask_ratio=0.5", "decoder.width=64")).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    across, share = torch.linspace(0, 1, 32), torch.linspace(0, 1, 16)[:, None, None, None]
    images = share * across + (1 - share) * across[:, None]  # what is dropped follows from what is kept
    losses = []
    before = model.health(model.views(images, keys(list(range(16)))), {"restoration": 1.0})
    for step in range(60):
        loss = model.losses(model(model.views(images, keys(list(range(16)), epoch=step)))).total
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
    after = model.health(model.views(images, keys(list(range(16)))), {"restoration": losses[-1]})
    assert after.numbers["explained"] > before.numbers["explained"] and after.colour == "green"


def test_only_dropped_patches_count() -> None:
    drawn, target = torch.rand(2, 3, 4), torch.rand(2, 3, 4)
    dropped = torch.tensor([[1.0, 0, 1], [0, 1, 1]])
    expected = (drawn - target).square().mean(-1)[dropped.bool()].mean()
    torch.testing.assert_close(masked_loss(drawn, target, dropped), expected)


def test_every_parameter_has_a_gradient_and_flops_are_counted() -> None:
    model = MAE(config("encoder.drop_path=0.2")).train()
    model.losses(model(model.views(films(), keys([0, 1, 2, 3])))).total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    whole, half = (MAE(config(f"options.mask_ratio={ratio}")).flops() for ratio in (0.25, 0.75))
    assert whole > 1.2 * half > 0
    assert make_method(load_config("tiny")).flops() > 0

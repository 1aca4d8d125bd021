"""Models Genesis: its loss against a slow reference, and that it learns to restore."""

from __future__ import annotations

import pytest
import torch

from afire.errors import UserError
from afire.methods import check_overrides
from afire.methods.genesis import Genesis
from tests.methods.test_restoring import film_model, films, keys

EASY = ("options.paint=0.5", "options.inpaint=1", "options.nonlinear=0", "encoder.depth=2")
"""What a tiny network can undo in a hundred steps."""


def test_the_loss_equals_the_reference_in_value_and_gradient() -> None:
    model, images = film_model("genesis").train(), films()
    views = model.views(images, keys())
    outputs = model(views)
    loss = model.losses(outputs).total
    pixels = (images - images.mean((1, 2, 3), keepdim=True)) / images.std((1, 2, 3), correction=0, keepdim=True)
    errors = []
    for film in range(4):
        for place in range(16):
            row, column = divmod(place, 4)
            target = pixels[film, 0, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].flatten()
            errors.append((outputs["drawn"][film, place] - target).square().mean())
    expected = torch.stack(errors).mean()
    torch.testing.assert_close(loss, expected)
    parameter = model.encoder.blocks[0].mlp.fc1.weight
    fast, slow = (torch.autograd.grad(value, parameter, retain_graph=True)[0] for value in (loss, expected))
    torch.testing.assert_close(fast, slow)


def test_the_encoder_sees_the_spoilt_film_and_the_target_is_the_film() -> None:
    model, images = film_model("genesis").eval(), films()
    views = model.views(images, keys())
    assert not torch.allclose(views["spoilt"], images) and views["painted"].any()
    torch.testing.assert_close(model(views)["target"], model.patches(images))
    torch.testing.assert_close(model(views)["drawn"], model.restore(views["spoilt"]))


def test_it_learns_to_restore_and_health_says_so() -> None:
    model = film_model("genesis", "decoder.width=32", "encoder.width=32", *EASY).train()
    assert isinstance(model, Genesis)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images = films(16)
    before = model.health(model.views(images, keys(16)), {"restoration": 1.0})
    for step in range(120):
        loss = model.losses(model(model.views(images, keys(16, step)))).total
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    after = model.health(model.views(images, keys(16, 100)), {"restoration": loss.item()})
    assert before.colour == "amber" and before.reason.startswith("the decoder draws the same film every time")
    assert after.numbers["explained"] > before.numbers["explained"] + 0.1 and after.colour == "green", after


def test_bad_settings_are_messages() -> None:
    with pytest.raises(UserError, match="paint"):
        film_model("genesis", "options.paint=2")
    with pytest.raises(UserError, match="unknown setting painted; did you mean paint"):
        film_model("genesis", "options.painted=1")
    with pytest.raises(UserError, match="does not read losses"):
        check_overrides("genesis", ["losses.temperature=0.3"])

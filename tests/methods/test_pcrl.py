"""PCRL: contrastive and preservational losses against slow references, transformations, and what it draws."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from afire.methods.pcrl import PCRL, drawn_transformations, transformed
from afire.nn.vit import patchify
from tests.methods.test_restoring import film_model, films, keys


def made(*overrides: str) -> PCRL:
    model = film_model("pcrl", *overrides)
    assert isinstance(model, PCRL)
    return model


def test_transformations_are_mirrors_and_quarters() -> None:
    images = torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    told = torch.tensor([[0.0, 0, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0], [1, 1, 0, 0, 0, 1]])
    made_of = transformed(images, told)
    assert torch.equal(made_of[0], images[0]) and torch.equal(made_of[1], images[1].flip(-2))
    assert torch.equal(made_of[2], torch.rot90(images[2].flip(-1), 1, (-2, -1)))
    assert torch.equal(made_of[3], torch.rot90(images[3].flip(-2).flip(-1), 3, (-2, -1)))
    draws = torch.randint(0, 1 << 24, (4000, 16), generator=torch.Generator().manual_seed(1))
    drawn = drawn_transformations(draws)
    assert drawn.shape == (4000, 6) and (drawn[:, 2:].sum(dim=1) == 1).all()
    torch.testing.assert_close(drawn.mean(dim=0), torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]), atol=0.03, rtol=0)


def test_the_losses_equal_their_references_in_value_and_gradient() -> None:
    model = made("options.preservational=3", "options.contrastive=2").train()
    past = F.normalize(torch.randn(5, 8, generator=torch.Generator().manual_seed(1)), dim=1)
    model.queue.push(past, torch.tensor([1, 50, 51, 52, 53]))
    views = model.views(films(), keys())
    outputs = model(views)
    losses = model.losses(outputs)
    contrast, errors, mixes = [], [], []
    for film in range(4):
        query = outputs["query"][film]
        others = [key for key, owner in zip(past, (1, 50, 51, 52, 53), strict=True) if owner != film]
        terms = torch.stack([query @ outputs["key"][film], *(query @ key for key in others)]).div(0.2).exp()
        contrast.append(-(terms[0] / terms.sum()).log())
        one = slice(film, film + 1)
        share = views["share"][film]
        assert 0.5 <= share <= 1
        tokens = model.student.encoder(model.normalise(views["query"][one]))[:, 1:]
        of_key = model.teacher.encoder(model.normalise(views["key"][one]))[:, 1:].detach()
        told, told_of_key = (model.attention(views[name][one]) for name in ("query_told", "key_told"))
        targets = [
            patchify(transformed(model.normalise(views[name][one]), views[f"{name}_told"][one]), 8)
            for name in ("query", "key")
        ]
        errors.append((model.decoder(tokens * told) - targets[0]).square().mean())
        mix = model.decoder(share * tokens * told + (1 - share) * of_key * told_of_key)
        mixes.append((mix - (share * targets[0] + (1 - share) * targets[1])).square().mean())
    slow = 2 * torch.stack(contrast).mean() + 3 * (torch.stack(errors).mean() + torch.stack(mixes).mean()) / 2
    torch.testing.assert_close(losses.total, slow)
    for parameter in (model.student.encoder.blocks[0].mlp.fc1.weight, model.attention.mlp[0].weight):
        first, second = (torch.autograd.grad(value, parameter, retain_graph=True)[0] for value in (losses.total, slow))
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


def test_restoring_is_drawing_as_it_is() -> None:
    model, images = made().eval(), films()
    as_it_is = torch.tensor([[0.0, 0, 1, 0, 0, 0]])
    tokens = model.student.encoder(model.normalise(images))[:, 1:]
    torch.testing.assert_close(model.restore(images), model.decoder(tokens * model.attention(as_it_is)))


def test_health_tells_of_a_decoder_that_ignores_what_is_asked() -> None:
    model = made()
    numbers = model.look(model.views(films(8), keys(8)))
    colour, holds, reason = model.more_rules({**numbers, "explained": 0.5, "heeds": -0.1})[-1]
    assert colour == "amber" and holds and "the decoder ignores it" in reason
    assert not model.more_rules({**numbers, "heeds": 0.2})[-1][1]
    health = model.health(model.views(films(8), keys(8)), {"contrast": 1.0})
    assert "of what tells views apart drawn" in health.shown

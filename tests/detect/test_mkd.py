"""MKD: its losses against slow references, the balance of the two, and a cloner that learns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afire.config import Config
from afire.detect.fit import detect_settings
from afire.detect.mkd import MKD, SourceAndCloner, direction_errors, place_directions, value_errors
from afire.errors import UserError
from afire.methods.base import Keys
from afire.settings import load_config

TRUNK = ["image.size=32", "encoder.width=16", "encoder.depth=3", "encoder.heads=2", "encoder.patch_size=8"]


def config(*settings: str, trunk: tuple[str, ...] = ()) -> Config:
    networks = load_config("tiny", overrides=[*TRUNK, *trunk])
    return MKD.config_of(networks, detect_settings(settings, "mkd"))


def tokens(seed: int) -> Tensor:
    """(B, P, L, D)"""
    return torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def films(count: int = 8) -> Tensor:
    smooth = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(smooth, size=(32, 32), mode="bilinear")


def slow_losses(source: Tensor, cloned: Tensor) -> tuple[Tensor, Tensor]:
    """Value and direction, layer by layer and film by film, as the paper writes them."""
    value, direction = torch.zeros(()).double(), torch.zeros(()).double()
    for film_source, film_cloned in zip(source, cloned, strict=True):
        for layer_source, layer_cloned in zip(film_source, film_cloned, strict=True):
            a, b = layer_source.reshape(-1), layer_cloned.reshape(-1)
            value = value + sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a)
            direction = direction + 1 - (a @ b) / (a.norm() * b.norm())
    return value / len(source), direction / len(source)


def test_losses_and_gradients_are_the_papers() -> None:
    source, cloned = tokens(0), tokens(1).requires_grad_()
    mkd = SourceAndCloner(config("mkd.direction=0.7"))
    found = mkd.losses({"source": source, "cloned": cloned})
    value, direction = slow_losses(source, cloned)
    torch.testing.assert_close(found["value"], value)
    torch.testing.assert_close(found["direction"], direction)
    expected = torch.autograd.grad(value + 0.7 * direction, cloned)[0]
    torch.testing.assert_close(torch.autograd.grad(found.total, cloned)[0], expected, rtol=1e-6, atol=1e-9)


def test_places_are_compared_by_themselves() -> None:
    source, cloned = tokens(0), tokens(1)
    values, directions = value_errors(source, cloned), place_directions(source, cloned)
    for film in range(3):
        for place in range(4):
            one = (source[film : film + 1, :, place : place + 1], cloned[film : film + 1, :, place : place + 1])
            value, direction = slow_losses(*one)
            torch.testing.assert_close(values[film, place], value)
            torch.testing.assert_close(directions[film, place], direction)


def test_a_perfect_clone_has_no_error_whatever_its_length() -> None:
    source = tokens(0)
    assert value_errors(source, source).abs().max() == 0 and direction_errors(source, source).abs().max() < 1e-12
    assert value_errors(source, 2 * source).min() > 0 and direction_errors(source, 2 * source).abs().max() < 1e-12


def test_both_losses_weigh_the_same_at_first_unless_said_otherwise() -> None:
    mkd = SourceAndCloner(config())
    mkd.prepare(0, lambda: ((films(8)[part], torch.arange(8)[part]) for part in (slice(0, 5), slice(5, 8))))
    with torch.no_grad():
        losses = mkd.losses(mkd({"images": films(8)}))
    torch.testing.assert_close(losses["value"], mkd.weight * losses["direction"], rtol=1e-5, atol=0)
    before = mkd.weight.clone()
    mkd.prepare(1, lambda: iter([(films(2), torch.arange(2))]))
    assert torch.equal(mkd.weight, before), "measured once"
    given = SourceAndCloner(config("mkd.direction=0.25"))
    given.prepare(0, lambda: iter([(films(2), torch.arange(2))]))
    assert given.weight == 0.25


def test_the_cloner_learns_and_the_source_does_not_move() -> None:
    mkd = SourceAndCloner(config()).train()
    source = {name: value.clone() for name, value in mkd.trunk.state_dict().items()}
    optimiser = torch.optim.Adam([weight for _, weight in mkd.parameters_of("all")], lr=5e-3)
    totals = []
    for step in range(40):
        losses = mkd.losses(mkd(mkd.views(films(), Keys(0, step, step, torch.arange(8)))))
        optimiser.zero_grad()
        losses.total.backward()
        optimiser.step()
        totals.append(losses.total.item())
    assert totals[-1] < 0.3 * totals[0]
    assert all(torch.equal(source[name], value) for name, value in mkd.trunk.state_dict().items())
    assert all(name.startswith("cloner.") for name, _ in mkd.parameters_of("all"))


def test_the_standard_is_that_of_the_films_and_nothing_is_made_of_noise() -> None:
    mkd = SourceAndCloner(config())
    with torch.no_grad():  # one number of every token hardly differs, another is huge
        mkd.trunk.blocks[0].mlp.fc2.weight[3] = 0
        mkd.trunk.blocks[0].mlp.fc2.bias[4] = 500
    mkd.prepare(0, lambda: ((films(8)[part], torch.arange(8)[part]) for part in (slice(0, 5), slice(5, 8))))
    tokens_BPLD = mkd.tokens(films(8))
    flat = tokens_BPLD.transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(flat.mean(dim=1), torch.zeros(3, 16), atol=1e-3, rtol=0)
    assert (flat.std(dim=1) < 1.01).all() and flat.std(dim=1).median() > 0.99
    mkd.prepare(1, lambda: iter([(films(2), torch.arange(2))]))
    assert torch.equal(mkd.tokens(films(8)), tokens_BPLD), "measured once"


@pytest.mark.parametrize(
    ("width", "heads", "share", "expected"), [(192, 3, 0.5, 96), (60, 5, 0.5, 40), (16, 2, 0.1, 4)]
)
def test_the_cloner_is_narrower_by_whole_heads(width: int, heads: int, share: float, expected: int) -> None:
    trunk = (f"encoder.width={width}", f"encoder.heads={heads}")
    mkd = SourceAndCloner(config(f"mkd.width={share}", trunk=trunk))
    assert mkd.cloner.encoder.width == expected and expected % heads == 0
    source, cloner = (sum(weight.numel() for weight in part.parameters()) for part in (mkd.trunk, mkd.cloner.encoder))
    assert cloner < source and mkd({"images": films(2)})["cloned"].shape == (2, 3, 16, width)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mkd.width=0", "greater than 0"),
        ("mkd.direction=-1", "greater than or equal to 0"),
        ("mkd.lambda=1", "unknown setting mkd.lambda"),
    ],
)
def test_hostile_settings_are_one_message(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(setting)

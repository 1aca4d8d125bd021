"""MemAE: its memory, shrinkage and losses against slow references, in value and gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from afire.config import Config
from afire.detect.memae import MemoryAutoencoder, PatternMemory, entropy_of, shrunken
from afire.methods.base import Keys


def slow_weights(query: Tensor, items: Tensor, temperature: float, limit: float) -> list[Tensor]:
    """The definition, item by item: softmax of cosines, small weights dropped, the others adding up to one."""
    cosines = [(query @ item) / (query.norm() * item.norm()) / temperature for item in items]
    total = sum(cosine.exp() for cosine in cosines)
    weights = [cosine.exp() / total for cosine in cosines]
    kept = [weight if weight.item() > limit else weight * 0 for weight in weights]
    if not any(weight.item() > limit for weight in weights):
        return weights
    return [weight / sum(kept) for weight in kept]


@pytest.mark.parametrize(("shrink", "temperature"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.1), (3.0, 0.5), (6.5, 1.0)])
def test_the_memory_is_the_slow_one(shrink: float, temperature: float) -> None:
    memory = PatternMemory(7, 5, shrink, temperature).double()
    memory.initialise(torch.Generator().manual_seed(1))
    queries = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    mixes, weights = memory(queries)
    slow = torch.stack(
        [
            torch.stack(
                [
                    sum(
                        w * item
                        for w, item in zip(
                            slow_weights(q, memory.items, temperature, shrink / 7), memory.items, strict=True
                        )
                    )
                    for q in film
                ]
            )
            for film in queries
        ]
    )
    torch.testing.assert_close(mixes, slow)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 3, dtype=torch.float64))
    pull = torch.randn(mixes.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((each * pull).sum(), [queries, memory.items]) for each in (mixes, slow))
    for first, second in zip(ours, theirs, strict=True):
        torch.testing.assert_close(first, second)


def test_small_weights_are_nothing_and_where_all_are_small_all_stay() -> None:
    weights = torch.tensor([[0.6, 0.3, 0.1], [0.34, 0.33, 0.33]])
    torch.testing.assert_close(shrunken(weights, 0.2)[0], torch.tensor([2 / 3, 1 / 3, 0.0]))
    torch.testing.assert_close(shrunken(weights, 0.5)[1], weights[1])


def test_entropy_by_hand() -> None:
    weights = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    assert float(entropy_of(weights)) == pytest.approx(math.log(2) / 2, rel=1e-6)


def test_the_losses_are_the_mean_error_and_the_weighted_entropy() -> None:
    config = Config(image={"size": 32}, options={"width": 4, "items": 6, "entropy": 0.5})  # type: ignore[arg-type]
    model = MemoryAutoencoder(config)
    images = torch.rand(3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    outputs = model(model.views(images, Keys(0, 0, 0, torch.arange(3))))
    losses = model.losses(outputs)
    errors = [
        (float(outputs["drawn"][film, 0, row, column]) - (2 * float(images[film, 0, row, column]) - 1)) ** 2
        for film in range(3)
        for row in range(32)
        for column in range(32)
    ]
    assert float(losses["error"]) == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    assert float(losses.total) == pytest.approx(float(losses["error"]) + 0.5 * float(losses["entropy"]), rel=1e-6)


def test_a_low_temperature_lets_few_items_answer() -> None:
    """As printed, at temperature 1, no item can weigh more than e^2 times another."""
    queries = torch.randn(50, 8, generator=torch.Generator().manual_seed(4))
    largest = []
    for temperature in (1.0, 0.1):
        memory = PatternMemory(100, 8, 0.0, temperature)
        memory.initialise(torch.Generator().manual_seed(5))
        weights = memory(queries)[1]
        largest.append(float(weights.max()))
        if temperature == 1.0:
            assert float((weights.max(dim=1).values / weights.min(dim=1).values).max()) <= math.e**2 + 1e-4
    assert largest[0] < 0.05 < 0.3 < largest[1]

"""Sinkhorn's marginals and stability, and prototypes that move as their momentum says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afire.methods.afire import PrototypeBank
from afire.methods.equations import position_mean, sinkhorn


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def update(bank: PrototypeBank, mean: Tensor) -> Tensor:
    """A step of the bank; the prototypes it leaves."""
    before, moved = bank.prototypes.clone(), bank.moved(mean)
    assert torch.equal(bank.prototypes, before)  # nothing is stored yet
    bank.store(moved)
    return bank.prototypes


def reference(logits: Tensor, temperature: float, iterations: int) -> Tensor:
    """Sinkhorn-Knopp as the books have it, in log space and float64."""
    log_p = logits.double() / temperature
    for _ in range(iterations):
        log_p = log_p - torch.logsumexp(log_p, dim=0, keepdim=True)  # each cluster the same mass
        log_p = log_p - torch.logsumexp(log_p, dim=1, keepdim=True)  # each token a probability
    return log_p.exp()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(2, 12), st.integers(0, 99), st.sampled_from([0.04, 0.07, 1.0]), st.integers(1, 5)
)
def test_equals_the_slow_reference(N: int, K: int, seed: int, temperature: float, iterations: int) -> None:
    logits = draw(N, K, seed=seed, scale=0.3)
    expected = reference(logits, temperature, iterations).float()
    torch.testing.assert_close(sinkhorn(logits, temperature, iterations), expected, rtol=1e-3, atol=1e-6)


def test_marginals() -> None:
    logits = draw(600, 8) + torch.linspace(0, 2, 8)  # some clusters much more likely than others
    unbalanced = torch.softmax(logits / 0.5, dim=1).sum(0)
    balanced = sinkhorn(logits, 0.5, 3)
    torch.testing.assert_close(balanced.sum(1), torch.ones(600))
    assert unbalanced.max() / unbalanced.min() > 10
    torch.testing.assert_close(
        balanced.sum(0), torch.full((8,), 75.0), rtol=0.06, atol=0
    )  # three iterations come close
    torch.testing.assert_close(sinkhorn(logits, 0.5, 100).sum(0), torch.full((8,), 75.0), rtol=1e-4, atol=0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(2, 9), st.integers(0, 99), st.floats(0, 1e4), st.integers(1, 40))
def test_rows_sum_to_one_whatever_the_logits(N: int, K: int, seed: int, scale: float, iterations: int) -> None:
    probs = sinkhorn(draw(N, K, seed=seed, scale=scale), 0.05, iterations)
    assert torch.isfinite(probs).all() and (probs >= 0).all()
    torch.testing.assert_close(probs.sum(1), torch.ones(N), rtol=1e-4, atol=1e-4)


def test_a_cluster_out_of_reach_and_equal_logits() -> None:
    logits = torch.zeros(50, 3)
    torch.testing.assert_close(sinkhorn(logits, 0.05, 3), torch.full((50, 3), 1 / 3))
    logits[:, 0] = -1e6  # every token shuns it alike: balancing brings it back
    torch.testing.assert_close(sinkhorn(logits, 0.05, 3), torch.full((50, 3), 1 / 3))
    logits[0, 0] = 0  # now one token alone can take it
    probs = sinkhorn(logits, 0.05, 50)
    assert torch.isfinite(probs).all()
    torch.testing.assert_close(probs[0], torch.tensor([1.0, 0.0, 0.0]))


def test_gives_float32_from_bfloat16_and_leaves_its_input_alone() -> None:
    logits = draw(20, 4).bfloat16()
    before = logits.clone()
    with torch.autocast("cpu", torch.bfloat16):
        probs = sinkhorn(logits.requires_grad_(), 0.05, 3)
    assert probs.dtype == torch.float32 and not probs.requires_grad
    assert torch.equal(logits, before)
    with pytest.raises(ValueError, match="at least one iteration"):
        sinkhorn(logits, 0.05, 0)


def test_float32_input_is_not_overwritten() -> None:
    logits = draw(20, 4)
    before = logits.clone()
    sinkhorn(logits, 1.0, 3)
    assert torch.equal(logits, before)


def test_prototypes_move_as_the_momentum_says() -> None:
    bank = PrototypeBank(6, 5, momentum=0.75)
    torch.testing.assert_close(bank.prototypes.sum(1), torch.ones(6))
    means = [position_mean(torch.softmax(draw(4, 6, 5, seed=seed), -1)) for seed in range(3)]
    expected = means[0]
    torch.testing.assert_close(update(bank, means[0]), expected, rtol=0, atol=0)
    for mean in means[1:]:
        expected = 0.75 * expected + 0.25 * mean
        torch.testing.assert_close(update(bank, mean), expected)
    assert bank.steps == 3


def test_rows_sum_to_one_after_many_steps() -> None:
    bank = PrototypeBank(3, 7, momentum=0.75)
    for seed in range(500):
        update(bank, sinkhorn(draw(3, 7, seed=seed), 0.1, 3))
    torch.testing.assert_close(bank.prototypes.sum(1), torch.ones(3), rtol=0, atol=1e-5)


def test_saved_and_restored_with_its_count() -> None:
    bank, other = PrototypeBank(3, 4, momentum=0.75), PrototypeBank(3, 4, momentum=0.75)
    update(bank, torch.softmax(draw(3, 4), -1))
    other.load_state_dict(bank.state_dict())
    mean = torch.softmax(draw(3, 4, seed=1), -1)
    assert torch.equal(update(bank, mean), update(other, mean))
    assert not list(bank.parameters())

"""The numbers behind lesions: splitmix64 as published, uniform, and fixed by their key alone."""

from __future__ import annotations

import pytest
import torch

from afire.lesions.places import DRAW_BITS, Draw, below, drawn, keyed, nth_of_stream, unit

# First numbers of splitmix64 from the state 1234567, as published with the algorithm.
PUBLISHED = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)


def test_splitmix64_as_published() -> None:
    numbers = nth_of_stream(torch.tensor(1234567), torch.arange(5))
    assert tuple(number % 2**64 for number in numbers.tolist()) == PUBLISHED


def test_keyed_draws_are_uniform_in_every_column() -> None:
    draws = keyed(seed=3, epoch=5, indices=range(4000), views=2, slots=2)
    assert draws.shape == (4000, 2, 2, len(Draw))
    assert draws.min() >= 0 and draws.max() < 1 << DRAW_BITS
    columns = draws.flatten(0, 2)
    for column in columns.T:
        counts = torch.bincount(column >> (DRAW_BITS - 4), minlength=16).double()
        chi_square = ((counts - 1000) ** 2 / 1000).sum()
        assert chi_square < 44  # 15 degrees of freedom: exceeded once in 10,000
    correlation = torch.corrcoef(unit(columns).double().T) - torch.eye(len(Draw))
    assert correlation.abs().max() < 0.04


def test_neighbouring_keys_have_nothing_in_common() -> None:
    base = unit(keyed(1, 1, range(2000), 1, 1)).double().flatten()
    for other in (keyed(2, 1, range(2000), 1, 1), keyed(1, 2, range(2000), 1, 1), keyed(1, 1, range(1, 2001), 1, 1)):
        pair = torch.stack([base, unit(other).double().flatten()])
        assert torch.corrcoef(pair)[0, 1].abs() < 0.03


def test_a_draw_depends_on_its_key_only() -> None:
    many = keyed(7, 2, [4, 9, 1], views=3, slots=4)
    assert torch.equal(keyed(7, 2, [9], views=1, slots=2)[0, 0], many[1, 0, :2])
    assert torch.equal(keyed(7, 2, torch.tensor([1, 4]), views=3, slots=4), many[[2, 0]])


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, 2**70])
def test_any_seed_is_allowed(seed: int) -> None:
    assert keyed(seed, 0, [0], 1, 1).shape == (1, 1, 1, len(Draw))


def test_generator_draws_repeat() -> None:
    first = drawn((2, 1, 4), torch.Generator().manual_seed(1))
    assert torch.equal(first, drawn((2, 1, 4), torch.Generator().manual_seed(1)))
    assert not torch.equal(first, drawn((2, 1, 4), torch.Generator().manual_seed(2)))


def test_below_reaches_every_number_and_none_beyond() -> None:
    every = torch.arange(0, 1 << DRAW_BITS, 1 << 10)
    assert below(every, 5).unique().tolist() == [0, 1, 2, 3, 4]
    assert below(torch.tensor((1 << DRAW_BITS) - 1), 4096 * 4096) == 4096 * 4096 - 1
    assert below(torch.tensor(12345), 0) == 0

"""Maps finer than tokens: the loss against a slow reference, whose cell is whose, and what is measured of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afire.errors import UserError
from afire.methods.dense import cell_side, cells_of, dense_loss, highest_of_tokens, order, overlap


def slow_loss(logits: Tensor, target: Tensor, positive: float) -> Tensor:
    terms = []
    for logit, share in zip(logits.flatten(), target.flatten(), strict=True):
        p = 1 / (1 + torch.exp(-logit))
        terms.append(-(positive * share * torch.log(p) + (1 - share) * torch.log(1 - p)))
    return torch.stack(terms).mean()


@pytest.mark.parametrize("positive", [1.0, 5.0])
def test_the_dense_loss_equals_the_reference_in_value_and_gradient(positive: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 2, 2, generator=generator, dtype=torch.float64).requires_grad_()
    target = torch.rand(2, 3, 2, 2, generator=generator).round(decimals=1)
    fast, slow = dense_loss(logits, target, positive=positive), slow_loss(logits, target.double(), positive)
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(torch.autograd.grad(fast, logits), torch.autograd.grad(slow, logits))


def test_the_dense_loss_in_bfloat16_is_summed_in_float32() -> None:
    loss = dense_loss(torch.zeros(8, 1, 64, 64, dtype=torch.bfloat16), torch.zeros(8, 1, 64, 64))
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(0.693147, abs=1e-6)


def test_each_token_speaks_of_its_own_cells() -> None:
    values = torch.arange(1 * 6 * 3 * 4).view(1, 6, 12)
    maps = cells_of(values, (2, 3), 2)
    assert maps.shape == (1, 3, 4, 6)
    for token in range(6):
        row, column = divmod(token, 3)
        for kind in range(3):
            cells = maps[0, kind, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert cells.flatten().tolist() == values[0, token, 4 * kind : 4 * kind + 4].tolist()


def test_the_highest_cell_of_each_token() -> None:
    values = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(0))
    highest = highest_of_tokens(cells_of(values, (2, 3), 3), 3)
    torch.testing.assert_close(highest, values.amax(dim=2), atol=0, rtol=0)


def test_cells_fill_a_patch() -> None:
    assert cell_side(16, 4, "some.finer") == 4
    with pytest.raises(UserError, match=r"a patch of 16 px cannot be split into 3 x 3 cells; choose some\.finer among"):
        cell_side(16, 3, "some.finer")


def test_overlap_and_order_of_known_maps() -> None:
    target = torch.zeros(1, 3, 4, 4)
    target[0, 0, :2], target[0, 1, 0, 0] = 1, 1
    logits = torch.full_like(target, -1.0)
    logits[0, 0, :1] = 1  # half of the first part, none of the second; the third is not there
    assert overlap(logits, target) == pytest.approx((2 * 4 / (4 + 8) + 0) / 2)
    assert overlap(logits[:, 2:], target[:, 2:]) == 0
    truth = torch.tensor([0.0, 0.0, 0.2, 1.0, 0.9])
    assert order(torch.tensor([0.0, 2.0, 9.0, 1.0, 3.0]), truth) == pytest.approx(3 / 4)
    assert order(torch.ones(5), truth) == 0.5 and order(torch.ones(2), torch.zeros(2)) == 0.5

"""Token labels against a loop over patches."""

from __future__ import annotations

import pytest
import torch

from afire.lesions.synthesis import token_labels


def slow_labels(mask: torch.Tensor, patch: int) -> list[bool]:
    whole = mask.double().mean()
    rows, columns = mask.shape[0] // patch, mask.shape[1] // patch
    return [
        bool(mask[y * patch : (y + 1) * patch, x * patch : (x + 1) * patch].double().mean() > whole)
        for y in range(rows)
        for x in range(columns)
    ]


@pytest.mark.parametrize(("height", "width", "patch"), [(32, 32, 8), (24, 48, 8), (16, 16, 16), (30, 20, 10)])
def test_equal_the_loop(height: int, width: int, patch: int) -> None:
    masks = torch.rand(4, 1, height, width, generator=torch.Generator().manual_seed(0))
    labels = token_labels(masks, patch)
    assert labels.dtype == torch.bool
    assert labels.tolist() == [slow_labels(mask[0], patch) for mask in masks]


def test_rows_first() -> None:
    mask = torch.zeros(1, 1, 4, 6)
    mask[0, 0, 0:2, 4:6] = 1
    assert token_labels(mask, 2).tolist() == [[False, False, True, False, False, False]]


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 0.7, 1.0])
def test_a_mask_of_one_value_has_no_abnormal_token(value: float) -> None:
    assert not token_labels(torch.full((2, 1, 224, 224), value), 16).any()


def test_half_precision_is_averaged_in_full() -> None:
    mask = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(token_labels(mask, 8), token_labels(mask.float(), 8))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="not a multiple of patch_size 16"):
        token_labels(torch.zeros(1, 1, 30, 32), 16)
    with pytest.raises(ValueError, match=r"\(B, 1, H, W\)"):
        token_labels(torch.zeros(1, 3, 32, 32), 16)

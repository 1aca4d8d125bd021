"""Token Gaussians against scikit-learn, one position at a time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf
from torch import Tensor

from afire.detect.maps import TokenGaussian
from afire.errors import UserError


def seen(tokens: Tensor) -> SimpleNamespace:
    """As much of the evidence as the map reads."""
    return SimpleNamespace(tokens=tokens)


def fitted(batches: Sequence[Tensor]) -> TokenGaussian:
    gaussian = TokenGaussian()
    gaussian.fit(lambda what: map(seen, batches))  # type: ignore[arg-type, return-value]
    return gaussian


@pytest.mark.parametrize("films", [6, 200])
def test_like_ledoit_wolf(films: int) -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(3, 8, 8, generator=generator)
    tokens = torch.einsum("nld,lde->nle", torch.randn(films, 3, 8, generator=generator), mixing) + 50
    gaussian = fitted(tokens.split(4))  # in batches, far from zero
    distances = gaussian(seen(tokens)).double().numpy()
    for place in range(3):
        reference = LedoitWolf().fit(tokens[:, place].double().numpy())
        assert gaussian.shrinkage[place].item() == pytest.approx(reference.shrinkage_, abs=1e-4)
        expected = np.sqrt(reference.mahalanobis(tokens[:, place].double().numpy()) / 8)
        np.testing.assert_allclose(distances[:, place], expected, rtol=2e-3)


def test_far_tokens_are_far_and_constant_ones_do_not_break() -> None:
    tokens = torch.randn(50, 2, 4, generator=torch.Generator().manual_seed(1))
    gaussian = fitted([tokens])
    normal = gaussian(seen(tokens))
    assert normal.mean().item() == pytest.approx(1, abs=0.15)
    assert gaussian(seen(tokens + 9)).min() > normal.max()
    assert torch.isfinite(fitted([torch.ones(5, 2, 4)])(seen(torch.ones(1, 2, 4)))).all()
    torch.testing.assert_close(gaussian.standard.mean, normal.mean(dim=0))
    torch.testing.assert_close(gaussian.standard.sd, normal.std(dim=0, correction=0))


def test_one_film_is_not_enough() -> None:
    with pytest.raises(UserError, match="at least 2"):
        fitted([torch.zeros(1, 2, 4)])

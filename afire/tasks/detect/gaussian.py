"""A Gaussian of the tokens at each position of normal films: mean and shrunk covariance.

Shapes: N films, L positions, D width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from afire.errors import UserError


@dataclass(frozen=True)
class TokenGaussian:
    """``whiten`` (L, D, D) maps a centred token to one of unit covariance, so a distance is a length."""

    mean: Tensor  # (L, D)
    whiten: Tensor
    shrinkage: Tensor  # (L,)

    def __call__(self, tokens_BLD: Tensor) -> Tensor:
        """Mahalanobis distance (B, L) of every token from its place, divided by the root of D: about 1 for normals."""
        centred_LBD = (tokens_BLD.float() - self.mean).transpose(0, 1)
        whitened = torch.bmm(centred_LBD, self.whiten)
        return (whitened.square().mean(dim=-1)).sqrt().T

    def to(self, device: torch.device) -> TokenGaussian:
        return TokenGaussian(self.mean.to(device), self.whiten.to(device), self.shrinkage.to(device))


class GaussianFit:
    """Adds up batches of tokens; memory does not grow with the number of films.

    The covariance is shrunk towards a multiple of the identity by the Ledoit-Wolf rule, position by position, because
    there are often fewer films than dimensions. The rule needs the mean of |x|^4 about the mean beside the covariance.
    """

    def __init__(self) -> None:
        self.films = 0
        self._shift: Tensor | None = None  # near the mean, so that nothing cancels
        self._sum = self._outer = self._cubes = self._fourth = torch.zeros(())

    def add(self, tokens_BLD: Tensor) -> None:
        tokens = tokens_BLD.double()
        if self._shift is None:
            self._shift = tokens.mean(dim=0)
        centred_LBD = (tokens - self._shift).transpose(0, 1)
        self._sum = self._sum + centred_LBD.sum(dim=1)
        self._outer = self._outer + centred_LBD.transpose(1, 2) @ centred_LBD
        squares_LB = centred_LBD.square().sum(dim=-1)
        self._cubes = self._cubes + (squares_LB[..., None] * centred_LBD).sum(dim=1)
        self._fourth = self._fourth + squares_LB.square().sum(dim=1)
        self.films += len(tokens)

    def finish(self) -> TokenGaussian:
        if self._shift is None or self.films < 2:
            raise UserError("the token Gaussians need at least 2 normal films.")
        n, d = self.films, self._shift.shape[-1]
        offset = self._sum / n
        covariance = self._outer / n - offset[:, :, None] * offset[:, None, :]
        shrinkage = _ledoit_wolf(covariance, self._fourth_about(offset), n)
        scale = covariance.diagonal(dim1=1, dim2=2).mean(dim=1)
        eye = torch.eye(d, dtype=torch.float64, device=covariance.device)
        shrunk = (1 - shrinkage)[:, None, None] * covariance + (shrinkage * scale.clamp_min(1e-12))[:, None, None] * eye
        values, vectors = torch.linalg.eigh(shrunk)
        whiten = vectors / values.clamp_min(values[:, -1:] * 1e-9).sqrt()[:, None, :]
        return TokenGaussian((self._shift + offset).float(), whiten.float(), shrinkage.float())

    def _fourth_about(self, offset_LD: Tensor) -> Tensor:
        """Mean of |x - offset|^4 (L,), from moments about the shift: |x - o|^2 = |x|^2 - 2 x.o + |o|^2, squared."""
        o2 = offset_LD.square().sum(dim=1)
        along = torch.einsum("ld,lde,le->l", offset_LD, self._outer, offset_LD) / self.films  # mean of (x.o)^2
        cubes = (self._cubes * offset_LD).sum(dim=1) / self.films  # mean of |x|^2 x.o
        squares = self._outer.diagonal(dim1=1, dim2=2).sum(dim=1) / self.films
        # The mean of x.o is |o|^2, because the offset is the mean.
        return self._fourth / self.films + 4 * along + o2.square() - 4 * cubes + 2 * squares * o2 - 4 * o2.square()


def fit_gaussian(batches: Iterable[Tensor]) -> TokenGaussian:
    """The Gaussian of tokens that come in batches (b, L, D)."""
    fit = GaussianFit()
    for tokens in batches:
        fit.add(tokens)
    return fit.finish()


def _ledoit_wolf(covariance_LDD: Tensor, fourth_L: Tensor, n: int) -> Tensor:
    """How much to shrink (L,), in [0, 1]: the expected error of the covariance over its distance from the identity."""
    d = covariance_LDD.shape[-1]
    squares = covariance_LDD.square().sum(dim=(1, 2))
    trace = covariance_LDD.diagonal(dim1=1, dim2=2).sum(dim=1)
    error = (fourth_L - squares) / n
    distance = squares - trace.square() / d
    return torch.where(distance > 0, error / distance.clamp_min(1e-300), 1.0).clamp(0, 1)

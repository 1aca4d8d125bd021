"""AE-U: its loss is the Gaussian likelihood, and uncertain pixels count for less."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from afire.config import Config
from afire.detect.aeu import UncertainAutoencoder, uncertain_error
from afire.methods.base import Keys


def test_the_loss_is_the_likelihood_of_the_film_but_for_constants() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn, log_variance, images = (torch.randn(2, 1, 4, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    drawn.requires_grad_()
    log_variance.requires_grad_()
    model = UncertainAutoencoder(Config(image={"size": 32}, options={"width": 4}))  # type: ignore[arg-type]
    ours = model.losses({"drawn": drawn, "log_variance": log_variance, "images": images}).total
    slow = -2 * Normal(drawn, (log_variance / 2).exp()).log_prob(images).mean() - math.log(2 * math.pi)
    torch.testing.assert_close(ours, slow)
    for first, second in zip(*(torch.autograd.grad(each, [drawn, log_variance]) for each in (ours, slow)), strict=True):
        torch.testing.assert_close(first, second)


def test_where_it_is_unsure_an_error_counts_for_less() -> None:
    drawn, images = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2)
    errors = uncertain_error(drawn, torch.tensor([[[[0.0, math.log(4.0)]]]]), images)
    assert errors.flatten().tolist() == pytest.approx([1.0, 0.25])


def test_what_is_drawn_is_bounded_however_far_the_networks_go() -> None:
    model = UncertainAutoencoder(Config(image={"size": 32}, options={"width": 4, "latent": 3}))  # type: ignore[arg-type]
    with torch.no_grad():
        model.decoder.last.bias.fill_(1e6)
    outputs = model(model.views(torch.rand(2, 1, 32, 32), Keys(0, 0, 0, torch.arange(2))))
    assert float(outputs["log_variance"].detach().max()) <= 10 and torch.isfinite(model.losses(outputs).total)

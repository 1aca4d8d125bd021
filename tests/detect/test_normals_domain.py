"""Films unlike the training's are told, whatever their contrast."""

from __future__ import annotations

import numpy as np
import torch

from afire.detect.normals import Domain, rank_pictures


def chests(count: int, seed: int = 0) -> torch.Tensor:
    """Bright middle, two dark fields, dark above and bright below: something with an up and a down."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 48), torch.linspace(-1, 1, 48), indexing="ij")
    base = 0.4 + 0.3 * torch.exp(-(x**2) / 0.05) - 0.3 * torch.exp(-((x.abs() - 0.5) ** 2 + (y + 0.2) ** 2) / 0.1)
    noise = torch.nn.functional.interpolate(torch.randn(count, 1, 6, 6, generator=generator), 48, mode="bilinear")
    return (base + 0.2 * y + 0.04 * noise).clamp(0, 1)


def test_likeness_ignores_contrast_and_sees_the_negative() -> None:
    domain = Domain.of(rank_pictures(chests(60)))
    new = chests(20, seed=1)
    assert domain.objections(new) == [[]] * 20
    assert domain.objections(new**0.5 * 0.8) == [[]] * 20, "another exposure"
    assert all("inverted" in found[0] for found in domain.objections(1 - new))
    assert all("upside down" in found[0] for found in domain.objections(new.flip(2)))
    assert all("side" in found[0] for found in domain.objections(new.rot90(1, (2, 3))))


def test_noise_and_blank_films_are_objected_to() -> None:
    domain = Domain.of(rank_pictures(chests(60)))
    noise = torch.rand(5, 1, 48, 48, generator=torch.Generator().manual_seed(0))
    assert all(found for found in domain.objections(noise))
    assert domain.objections(torch.full((1, 1, 48, 48), 0.5)) == [["blank: one grey level"]]


def test_kept_and_restored() -> None:
    domain = Domain.of(rank_pictures(chests(30)))
    again = Domain()
    again.load_state_dict(domain.state_dict())
    again.set_limits(domain.limits())
    assert torch.equal(again.typical, domain.typical) and again.least_likeness == domain.least_likeness
    assert np.isclose(float(domain.typical.norm()), 1)

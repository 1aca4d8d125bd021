"""Films unlike the training's are told, whatever their contrast."""

from __future__ import annotations

import numpy as np
import torch

from afire.data.phantom import draw_batch
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


def phantoms(count: int, first: int = 0) -> torch.Tensor:
    return torch.from_numpy(draw_batch(7, range(first, first + count), 48, diseases=()).images)


def test_no_chest_is_refused_and_another_scanner_is_warned_of() -> None:
    generator = torch.Generator().manual_seed(0)
    narrow = phantoms(1) + 0.05 * torch.rand(40, 1, 48, 48, generator=generator)  # all of one patient and framing
    domain = Domain.of(rank_pictures(narrow))
    assert domain.chest.any() and domain.objections(narrow) == [[]] * 40
    others = phantoms(40, 100)
    scored = [not objections for objections in domain.objections(others)]
    warned = [bool(messages) for messages in domain.warnings(others)]
    assert sum(scored) >= 34, "other chests are scored"
    assert sum(warned) >= 10 and sum(bool(messages) for messages in domain.warnings(narrow)) <= 2
    assert all("calibrate" in messages[0] for messages in domain.warnings(others) if messages)
    discs = torch.zeros(3, 1, 48, 48)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 48), torch.linspace(-1, 1, 48), indexing="ij")
    for disc, radius in zip(discs, (0.4, 0.6, 0.9), strict=True):
        disc[0] = (x**2 + y**2 < radius**2) * (1 - 0.3 * (x**2 + y**2))
    assert all("not a frontal chest film" in found[0] for found in domain.objections(discs))


def test_where_normal_films_are_no_chests_what_is_unlike_them_is_refused() -> None:
    generator = torch.Generator().manual_seed(2)
    stripes = (torch.arange(48) // 6 % 2).float()[None, None, :, None].expand(30, 1, 48, 48)
    stripes = stripes * 0.5 + 0.1 * torch.rand(30, 1, 48, 48, generator=generator)
    domain = Domain.of(rank_pictures(stripes))
    assert not domain.chest.any()
    assert all("unlike the training films" in found[0] for found in domain.objections(phantoms(5)))
    assert domain.warnings(phantoms(5)) == [[]] * 5

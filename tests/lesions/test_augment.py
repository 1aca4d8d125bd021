"""What is done to every film: keyed, switched off by zeros, and maps go with their films."""

from __future__ import annotations

import pytest
import torch

from afire.lesions.augment import AugmentSettings, augmented, normal_numbers

OFF = dict.fromkeys(AugmentSettings.model_fields, 0.0)
STRONG = {"turn": 20.0, "blur": 3.0, "contrast": 0.9, "unsharp": 2.0}
ROWS = torch.tensor([3, 14, 15, 92, 65, 35])


def change(
    films: torch.Tensor, maps: torch.Tensor | None = None, rows: torch.Tensor = ROWS, epoch: int = 2, **settings: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return augmented(films, maps, seed=1, epoch=epoch, rows=rows, settings=AugmentSettings(**settings))


def test_zeros_switch_everything_off(films: torch.Tensor) -> None:
    images, maps = change(films, films * 2, **OFF)
    assert maps is not None and torch.equal(images, films) and torch.equal(maps, films * 2)


@pytest.mark.parametrize("name", [*OFF, "all"])
def test_each_change_is_keyed_and_knows_no_other_film(films: torch.Tensor, name: str) -> None:
    settings = {} if name == "all" else {**OFF, name: STRONG.get(name, 0.2)}
    whole, _ = change(films, **settings)
    assert not torch.allclose(whole, films, atol=1e-3) and whole.min() >= 0 and whole.max() <= 1
    order = torch.tensor([4, 0])
    torch.testing.assert_close(change(films[order], rows=ROWS[order], **settings)[0], whole[order], atol=1e-6, rtol=0)
    assert torch.equal(change(films, **settings)[0], whole)
    assert not torch.allclose(change(films, epoch=3, **settings)[0], whole, atol=1e-3)


def test_maps_are_warped_with_their_films_and_keep_their_values() -> None:
    films = torch.zeros(6, 1, 64, 64)
    films[..., 30:40, 18:28] = 1
    images, maps = change(films, films * 0.5, **{**OFF, "turn": 20.0, "zoom": 0.2, "shift": 0.1})
    assert maps is not None and not torch.allclose(images, films)
    torch.testing.assert_close(maps, images * 0.5)
    grey, maps = change(films * 0.5, films * 0.5, **{**OFF, "gamma": 1.0, "noise": 0.1})
    assert maps is not None and torch.equal(maps, films * 0.5) and not torch.allclose(grey, films * 0.5, atol=0.02)


def test_a_coarse_map_goes_where_its_film_goes() -> None:
    films = torch.zeros(6, 1, 64, 64)
    films[..., 24:40, 16:32] = 1
    coarse = torch.nn.functional.avg_pool2d(films, 8)
    images, maps = change(films, coarse, **{**OFF, "turn": 15.0, "zoom": 0.2, "shift": 0.1, "stretch": 0.2})
    assert maps is not None and maps.shape == (6, 1, 8, 8)
    at = torch.arange(8.0)
    pooled = torch.nn.functional.avg_pool2d(images, 8)
    for axis in (2, 3):  # the middle of the square, in cells
        where = [(each.sum(dim=5 - axis)[:, 0] * at).sum(dim=1) / each.sum(dim=(1, 2, 3)) for each in (maps, pooled)]
        torch.testing.assert_close(where[0], where[1], atol=0.15, rtol=0)
    assert (pooled - coarse).abs().max() > 0.2


def test_stretching_changes_width_and_height_apart() -> None:
    films = torch.zeros(6, 1, 64, 64)
    films[..., 16:48, 16:48] = 1
    images, _ = change(films, **{**OFF, "stretch": 0.3})
    high, wide = images[:, 0, :, 32].sum(dim=1) / 32, images[:, 0, 32].sum(dim=1) / 32
    assert (high - wide).abs().max() > 0.1 and ((wide > 0.68) & (wide < 1.32)).all() and wide.unique().numel() == 6


def test_a_grey_curve_rises_and_keeps_black_and_white() -> None:
    ramp = torch.linspace(0, 1, 64).expand(6, 1, 64, 64)
    images, _ = change(ramp, **{**OFF, "contrast": 0.99})
    assert (images.diff(dim=-1) > 0).all() and (images - ramp).abs().max() > 0.02
    torch.testing.assert_close(images[..., [0, -1]], ramp[..., [0, -1]], atol=1e-6, rtol=0)


def test_shading_is_slow_and_sharpening_leaves_plains_alone() -> None:
    grey = torch.full((6, 1, 64, 64), 0.5)
    shaded, _ = change(grey, **{**OFF, "shading": 0.3})
    assert 0.05 < (shaded - grey).abs().max() <= 0.3 and shaded.diff(dim=-1).abs().max() < 0.04
    torch.testing.assert_close(change(grey, **{**OFF, "unsharp": 3.0})[0], grey)
    edge = grey.clone()
    edge[..., 32:] = 0.6
    sharp, _ = change(edge, **{**OFF, "unsharp": 3.0})
    assert (sharp.amax(dim=(1, 2, 3)) > 0.6).all() and (sharp.amin(dim=(1, 2, 3)) < 0.5).all()


def test_blur_is_a_gaussian_of_each_films_own_width() -> None:
    films = torch.zeros(6, 1, 65, 65)
    films[..., 32, 32] = 1
    images, _ = change(films, **{**OFF, "blur": 6.0})
    at = torch.arange(65.0) - 32
    torch.testing.assert_close(images.sum(dim=(1, 2, 3)), torch.ones(6))
    spread = (images[:, 0].sum(dim=1) * at.square()).sum(dim=1).sqrt()
    down = (images[:, 0].sum(dim=2) * at.square()).sum(dim=1).sqrt()
    torch.testing.assert_close(spread, down)
    assert spread.max() < 6 * 65 / 224 and spread.unique().numel() == 6


def test_noise_is_normal_and_follows_from_its_key() -> None:
    numbers = normal_numbers(torch.tensor([7, 8]), 40_001)
    assert numbers.shape == (2, 40_001) and torch.isfinite(numbers).all()
    assert numbers.mean().abs() < 0.02 and (numbers.std() - 1).abs() < 0.02
    assert ((numbers.abs() > 1.96).float().mean() - 0.05).abs() < 0.005
    assert torch.corrcoef(numbers)[0, 1].abs() < 0.02
    assert torch.corrcoef(torch.stack([numbers[0, :-1], numbers[0, 1:]]))[0, 1].abs() < 0.02
    assert torch.equal(normal_numbers(torch.tensor([8]), 100)[0], normal_numbers(torch.tensor([5, 8]), 100)[1])

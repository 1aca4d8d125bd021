"""Augmentation: drawn by key, one warp, masks with their films."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from afire.tasks.settings import AugmentConfig
from afire.tasks.supervised import draw_warps, warp_images, warp_masks

NOTHING = {"crop_min": 1.0, "stretch": 1.0, "rotation": 0.0, "flip": 0.0}
ROWS = np.array([3, 17, 4, 99])


def films(count: int = 4, size: int = 24) -> torch.Tensor:
    return torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(1))


def test_nothing_asked_changes_nothing() -> None:
    maps = draw_warps(AugmentConfig(**NOTHING), 24, seed=0, step=5, draws=ROWS)
    torch.testing.assert_close(warp_images(films(), maps), films(), atol=1e-5, rtol=0)


def test_a_mirror_is_a_mirror() -> None:
    maps = draw_warps(AugmentConfig(**{**NOTHING, "flip": 1.0}), 24, seed=0, step=5, draws=ROWS)
    torch.testing.assert_close(warp_images(films(), maps), films().flip(-1), atol=1e-5, rtol=0)


def test_a_crop_is_a_piece_of_the_film_at_full_size() -> None:
    """A ramp from left to right stays a ramp, with the slope of the enlargement and inside the film's values."""
    size = 64
    ramp = (torch.arange(size) / (size - 1)).expand(50, 1, size, size).contiguous()
    maps = draw_warps(AugmentConfig(**{**NOTHING, "crop_min": 0.25}), size, seed=3, step=0, draws=np.arange(50))
    row = warp_images(ramp, maps)[:, 0, size // 2, 2:-2]
    slope = (row[:, -1] - row[:, 0]) / (row.shape[1] - 1) * (size - 1)
    assert (slope > 0.49).all() and (slope < 1.01).all() and slope.std() > 0.1
    assert (row.diff(dim=1).std(dim=1) < 1e-3).all()


def test_a_film_is_changed_alike_in_any_batch_and_otherwise_in_any_step_and_seed() -> None:
    config = AugmentConfig()
    together = draw_warps(config, 24, seed=0, step=5, draws=ROWS)
    alone = torch.cat([draw_warps(config, 24, seed=0, step=5, draws=ROWS[i : i + 1]) for i in (2, 0, 3, 1)])
    assert torch.equal(together[[2, 0, 3, 1]], alone)
    for other in (
        draw_warps(config, 24, seed=0, step=6, draws=ROWS),
        draw_warps(config, 24, seed=1, step=5, draws=ROWS),
        draw_warps(config, 24, seed=0, step=5, draws=ROWS + 1),
    ):
        assert not torch.isclose(together, other).all(dim=(1, 2)).any()


def test_settings_bound_what_happens() -> None:
    config = AugmentConfig(crop_min=0.5, stretch=1.5, rotation=20, flip=0.3)
    maps = draw_warps(config, 64, seed=2, step=0, draws=np.arange(4000)).double()
    linear = maps[:, :, :2]
    area = 1 / torch.linalg.det(linear).abs()
    assert 0.49 < area.min() < 0.53 and 0.97 < area.max() <= 1.0001
    assert (torch.linalg.det(linear) < 0).float().mean().item() == pytest.approx(0.3, abs=0.03)
    sides = 1 / linear.norm(dim=1)  # of the crop, width and height
    assert (sides[:, 0] / sides[:, 1]).max() < 1.51 and (sides <= 1.0001).all()
    angle = torch.rad2deg(torch.atan2(linear[:, 0, 1], linear[:, 1, 1]))
    assert angle.abs().max() <= 20.01 and angle.min() < -18 and angle.max() > 18


def test_a_mask_goes_where_its_film_goes() -> None:
    size = 48
    mask = torch.zeros(60, 1, size, size)
    mask[:, :, 10:30, 18:40] = 1
    maps = draw_warps(AugmentConfig(), size, seed=0, step=1, draws=np.arange(60))
    film, moved = warp_images(mask, maps), warp_masks(mask, maps)
    assert set(moved.unique().tolist()) == {0.0, 1.0}
    differ = ((film > 0.5) != (moved > 0.5)).float().mean().item()
    assert differ < 0.01  # rounding along the outline only
    assert film.min() >= 0 and film.max() <= 1

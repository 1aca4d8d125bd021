"""Keyed views: what is cut, that draws follow from film and view alone, and each change against plain code."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from afire.errors import UserError
from afire.methods.base import Keys
from afire.methods.crops import CropSettings, crops, cut, drawn_boxes, inside, toned, view_draws
from afire.settings import validate

PLAIN = CropSettings(mirror=0, jitter=0, blur=0)


def films(count: int = 3, size: int = 32, channels: int = 1) -> Tensor:
    coarse = torch.rand(count, channels, 5, 5, generator=torch.Generator().manual_seed(1))
    return F.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)


def keys(*rows: int, seed: int = 0, epoch: int = 0) -> Keys:
    return Keys(seed, epoch, 0, torch.tensor(rows))


def test_a_box_of_whole_pixels_is_cut_out_as_it_is() -> None:
    images = films(2, channels=3)
    boxes = torch.tensor([[[0.25, 0.5, 0.25, 0.25], [0.5, 0.0, 0.25, 0.25]], [[0.0, 0.0, 0.25, 0.25]] * 2])
    views = cut(images, boxes, 8)
    torch.testing.assert_close(views[0], images[0, :, 16:24, 8:16])
    torch.testing.assert_close(views[1], images[0, :, 0:8, 16:24])
    torch.testing.assert_close(views[3], images[1, :, 0:8, 0:8])


def test_mirror_then_turn() -> None:
    images, whole = films(1), torch.tensor([[[0.0, 0, 1, 1]]])
    yes, quarter = torch.tensor([[True]]), torch.tensor([[math.pi / 2]])
    torch.testing.assert_close(cut(images, whole, 32, mirrored_BV=yes), images.flip(-1))
    turned = cut(images, whole, 32, angle_BV=quarter)
    torch.testing.assert_close(turned, images.rot90(1, (-2, -1)), atol=1e-5, rtol=0)
    both = cut(images, whole, 32, mirrored_BV=yes, angle_BV=quarter)
    torch.testing.assert_close(both, turned.flip(-1), atol=1e-5, rtol=0)


def test_views_follow_from_film_epoch_and_view_alone() -> None:
    images, settings = films(3), CropSettings(turn=10, solarise=0.3)
    three = crops(images, keys(4, 9, 4), views=3, size=16, settings=settings)
    assert three.shape == (9, 1, 16, 16) and three.min() >= 0 and three.max() <= 1
    torch.testing.assert_close(crops(images[1:], keys(9, 4), views=3, size=16, settings=settings), three[3:])
    torch.testing.assert_close(crops(images, keys(4, 9, 4), views=1, size=16, settings=settings), three[::3])
    assert not torch.equal(three[0], three[1])
    for other in (
        crops(images, keys(4, 9, 4, epoch=1), views=3, size=16, settings=settings),
        crops(images, keys(4, 9, 4, seed=1), views=3, size=16, settings=settings),
        crops(images, keys(4, 9, 4), views=3, size=16, settings=settings, stream=1),
    ):
        assert (other - three).flatten(1).abs().amax(1).min() > 0


def test_boxes_lie_inside_and_have_the_areas_asked_for() -> None:
    settings = CropSettings(area_min=0.1, area_max=0.4, aspect=1.5)
    boxes = drawn_boxes(view_draws(keys(*range(2000)), 2), settings).flatten(0, 1)
    left, top, width, height = boxes.unbind(-1)
    assert boxes.min() >= 0 and (left + width).max() <= 1 + 1e-6 and (top + height).max() <= 1 + 1e-6
    area, ratio = width * height, width / height
    assert 0.1 - 1e-5 < area.min() < 0.11 and 0.39 < area.max() < 0.4 + 1e-5
    assert area.mean() == pytest.approx(0.25, abs=0.01) and ratio.log().mean() == pytest.approx(0, abs=0.02)
    assert 1 / 1.5 - 1e-5 < ratio.min() < 0.7 and 1.45 < ratio.max() < 1.5 + 1e-5
    outer = torch.tensor([0.5, 0.25, 0.5, 0.25]).expand_as(boxes)
    nested = inside(boxes, outer)
    assert nested[:, 0].min() >= 0.5 and (nested[:, 1] + nested[:, 3]).max() <= 0.5 + 1e-6
    torch.testing.assert_close(nested[:, 2] * nested[:, 3], area / 8)


def test_within_a_box_nothing_else_is_seen() -> None:
    images = torch.zeros(1, 1, 32, 32)
    images[..., :16, :16] = 1
    within = torch.tensor([[[0.0, 0, 0.5, 0.5]]])
    assert crops(images, keys(1), views=1, size=8, settings=PLAIN, within=within).min() > 0.9


def test_brightness_contrast_blur_and_solarisation_against_plain_code() -> None:
    images, draws = films(4, 24), view_draws(keys(1, 2, 3, 4), 1)[:, 0]
    settings = CropSettings(jitter=0.6, blur=0.6, solarise=0.5)
    fast = toned(images, draws, settings)
    for film, draw, shown in zip(images, draws.tolist(), fast, strict=True):
        plain = film.clone()
        if draw[6] < 0.6:
            plain = (plain * (0.6 + 0.8 * draw[7])).clamp(0, 1)
            plain = (plain.mean() + (plain - plain.mean()) * (0.6 + 0.8 * draw[8])).clamp(0, 1)
        if draw[9] < 0.6:
            deviation = (0.1 + 1.9 * draw[10]) * 24 / 224
            reach = math.ceil(3 * 2.0 * 24 / 224)
            weights = torch.tensor([math.exp(-0.5 * (at / deviation) ** 2) for at in range(-reach, reach + 1)])
            kernel = weights[:, None] * weights / weights.sum() ** 2
            plain = F.conv2d(F.pad(plain[None], [reach] * 4, mode="replicate"), kernel[None, None])[0]
        if draw[11] < 0.5:
            plain = torch.where(plain >= 0.5, 1 - plain, plain)
        torch.testing.assert_close(shown, plain, atol=1e-5, rtol=0)
    assert sum(draw[9] < 0.6 for draw in draws.tolist()) > 0


def test_bad_settings_are_messages() -> None:
    with pytest.raises(UserError, match=r"area_min 0\.5 is larger than area_max 0\.4"):
        validate({"area_min": 0.5, "area_max": 0.4}, CropSettings)

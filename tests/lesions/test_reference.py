"""The fast lesions equal the slow ones, pixel by pixel, for the same draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lesion_films import draw_films
from reference import lesions as slow

from afire.config import LesionConfig
from afire.lesions.places import keyed, lung_field
from afire.lesions.synthesis import synthesize_keyed

SETTINGS: list[dict[str, Any]] = [
    {},
    {"rotate": True},
    {"irregularity": 0.6},
    {"fade": True},
    {"haze": 1.0},
    {"haze": 0.5, "amplitude_max": 1.0, "size_max": 200},
    {"place": "lungs"},
    {"count_min": 4, "count_max": 9, "gamma": 0.2, "texture_window": 5},
    {"rotate": True, "irregularity": 0.4, "fade": True, "haze": 0.5, "place": "lungs", "size_max": 128, "views": 2},
    {"size_min": 300, "size_max": 900, "texture_window": 999},
    {"size_min": 300, "size_max": 900, "rotate": True, "amplitude_min": 0.0},
    {"size_min": 0.01, "size_max": 0.02, "texture_window": 0.01},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "default")
@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 72)])
def test_equal_the_slow_reference(settings: dict[str, Any], height: int, width: int) -> None:
    config = LesionConfig(**settings)
    films = draw_films(3, height, width, seed=1)
    lesioned, masks = synthesize_keyed(films, seed=4, epoch=2, indices=[5, 6, 7], config=config)
    draws = keyed(4, 2, [5, 6, 7], config.views, config.count_max)
    lungs = lung_field(films[:, 0])
    for film in range(3):
        pixels = films[film, 0].double().tolist()
        for view in range(config.views):
            mask = slow.lesion_mask(pixels, draws[film, view].tolist(), config, lungs[film].tolist())
            row = film * config.views + view
            torch.testing.assert_close(
                masks[row, 0].double(), torch.tensor(mask, dtype=torch.float64), atol=1e-5, rtol=0
            )
            expected = torch.tensor(slow.add(pixels, mask), dtype=torch.float64)
            torch.testing.assert_close(lesioned[row, 0].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("haze", [0.0, 0.5])
def test_equal_the_slow_reference_on_a_film_of_one_value(value: float, haze: float) -> None:
    config = LesionConfig(haze=haze)
    film = torch.full((1, 1, 32, 40), value)
    _, masks = synthesize_keyed(film, seed=0, epoch=0, indices=[0], config=config)
    expected = slow.lesion_mask(film[0, 0].tolist(), keyed(0, 0, [0], 1, 4)[0, 0].tolist(), config)
    torch.testing.assert_close(masks[0, 0], torch.tensor(expected), atol=1e-5, rtol=0)

"""Regions in words: the patient's sides, thirds of the lung field, and what lies around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from afire.data.phantom.film import draw_film
from afire.lesions.places import Region, region_message, regions

GRID = 8


def heat_at(row: int, column: int) -> np.ndarray:
    heat = np.zeros((1, GRID, GRID), np.float32)
    heat[0, row, column] = 5.0
    return heat


@pytest.fixture(scope="module")
def chest() -> np.ndarray:
    """Two dark lungs with a bright middle in a grey body, dark outside it; (1, 128, 128)."""
    y, x = np.mgrid[0:128, 0:128] / 128
    film = np.where(np.abs(x - 0.5) < 0.42, 0.6, 0.05)
    lungs = ((np.abs(x - 0.5) - 0.22) / 0.12) ** 2 + ((y - 0.45) / 0.3) ** 2 < 1
    return np.where(lungs, 0.2, film).astype(np.float32)[None]


@pytest.mark.parametrize(
    ("row", "column", "words"),
    [
        (1, 2, "right upper zone"),
        (3, 2, "right middle zone"),
        (5, 2, "right lower zone"),
        (5, 5, "left lower zone"),
        (0, 6, "above the lungs, left"),
        (7, 1, "below the lungs, right"),
        (3, 0, "outside the lungs, right"),
    ],
)
def test_places_of_a_chest(chest: np.ndarray, row: int, column: int, words: str) -> None:
    found = regions(chest, heat_at(row, column))[0]
    assert found.words == words
    assert found.sd == 5.0
    assert (found.x, found.y) == ((column + 0.5) / GRID, (row + 0.5) / GRID)


def test_the_middle_is_the_mediastinum(chest: np.ndarray) -> None:
    heat = np.zeros((1, 9, 9), np.float32)
    heat[0, 4, 4] = 3
    assert regions(chest, heat)[0].words == "central (mediastinum), middle third"


def test_a_film_without_lungs_falls_back_to_the_film() -> None:
    flat = np.full((1, 64, 64), 0.5, np.float32)
    assert regions(flat, heat_at(0, 0))[0].words == "right upper zone of the film"
    assert regions(flat, heat_at(7, 7))[0].words == "left lower zone of the film"
    assert regions(flat, heat_at(3, 3))[0].words == "central"


def test_sides_of_phantoms_are_the_patients() -> None:
    films = np.stack([draw_film(0, index, 128).image for index in range(6)]).astype(np.float32)
    heat = np.concatenate([heat_at(3, 1)] * 6)
    for found, mirrored in zip(regions(films, heat), regions(films, heat[:, :, ::-1].copy()), strict=True):
        assert "right" in found.words and "left" in mirrored.words


def test_the_message_says_when_nothing_stands_out() -> None:
    region = Region("right lower zone", 0.2, 0.8, 4.2)
    assert region_message(region, low=2.0) == "right lower zone, 4.2 sd above normal films there"
    assert region_message(region, low=5.0) == "nothing stands out (highest: right lower zone, 4.2 sd)"


def test_a_batch_is_its_films(chest: np.ndarray) -> None:
    films = np.concatenate([chest, 1 - chest, chest])
    heat = torch.rand(3, GRID, GRID, generator=torch.Generator().manual_seed(0)).numpy()
    assert regions(films, heat) == [regions(films[k : k + 1], heat[k : k + 1])[0] for k in range(3)]

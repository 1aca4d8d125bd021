"""Where lesions go: keyed draws, thresholds, lung fields, and how a place of the chest is called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from lesion_films import draw_films, drawn_lungs
from PIL import Image
from reference import lesions as slow

from afire.data.phantom import draw_batch
from afire.data.phantom.film import draw_film
from afire.lesions import places
from afire.lesions.places import (
    DRAW_BITS,
    Draw,
    PixelPicker,
    Region,
    below,
    drawn,
    keyed,
    lung_depth,
    lung_field,
    nth_of_stream,
    otsu_threshold,
    otsu_with_bright_level,
    region_message,
    regions,
    unit,
)

# First numbers of splitmix64 from the state 1234567, as published with the algorithm.
PUBLISHED = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)


def test_splitmix64_as_published() -> None:
    numbers = nth_of_stream(torch.tensor(1234567), torch.arange(5))
    assert tuple(number % 2**64 for number in numbers.tolist()) == PUBLISHED


def test_keyed_draws_are_uniform_in_every_column() -> None:
    draws = keyed(seed=3, epoch=5, indices=range(4000), views=2, slots=2)
    assert draws.shape == (4000, 2, 2, len(Draw))
    assert draws.min() >= 0 and draws.max() < 1 << DRAW_BITS
    columns = draws.flatten(0, 2)
    for column in columns.T:
        counts = torch.bincount(column >> (DRAW_BITS - 4), minlength=16).double()
        chi_square = ((counts - 1000) ** 2 / 1000).sum()
        assert chi_square < 44  # 15 degrees of freedom: exceeded once in 10,000
    correlation = torch.corrcoef(unit(columns).double().T) - torch.eye(len(Draw))
    assert correlation.abs().max() < 0.04


def test_neighbouring_keys_have_nothing_in_common() -> None:
    base = unit(keyed(1, 1, range(2000), 1, 1)).double().flatten()
    for other in (keyed(2, 1, range(2000), 1, 1), keyed(1, 2, range(2000), 1, 1), keyed(1, 1, range(1, 2001), 1, 1)):
        pair = torch.stack([base, unit(other).double().flatten()])
        assert torch.corrcoef(pair)[0, 1].abs() < 0.03


def test_a_draw_depends_on_its_key_only() -> None:
    many = keyed(7, 2, [4, 9, 1], views=3, slots=4)
    assert torch.equal(keyed(7, 2, [9], views=1, slots=2)[0, 0], many[1, 0, :2])
    assert torch.equal(keyed(7, 2, torch.tensor([1, 4]), views=3, slots=4), many[[2, 0]])


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, 2**70])
def test_any_seed_is_allowed(seed: int) -> None:
    assert keyed(seed, 0, [0], 1, 1).shape == (1, 1, 1, len(Draw))


def test_generator_draws_repeat() -> None:
    first = drawn((2, 1, 4), torch.Generator().manual_seed(1))
    assert torch.equal(first, drawn((2, 1, 4), torch.Generator().manual_seed(1)))
    assert not torch.equal(first, drawn((2, 1, 4), torch.Generator().manual_seed(2)))


def test_below_reaches_every_number_and_none_beyond() -> None:
    every = torch.arange(0, 1 << DRAW_BITS, 1 << 10)
    assert below(every, 5).unique().tolist() == [0, 1, 2, 3, 4]
    assert below(torch.tensor((1 << DRAW_BITS) - 1), 4096 * 4096) == 4096 * 4096 - 1
    assert below(torch.tensor(12345), 0) == 0


def test_threshold_and_bright_level_equal_the_definition(films: torch.Tensor) -> None:
    threshold, bright = otsu_with_bright_level(films[:, 0])
    for index, film in enumerate(films[:, 0].double().tolist()):
        expected_threshold, expected_bright = slow.otsu(film)
        assert abs(float(threshold[index]) - expected_threshold) < 1e-6
        assert abs(float(bright[index]) - expected_bright) < 1e-6


def test_two_values_are_told_apart() -> None:
    film = torch.tensor([[0.2, 0.2, 0.9], [0.2, 0.2, 0.9]])[None]
    assert 0.2 <= otsu_threshold(film) < 0.9


def test_a_dim_film_is_split_as_finely_as_a_bright_one(films: torch.Tensor) -> None:
    dim = films[:, 0] * 0.01 + 0.3
    same = (dim > otsu_threshold(dim)[:, None, None]) == (films[:, 0] > otsu_threshold(films[:, 0])[:, None, None])
    assert same.float().mean() > 0.999


def test_nothing_lies_above_the_threshold_of_a_film_of_one_value() -> None:
    blank = torch.stack([torch.zeros(4, 5), torch.ones(4, 5), torch.full((4, 5), 0.3)])
    threshold, bright = otsu_with_bright_level(blank)
    assert not (blank > threshold[:, None, None]).any()
    assert torch.equal(bright, torch.tensor([0.0, 1.0, 0.3]))


def test_a_range_of_one_rounding_step_does_no_harm() -> None:
    film = torch.full((1, 3, 3), 0.5)
    film[0, 1, 1] = torch.nextafter(torch.tensor(0.5), torch.tensor(1.0))
    threshold, bright = otsu_with_bright_level(film)
    assert 0.5 <= threshold <= film.max() and 0.5 <= bright <= film.max()


def test_picks_the_kth_chosen_pixel() -> None:
    chosen = torch.rand(3, 7, 9, generator=torch.Generator().manual_seed(0)) > 0.6
    chosen[1] = False
    chosen[2] = False
    chosen[2, 6, 8] = True
    draws = torch.arange(0, 1 << DRAW_BITS, 1 << 14).expand(3, -1)
    picker = PixelPicker(chosen)
    column, row = picker.pick(draws)
    listed = chosen[0].nonzero()
    ranks = below(draws[0], len(listed))
    assert torch.equal(torch.stack([row[0], column[0]], 1), listed[ranks])
    assert ranks.unique().numel() == len(listed)
    assert picker.count.tolist() == [len(listed), 0, 1]
    assert not column[1].any() and not row[1].any()
    assert (column[2] == 8).all() and (row[2] == 6).all()


def test_picks_above_a_threshold_as_from_the_pixels_themselves() -> None:
    # Eighths: many lie on the threshold.
    films = (torch.rand(4, 11, 300, generator=torch.Generator().manual_seed(1)) * 8).round() / 8
    threshold = torch.tensor([0.0, 0.5, 0.875, 1.0])
    draws = torch.arange(0, 1 << DRAW_BITS, 1 << 12).expand(4, -1)
    picked = PixelPicker.above(films, threshold).pick(draws)
    expected = PixelPicker(films > threshold[:, None, None]).pick(draws)
    assert all(torch.equal(*pair) for pair in zip(picked, expected, strict=True))


def dice(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    return 2 * (found & true).sum((1, 2)) / (found.sum((1, 2)) + true.sum((-2, -1)))


@pytest.mark.parametrize(("height", "width"), [(224, 224), (64, 64), (300, 200)])
def test_finds_drawn_lungs(height: int, width: int) -> None:
    found = lung_field(draw_films(3, height, width)[:, 0])
    assert found.dtype == torch.bool and found.shape == (3, height, width)
    assert dice(found, drawn_lungs(height, width)).min() > 0.9


def test_a_lung_that_touches_the_background_is_not_drained() -> None:
    films = draw_films(2, 224, 224)[:, 0]
    films[:, 90:130, :60] = 0.1  # a dark bridge from the left lung to the film's edge
    assert dice(lung_field(films), drawn_lungs(224, 224)).min() > 0.8


def test_depth_rises_from_the_edge_inwards() -> None:
    depth = lung_depth(draw_films(1, 224, 224)[:, 0])[0]
    assert depth.min() == 0 and depth.max() == 1
    assert ((depth > 0) & (depth < 1)).float().mean() > 0.01
    assert (depth[:, 0] == 0).all() and (depth[:, -1] == 0).all()


@pytest.mark.parametrize("film", [torch.zeros(1, 40, 40), torch.ones(1, 40, 40), torch.full((1, 3, 1), 0.5)])
def test_a_film_without_lungs_is_all_field(film: torch.Tensor) -> None:
    assert lung_field(film).all()


def test_a_film_does_not_change_its_neighbours() -> None:
    films = draw_films(5, 96, 96)[:, 0]
    alone = torch.cat([lung_depth(films[row : row + 1]) for row in range(5)])
    assert torch.equal(lung_depth(films), alone)


@pytest.mark.realdata
def test_lungs_of_real_films(real_data: Path) -> None:
    """Shenzhen, first 100 films: measured 0.85 Dice and 0.96 precision over 416 films that chose nothing."""
    masks = sorted((real_data / "shenzhen" / "masks" / "lungs").iterdir())[:100]
    names = [path.name.split(".")[0].removesuffix("_mask") for path in masks]
    films = [Image.open(real_data / "shenzhen" / "images" / f"{name}.jpg").convert("L") for name in names]
    gray = torch.from_numpy(np.stack([np.asarray(film) for film in films])).float() / 255
    true = torch.from_numpy(np.stack([np.asarray(Image.open(path).convert("L")) > 0 for path in masks]))
    found = lung_field(gray)
    precision = (found & true).sum((1, 2)) / found.sum((1, 2))
    assert dice(found, true).mean() > 0.82
    assert precision.mean() > 0.93


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


@pytest.mark.parametrize("share", [0.02, 0.5, 0.97])
def test_packed_fields_grow_and_shrink_as_pooled_ones_do(share: float) -> None:
    field = torch.rand(3, 56, 56, generator=torch.Generator().manual_seed(0)) < share
    rows = places._packed(field)
    assert torch.equal(places._unpacked(rows), field)
    for cells in (1, 2):
        side = 2 * cells + 1
        grown = torch.nn.functional.max_pool2d(field[:, None].float(), side, 1, cells)[:, 0] > 0
        assert torch.equal(places._unpacked(places._grown(rows, cells)), grown)
        shrunk = torch.nn.functional.max_pool2d((~field)[:, None].float(), side, 1, cells)[:, 0] == 0
        assert torch.equal(places._unpacked(places._shrunk(rows, cells)), shrunk)


def test_no_region_lies_on_a_border_or_a_marker() -> None:
    films = draw_batch(3, range(6), 64, diseases=()).images[:, 0]
    heat = np.zeros((6, 8, 8), np.float32)
    heat[:, 0, 0] = 50  # a marker in the corner
    heat[:, 4, 2] = 3
    for region in regions(films, heat):
        assert (region.x, region.y) == (2.5 / 8, 4.5 / 8) and region.sd == 3
    blank = np.full((1, 64, 64), 0.5, np.float32)
    assert regions(blank, heat[:1])[0].sd == 3, "without lungs to go by, too"

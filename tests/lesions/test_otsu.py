"""Otsu against the definition, and the picking of pixels against a list of them."""

from __future__ import annotations

import torch
from reference import lesions as slow

from afire.lesions.places import DRAW_BITS, PixelPicker, below, otsu_threshold, otsu_with_bright_level


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

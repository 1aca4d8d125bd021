"""Blending without a seam: against slow loops and a dense solution, boxes of many sizes at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from afire.lesions.blend import Blend, blended, coons

BOXES = [(5, 7), (9, 4), (3, 3), (12, 12), (3, 8)]  # height, width
WINDOW = 12


def sizes() -> tuple[torch.Tensor, torch.Tensor]:
    heights, widths = zip(*BOXES, strict=True)
    return torch.tensor(heights), torch.tensor(widths)


def pair(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of a film and of a patch."""
    numbers = torch.rand(2, len(BOXES), WINDOW, WINDOW, generator=torch.Generator().manual_seed(seed))
    return numbers[0], numbers[1]


def slow_coons(difference: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pixel by pixel, for one box."""
    height, width = difference.shape
    surface = np.zeros_like(difference)
    for row in range(height):
        for column in range(width):
            v, u = row / (height - 1), column / (width - 1)
            rows = (1 - v) * difference[0, column] + v * difference[-1, column]
            columns = (1 - u) * difference[row, 0] + u * difference[row, -1]
            above = (1 - u) * difference[0, 0] + u * difference[0, -1]
            under = (1 - u) * difference[-1, 0] + u * difference[-1, -1]
            surface[row, column] = rows + columns - ((1 - v) * above + v * under)
    return surface


def dense_poisson(film: NDArray[np.float64], patch: NDArray[np.float64], mixed: bool) -> NDArray[np.float64]:
    """One equation for every pixel inside of one box: its steps to the four neighbours are those that are wanted."""
    height, width = film.shape
    inside = [(row, column) for row in range(1, height - 1) for column in range(1, width - 1)]
    number = {place: index for index, place in enumerate(inside)}
    matrix, right = np.zeros((len(inside), len(inside))), np.zeros(len(inside))
    for (row, column), index in number.items():
        for neighbour in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            step, there = patch[row, column] - patch[neighbour], film[row, column] - film[neighbour]
            right[index] += there if mixed and abs(there) >= abs(step) else step
            matrix[index, index] += 1
            if neighbour in number:
                matrix[index, number[neighbour]] -= 1
            else:
                right[index] += film[neighbour]
    result = film.copy()
    for place, value in zip(inside, np.linalg.solve(matrix, right), strict=True):
        result[place] = value
    return result


def test_a_coons_patch_is_the_loop_over_its_pixels_and_exact_on_the_border() -> None:
    film, patch = pair()
    surface = coons(film - patch, *sizes())
    result = blended(film, patch, *sizes(), "coons")
    for number, (height, width) in enumerate(BOXES):
        box = (number, slice(height), slice(width))
        expected = slow_coons((film - patch)[box].double().numpy())
        np.testing.assert_allclose(surface[box].numpy(), expected, atol=1e-6)
        np.testing.assert_allclose(expected[0], (film - patch)[box][0].double().numpy(), atol=1e-12)
        inside = (number, slice(1, height - 1), slice(1, width - 1))
        torch.testing.assert_close(result[inside], (patch + surface)[inside])
        assert torch.equal(result[box][[0, -1]], film[box][[0, -1]])
        assert torch.equal(result[box][:, [0, -1]], film[box][:, [0, -1]])


@pytest.mark.parametrize("how", ["poisson", "mixed"])
def test_poisson_blending_solves_the_equations_of_every_box(how: Blend) -> None:
    film, patch = pair()
    result = blended(film, patch, *sizes(), how)
    for number, (height, width) in enumerate(BOXES):
        box = (number, slice(height), slice(width))
        expected = dense_poisson(film[box].double().numpy(), patch[box].double().numpy(), how == "mixed")
        np.testing.assert_allclose(result[box].numpy(), expected, atol=2e-5)


def test_a_large_box_is_solved_as_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    film, patch = torch.rand(2, 1, 40, 40, generator=generator).cumsum(dim=3).mul(0.05)
    result = blended(film, patch, torch.tensor([40]), torch.tensor([33]), "poisson")[0, :, :33]
    expected = dense_poisson(film[0, :, :33].double().numpy(), patch[0, :, :33].double().numpy(), False)
    np.testing.assert_allclose(result.numpy(), expected, atol=5e-5)


@pytest.mark.parametrize("how", ["mixed", "poisson", "coons", "none"])
def test_only_the_inside_of_a_box_changes(how: Blend) -> None:
    film, patch = pair()
    result = blended(film, patch, *sizes(), how)
    for number, (height, width) in enumerate(BOXES):
        outside = torch.ones(WINDOW, WINDOW, dtype=torch.bool)
        outside[1 : height - 1, 1 : width - 1] = False
        assert torch.equal(result[number][outside], film[number][outside])
        assert not torch.equal(result[number][~outside], film[number][~outside])
        assert how != "none" or torch.equal(result[number][~outside], patch[number][~outside])


@pytest.mark.parametrize("how", ["poisson", "coons"])
def test_a_patch_that_is_only_brighter_or_tilted_leaves_no_trace(how: Blend) -> None:
    film, _ = pair()
    slope = torch.linspace(0, 0.3, WINDOW)
    for patch in (film + 0.2, film + slope, film + slope[:, None] - 0.1):
        torch.testing.assert_close(blended(film, patch, *sizes(), how), film)


def test_mixed_keeps_the_larger_step() -> None:
    """A flat patch wipes a film's edge out; where the larger step counts, the edge stays."""
    film, flat = torch.zeros(1, WINDOW, WINDOW), torch.zeros(1, WINDOW, WINDOW)
    film[:, :, 6:] = 1
    side = torch.tensor([WINDOW])
    assert torch.equal(blended(film, flat, side, side, "mixed"), film)
    assert (blended(film, flat, side, side, "poisson")[0, 5, 6] - 1).abs() > 0.3


def test_either_is_decided_by_a_coin_for_each_box() -> None:
    film, patch = pair()
    mixed, poisson = (blended(film, patch, *sizes(), how) for how in ("mixed", "poisson"))
    coin = torch.tensor([True, False, True, False, True])
    either = blended(film, patch, *sizes(), "either", coin)
    torch.testing.assert_close(either, torch.where(coin[:, None, None], mixed, poisson), atol=1e-6, rtol=0)


def test_boxes_do_not_know_of_each_other() -> None:
    film, patch = pair()
    height, width = sizes()
    together = blended(film, patch, height, width, "poisson")
    for number in range(len(BOXES)):
        one = slice(number, number + 1)
        side = int(max(height[number], width[number]))  # in the smallest window that holds it
        alone = blended(film[one, :side, :side], patch[one, :side, :side], height[one], width[one], "poisson")
        torch.testing.assert_close(alone[0], together[number, :side, :side], atol=1e-6, rtol=0)

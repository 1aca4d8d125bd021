"""Places in the chest: they follow the lungs when a film is moved, and are the positions where there are none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from afire.data.phantom import draw_batch
from afire.lesions.frames import TYPICAL, ChestFrame, chest_frame, chest_places, places_in
from afire.lesions.places import lung_depth

GRID = (8, 8)
OWN = torch.arange(64)


@pytest.fixture(scope="module")
def drawn() -> tuple[Tensor, Tensor]:
    """Normal phantoms (B, 1, S, S) and where their lungs lie (B, S, S)."""
    batch = draw_batch(4, range(24), 64, normal_share=1.0)
    return torch.from_numpy(batch.images), torch.from_numpy(batch.anatomy[:, :6].any(axis=1))


def box(top: float, bottom: float, right: float, left: float, gap: float = 0.1, side: int = 100) -> Tensor:
    """A lung field (1, S, S) of two boxes with a gap in the middle between them."""
    field = torch.zeros(1, side, side)
    middle = (right + left) / 2
    for low, high in ((right, middle - gap / 2), (middle + gap / 2, left)):
        field[:, round(top * side) : round(bottom * side), round(low * side) : round(high * side)] = 1
    return field


def test_the_frame_of_two_boxes() -> None:
    frame = chest_frame(box(0.2, 0.7, 0.1, 0.8))
    for edge, expected in zip(frame, (0.1, 0.45, 0.8, 0.2, 0.7), strict=True):
        assert edge.item() == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    "field",
    [
        torch.zeros(1, 50, 50),
        torch.ones(1, 50, 50),
        box(0.2, 0.7, 0.1, 0.8) * (torch.arange(100) < 44),  # one lung
        box(0.4, 0.5, 0.1, 0.8),  # as low as a heart
        box(0.2, 0.7, 0.4, 0.6),  # as narrow as a spine
    ],
)
def test_without_two_lungs_every_token_is_at_its_own_place(field: Tensor) -> None:
    frame = chest_frame(field)
    assert all(edge.item() == pytest.approx(usual.item()) for edge, usual in zip(frame, TYPICAL, strict=True))
    assert torch.equal(places_in(frame, GRID, GRID)[0], OWN)


@pytest.mark.parametrize("grid", [(4, 4), (14, 14), (7, 5)])
def test_a_typical_chest_has_its_places_at_their_positions(grid: tuple[int, int]) -> None:
    frame = ChestFrame(*(edge[None] for edge in TYPICAL))
    assert torch.equal(places_in(frame, grid, grid)[0], torch.arange(grid[0] * grid[1]))


def test_a_point_keeps_its_place_when_the_chest_moves_and_grows() -> None:
    """Slowly: of each token's middle, how far it lies from the lungs' middle and top, in widths and heights."""
    right, middle, left, top, bottom = 0.25, 0.52, 0.9, 0.3, 0.62
    frame = ChestFrame(*(torch.tensor([edge]) for edge in (right, middle, left, top, bottom)))
    place = places_in(frame, (10, 12), (6, 8))[0]
    usual = [edge.item() for edge in TYPICAL]
    for token in range(120):
        y, x = (token // 12 + 0.5) / 10, (token % 12 + 0.5) / 12
        if x < middle:
            across = usual[1] - (middle - x) / (middle - right) * (usual[1] - usual[0])
        else:
            across = usual[1] + (x - middle) / (left - middle) * (usual[2] - usual[1])
        down = usual[3] + (y - top) / (bottom - top) * (usual[4] - usual[3])
        row, column = (min(max(int(at * n // 1), 0), n - 1) for at, n in ((down, 6), (across, 8)))
        assert place[token] == row * 8 + column, token


def test_places_follow_a_film_that_is_shifted(drawn: tuple[Tensor, Tensor]) -> None:
    images, lungs = drawn
    tokens = (16, 16)  # of four pixels: the shift is one of them
    right = F.pad(images, (4, 0, 0, 0), mode="replicate")[..., :64]
    here, there = (chest_places(each, tokens, GRID).view(-1, *tokens) for each in (images, right))
    inside, before = (slice(None), slice(2, 14), slice(3, 14)), (slice(None), slice(2, 14), slice(2, 13))
    assert (there[inside] == here[before]).float().mean() > 0.8
    assert (there[inside] == here[inside]).float().mean() < 0.65
    known = [places_in(chest_frame(field), tokens, GRID).view(-1, *tokens) for field in (lungs, lungs.roll(4, dims=2))]
    assert (known[1][inside] == known[0][before]).float().mean() > 0.98


def test_the_lungs_that_are_found_are_near_those_that_were_drawn(drawn: tuple[Tensor, Tensor]) -> None:
    images, lungs = drawn
    found, known = chest_frame(lung_depth(images[:, 0])), chest_frame(lungs)
    for name, one, other in zip(ChestFrame._fields, found, known, strict=True):
        assert (one - other).abs().median() < 0.06, name
    assert (found.middle - known.middle).abs().median() < 0.015
    place = chest_places(images, GRID, GRID)
    assert place.shape == (24, 64) and place.min() >= 0 and place.max() < 64
    assert 0.2 < (place != OWN).float().mean() < 0.8  # the same place lies elsewhere in many films
    assert torch.equal(chest_places(images.expand(-1, 3, -1, -1), GRID, GRID), place)
    assert torch.equal(chest_places(images[5:7], GRID, GRID), place[5:7])  # whatever the batch around it

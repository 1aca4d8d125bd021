"""Places in the chest: they follow the lungs when a film is moved, and are the positions where there are none."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from afire.data.phantom import ANATOMY, draw_batch
from afire.lesions.frames import (
    TYPICAL,
    TYPICAL_BOXES,
    TYPICAL_LUNGS,
    ChestFrame,
    anatomy_places,
    chest_frame,
    chest_places,
    places_in,
)
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


# By maps of the anatomy

PARTS = {"right": slice(0, 3), "left": slice(3, 6), "heart": slice(6, 8)}


def maps_of(boxes: dict[str, tuple[float, float, float, float]], side: int = 64) -> Tensor:
    """Maps (1, A, S, S) of rectangles by right and left edge, top and bottom; of a lung, three zones."""
    maps = torch.zeros(1, len(ANATOMY), side, side)
    for name, edges in boxes.items():
        right, left, top, bottom = (round(edge * side) for edge in edges)
        rows = torch.arange(top, bottom)
        for part, zone in zip(range(*PARTS[name].indices(99)), rows.chunk(3 if name != "heart" else 2), strict=True):
            maps[0, part, zone, right:left] = 1
    return maps


def slow_quantile(mass: list[float], share: float) -> float:
    target, so_far = share * sum(mass), 0.0
    for number, value in enumerate(mass):
        if value and so_far + value >= target:
            return (number + (target - so_far) / value) / len(mass)
        so_far += value
    raise AssertionError("there is no mass")


def slow_places(maps: Tensor, tokens: tuple[int, int], places: tuple[int, int]) -> list[int]:
    """Of one film whose maps (A, G, G) hold two lungs, token by token."""
    fields = [maps[part].sum(dim=0).clamp(max=1) for part in PARTS.values()]
    fields = [field * (field >= 0.3) for field in fields]
    edges = []
    for field in fields:
        down, across = field.sum(dim=1).tolist(), field.sum(dim=0).tolist()
        edges.append([slow_quantile(mass, share) for mass in (across, down) for share in (0.03, 0.97)])
    frame = [edge.item() for edge in chest_frame((fields[0] + fields[1])[None])]
    usual = [edge.item() for edge in TYPICAL_LUNGS]
    step, found = maps.shape[1] // tokens[0], []
    for row in range(tokens[0]):
        for column in range(tokens[1]):
            y, x = (row + 0.5) / tokens[0], (column + 0.5) / tokens[1]
            cells = (slice(row * step, (row + 1) * step), slice(column * step, (column + 1) * step))
            shares = [field[cells].mean().item() for field in fields]
            region = max(range(3), key=lambda number: shares[number])
            if shares[region] >= 0.5:
                right, left, top, bottom = edges[region]
                across = min(max((x - right) / (left - right), 0), 1)
                down = min(max((y - top) / (bottom - top), 0), 1)
                low, high, first, last = TYPICAL_BOXES[region]
                at = (first + down * (last - first), low + across * (high - low))
            else:
                right, middle, left, top, bottom = frame
                half = (middle - right, usual[1] - usual[0]) if x < middle else (left - middle, usual[2] - usual[1])
                at = (
                    usual[3] + (y - top) / (bottom - top) * (usual[4] - usual[3]),
                    usual[1] + (x - middle) / half[0] * half[1],
                )
            cell = [min(max(int((v * n + 1e-4) // 1), 0), n - 1) for v, n in zip(at, places, strict=True)]
            found.append(cell[0] * places[1] + cell[1])
    return found


@pytest.mark.parametrize(("tokens", "places"), [((8, 8), (8, 8)), ((16, 16), (8, 8)), ((8, 8), (4, 6))])
def test_places_by_anatomy_equal_the_reference(
    anatomy: Tensor, tokens: tuple[int, int], places: tuple[int, int]
) -> None:
    place, has_lungs = anatomy_places(anatomy, tokens, places)
    assert has_lungs.all() and place.min() >= 0 and place.max() < places[0] * places[1]
    for film in range(6):
        assert place[film].tolist() == slow_places(anatomy[film], tokens, places)
    hazy = anatomy[:4] * 0.7 + 0.02  # as a network says it
    place, _ = anatomy_places(hazy, tokens, places)
    assert [place[film].tolist() for film in range(4)] == [slow_places(hazy[film], tokens, places) for film in range(4)]
    assert torch.equal(anatomy_places(anatomy[5:7], tokens, places)[0], anatomy_places(anatomy, tokens, places)[0][5:7])


@pytest.fixture(scope="module")
def anatomy() -> Tensor:
    batch = draw_batch(4, range(24), 64, normal_share=1.0)
    return torch.from_numpy(batch.anatomy).float()


def test_the_boxes_of_a_typical_chest_are_at_their_places() -> None:
    """A lung's corner tokens lie in the corner cells of its typical box, wherever the lung lies."""
    boxes = {"right": (0.05, 0.3, 0.3, 0.9), "left": (0.5, 0.95, 0.2, 0.7), "heart": (0.3, 0.5, 0.4, 0.8)}
    place, has_lungs = anatomy_places(maps_of(boxes, 128), (32, 32), (32, 32))
    assert has_lungs.all()
    for number, (right, left, top, bottom) in enumerate(boxes.values()):
        inside = place.view(32, 32)[math.ceil(32 * top) : int(32 * bottom), math.ceil(32 * right) : int(32 * left)]
        rows, columns = inside // 32, inside % 32
        for cells, (low, high) in ((columns, TYPICAL_BOXES[number][:2]), (rows, TYPICAL_BOXES[number][2:])):
            assert abs(int(cells.min()) - 32 * low) <= 2 and abs(int(cells.max()) - 32 * high) <= 2
        assert (columns[:, 1:] >= columns[:, :-1]).all() and (rows[1:] >= rows[:-1]).all()


@pytest.mark.parametrize(("shift", "zoom"), [((0, 4), 1.0), ((-4, 0), 1.0), ((4, -4), 1.0), ((0, 0), 0.8)])
def test_the_same_anatomy_keeps_its_place_when_film_and_maps_move(
    anatomy: Tensor, shift: tuple[int, int], zoom: float
) -> None:
    """Each token of a moved film lies where the token nearest to it lay before, up to one cell of rounding."""
    tokens = (16, 16)
    theta = torch.tensor([[1 / zoom, 0, -shift[1] / 32 / zoom], [0, 1 / zoom, -shift[0] / 32 / zoom]])
    grid = F.affine_grid(theta.expand(len(anatomy), -1, -1), list(anatomy.shape), align_corners=False)
    moved = F.grid_sample(anatomy, grid, padding_mode="zeros", align_corners=False)
    before, after = (anatomy_places(maps, tokens, GRID)[0].view(-1, *tokens) for maps in (anatomy, moved))
    same, near, every = 0, 0, 0
    inside = moved[:, :8].sum(dim=1, keepdim=True)
    within = F.adaptive_avg_pool2d(inside, tokens)[:, 0] > 0.9
    for row in range(16):
        for column in range(16):
            y, x = (((at + 0.5) * 4 - 32 - by) / zoom + 32 for at, by in ((row, shift[0]), (column, shift[1])))
            was = before[:, min(max(int(y // 4), 0), 15), min(max(int(x // 4), 0), 15)][within[:, row, column]]
            now = after[:, row, column][within[:, row, column]]
            far = torch.maximum((was // 8 - now // 8).abs(), (was % 8 - now % 8).abs())
            same, near, every = same + int((far == 0).sum()), near + int((far <= 1).sum()), every + len(now)
    assert every > 1000 and near / every > 0.97 and same / every > (0.9 if zoom == 1 else 0.7)


def test_without_lungs_in_the_maps_they_are_found_as_before(drawn: tuple[Tensor, Tensor], anatomy: Tensor) -> None:
    images, _ = drawn
    some = anatomy.clone()
    some[1], some[2], some[3] = 0, 0.12, some[3] * (torch.arange(64) < 32)  # nothing, nothing yet, one lung
    place = chest_places(images, GRID, GRID, some)
    by_maps, has_lungs = anatomy_places(some, GRID, GRID)
    assert (~has_lungs).nonzero()[:, 0].tolist() == [1, 2, 3] and torch.equal(by_maps[1], OWN)
    otsu = chest_places(images, GRID, GRID)
    assert torch.equal(place[1:4], otsu[1:4]) and torch.equal(place[4:], by_maps[4:])
    assert (place[4:] != otsu[4:]).float().mean() > 0.1

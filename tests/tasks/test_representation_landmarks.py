from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.tasks.representation import Following, ShiftedFilms, following, landmark_places, landmark_tokens
from afire.weights import Weights, open_weights
from tests.figure_parts import smallest

BIG = ["image.size=64", "encoder.depth=1"]


class Patterned:
    """Films (64 px) that all show the same: each patch has its own grey stripes, with a little noise."""

    size, fit, voi = 64, "squash", "auto"

    def __init__(self, films: PackedFilms) -> None:
        self.manifest = films.manifest
        generator = torch.Generator().manual_seed(0)
        self.base = 0.2 + 0.6 * torch.rand(1, 1, 64, 64, generator=generator)
        self.noise = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.batch([row])[0]

    def batch(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        return (self.base + 0.01 * torch.randn(len(rows), 1, 64, 64, generator=self.noise)).clamp(0, 1)


def follow(backbone: Weights, films: Patterned) -> Following:
    places, rows = landmark_places((8, 8)), np.arange(12)
    tokens = landmark_tokens(backbone, films, rows, places.tokens((8, 8)))
    assert tokens.shape == (12, 9, 16)
    return following(backbone, films, rows, places, tokens)


def test_tokens_without_positions_follow_anatomy(films: PackedFilms) -> None:
    backbone = open_weights("random", smallest(BIG))
    backbone.trunk.pos_embed.zero_()
    shares = follow(backbone, Patterned(films))
    assert shares.anatomy > 0.99 and shares.place < 0.01


def test_tokens_that_see_nothing_follow_their_place(films: PackedFilms) -> None:
    backbone = open_weights("random", smallest(BIG))
    torch.nn.init.zeros_(backbone.trunk.patch_embed.proj.weight)
    shares = follow(backbone, Patterned(films))
    assert shares.place == 1.0 and shares.anatomy == 0.0 == shares.other


@pytest.mark.parametrize("side", [3, 4, 8, 14])
def test_nine_places_are_equally_spaced_and_inside(side: int) -> None:
    places = landmark_places((side, side))
    tokens = places.tokens((side, side))
    assert len(set(tokens)) == 9 and min(tokens) >= 0 and max(tokens) < side * side
    steps = np.diff(places.rows)
    assert steps[0] == steps[1] == places.spacing[0] >= 1
    assert abs(places.rows[0] - (side - 1 - places.rows[2])) <= 1  # as much room above as below


def test_a_tiny_grid_is_a_message() -> None:
    with pytest.raises(UserError, match="at least 3 x 3 tokens"):
        landmark_places((2, 2))


def test_shifted_films_only_move(packed: Path) -> None:
    films = PackedFilms(packed)
    moved = ShiftedFilms(films, 8, 0)
    assert torch.equal(moved[0][:, 8:], films[0][:, :-8]) and torch.equal(moved[0][:, :8], films[0][:, -8:])
    assert len(moved) == len(films) and moved.size == films.size

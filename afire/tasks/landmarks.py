"""Nine places of the film as landmarks: do tokens know where they are, and is it by anatomy or by position?

Every token carries its position, so even random weights keep the nine apart on films as they lie. The second question
needs films that are moved: then a landmark's place shows another landmark's anatomy, and the nearest of the nine
centres says which of the two a token follows. N films, L tokens, D width, 9 landmarks row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from afire.data.dataset import Films
from afire.data.manifest import Manifest
from afire.errors import UserError
from afire.model.positions import Grid
from afire.tasks.backbone import Backbone
from afire.tasks.features import feature_batches
from afire.tasks.figure_films import Rows

LANDMARKS = (
    "upper left", "upper middle", "upper right",
    "middle left", "centre", "middle right",
    "lower left", "lower middle", "lower right",
)  # fmt: skip


@dataclass(frozen=True)
class Places:
    """Rows and columns of the nine tokens, and how many tokens lie from one to the next."""

    rows: tuple[int, int, int]
    columns: tuple[int, int, int]
    spacing: tuple[int, int]

    def tokens(self, grid: Grid) -> list[int]:
        """Numbers of the nine tokens, row by row."""
        return [row * grid[1] + column for row in self.rows for column in self.columns]


@dataclass(frozen=True)
class Following:
    """What tokens of moved films are nearest to: the landmark at their place, that of their anatomy, others; shares."""

    place: float
    anatomy: float
    other: float


def landmark_places(grid: Grid) -> Places:
    """Nine equally spaced tokens around the middle of a grid of tokens."""
    if min(grid) < 3:
        raise UserError(
            f"nine landmarks need a grid of at least 3 x 3 tokens, but these films have {grid[0]} x {grid[1]}."
        )
    (first_row, down), (first_column, across) = _spread(grid[0]), _spread(grid[1])
    rows = (first_row, first_row + down, first_row + 2 * down)
    columns = (first_column, first_column + across, first_column + 2 * across)
    return Places(rows, columns, (down, across))


def _spread(side: int) -> tuple[int, int]:
    step = (side - 1) // 3 or 1
    return (side - 1 - 2 * step) // 2, step


def landmark_tokens(
    backbone: Backbone, films: Films, rows: Rows, tokens: Sequence[int], device: torch.device | None = None
) -> NDArray[np.float32]:
    """The tokens (N, 9, D) of the landmarks."""
    return np.concatenate(
        [batch[:, list(tokens)] for batch in feature_batches(backbone, films, rows, "tokens", device)]
    )


class ShiftedFilms:
    """Films moved by whole pixels; what leaves on one side comes in on the other, so that grey levels stay."""

    def __init__(self, films: Films, down: int, right: int) -> None:
        self.films, self.down, self.right = films, down, right
        self.manifest: Manifest = films.manifest
        self.size = films.size

    def __len__(self) -> int:
        return len(self.films)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.batch([row])[0]

    def batch(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.roll(self.films.batch(rows), (self.down, self.right), dims=(-2, -1))


def following(
    backbone: Backbone,
    films: Films,
    rows: Rows,
    places: Places,
    tokens_N9D: NDArray[np.float32],
    device: torch.device | None = None,
) -> Following:
    """Move films one landmark to the right, then one down, and see which landmark's centre each token is nearest to."""
    grid = (films.size // backbone.config.encoder.patch_size,) * 2
    patch = backbone.config.encoder.patch_size
    numbers = np.arange(9).reshape(3, 3)
    moves = (
        (0, places.spacing[1] * patch, numbers[:, 1:].ravel(), numbers[:, :-1].ravel()),
        (places.spacing[0] * patch, 0, numbers[1:].ravel(), numbers[:-1].ravel()),
    )
    mean, std = tokens_N9D.mean(axis=(0, 1)), tokens_N9D.std(axis=(0, 1)) + 1e-8
    centres_9D = _unit(((tokens_N9D - mean) / std).mean(axis=0))
    counts = np.zeros(3)
    for down, right, shown, anatomy in moves:
        moved = landmark_tokens(backbone, ShiftedFilms(films, down, right), rows, places.tokens(grid), device)
        nearest = (_unit((moved[:, shown] - mean) / std) @ centres_9D.T).argmax(axis=-1)
        at_place, of_anatomy = nearest == shown, nearest == anatomy
        counts += [at_place.sum(), of_anatomy.sum(), (~at_place & ~of_anatomy).sum()]
    place, by_anatomy, other = (counts / counts.sum()).tolist()
    return Following(place, by_anatomy, other)


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    unit: NDArray[np.float32] = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-8)
    return unit

"""Films that tests draw themselves."""

from __future__ import annotations

import torch


def drawn_lungs(height: int, width: int) -> torch.Tensor:
    """Where :func:`draw_films` puts the lungs, bool (height, width)."""
    y = ((torch.arange(height) + 0.5) / height)[:, None]
    x = ((torch.arange(width) + 0.5) / width)[None, :]
    return (((x - 0.5).abs() - 0.2) / 0.14) ** 2 + ((y - 0.45) / 0.3) ** 2 < 1


def draw_films(count: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """A bright body, two dark lungs, some noise: (count, 1, height, width), multiples of 1/255 from 0 to 1."""
    y = ((torch.arange(height) + 0.5) / height)[:, None]
    x = ((torch.arange(width) + 0.5) / width)[None, :]
    body = ((x - 0.5).abs() < 0.44) & (y > 0.05)
    film = 0.05 + 0.7 * body - 0.45 * drawn_lungs(height, width)
    films = film + 0.1 * torch.randn(count, height, width, generator=torch.Generator().manual_seed(seed))
    films = (films.clamp(0, 1) * 255).round() / 255
    films[:, 0, 0], films[:, -1, -1] = 0.0, 1.0
    return films[:, None]

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# The slow reference lives with the benchmarks, which measure against it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture
def films() -> torch.Tensor:
    """Six films (6, 1, 64, 64)."""
    from lesion_films import draw_films

    return draw_films(6, 64, 64)

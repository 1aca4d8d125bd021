"""Rows without pixels: what the loop counts epochs by where a method draws all of its films itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from afire.config import ImageConfig
from afire.data.manifest import make_manifest

if TYPE_CHECKING:
    import torch


class NumberedFilms:
    """Films 0 .. ``count`` - 1, each of them blank; a run that is given these has seen nobody's film."""

    def __init__(self, count: int, image: ImageConfig) -> None:
        names = [f"drawn/{number:06d}" for number in range(count)]
        self.manifest = make_manifest(pd.DataFrame({"image": names}), Path(), {"builder": "numbered"})
        self.size, self.fit, self.voi = image.size, image.fit, image.voi

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.batch([row])[0]

    def batch(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        """(B, 1, S, S), all zero."""
        import torch

        return torch.zeros(len(rows), 1, self.size, self.size)

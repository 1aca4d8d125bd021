"""Films for the audit's tests: a chest in a few strokes, different for every number drawn, in seconds for hundreds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image

from afire.data.audit.checks import chest_template
from afire.data.audit.measure import THUMB_SIDE
from afire.data.manifest import Manifest, make_manifest


def draw_chest(
    rng: np.random.Generator, height: int = 96, width: int = 96, likeness: float = 1.0
) -> NDArray[np.float32]:
    """A film (H, W) in [0,1]: the template plus a smooth field of the film's own, plus grain."""
    chest = chest_template().reshape(THUMB_SIDE, THUMB_SIDE)
    field = _resize(rng.normal(0, 1, (7, 7)), THUMB_SIDE, THUMB_SIDE)
    small = likeness * chest / chest.std() + 0.6 * field / field.std()
    film = 0.5 + 0.13 * _resize(small, height, width) + rng.normal(0, 0.01, (height, width))
    return np.clip(film, 0.02, 0.98).astype(np.float32)


def _resize(values: NDArray[Any], height: int, width: int) -> NDArray[np.float32]:
    image = Image.fromarray(values.astype(np.float32)).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def save(film: NDArray[np.float32], path: Path, **options: Any) -> None:
    """Write at eight bits, in the format of the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.round(film * 255).astype(np.uint8)).save(path, **options)


def draw_set(root: Path, count: int, seed: int = 0, **columns: Any) -> Manifest:
    """``count`` different films with a patient for each two of them, and further columns of the manifest."""
    rng = np.random.default_rng(seed)
    names = [f"film{number:03d}.png" for number in range(count)]
    for name in names:
        save(draw_chest(rng), root / name)
    table = {"image": names, "patient": [f"p{number // 2}" for number in range(count)], **columns}
    return make_manifest(pd.DataFrame(table), root)

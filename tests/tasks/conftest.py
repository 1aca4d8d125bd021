"""A pack of small drawn films with a finding that can be seen, and settings of the smallest encoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from afire.config import Config
from afire.data.manifest import make_manifest
from afire.data.pack import PackedFilms, PackSettings, pack
from afire.settings import load_config

SMALLEST = ["image.size=32", "encoder.width=16", "encoder.depth=1", "encoder.heads=2", "encoder.patch_size=8"]


def draw_films(folder: Path, count: int = 120, size: int = 32) -> pd.DataFrame:
    """Smooth random films, every other one with a bright blob; two films a patient; the last quarter is for testing.

    ``Blob`` is the finding, ``Rare`` one in ten and unknown in every seventh film. Films with a blob say that their
    originals were larger.
    """
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True)
    names = [f"film{index:03d}.png" for index in range(count)]
    blob = np.array([(index // 2) % 2 for index in range(count)], float)
    across = np.linspace(-1, 1, size)
    for name, present in zip(names, blob, strict=True):
        coarse = Image.fromarray(rng.random((5, 5), np.float32)).resize((size, size), Image.Resampling.BICUBIC)
        x, y = rng.uniform(-0.1, 0.1, 2)
        spot = np.exp(-((across[None] - x) ** 2 + (across[:, None] - y) ** 2) / 0.05)
        film = 0.4 * np.asarray(coarse) + 0.6 * present * spot
        Image.fromarray((np.clip(film, 0, 1) * 255).astype(np.uint8)).save(folder / name)
    index = np.arange(count)
    rare = np.where(index % 7 == 3, np.nan, (index % 10 == 0).astype(float))
    return pd.DataFrame(
        {
            "image": names,
            "patient": [f"p{number // 2:03d}" for number in index],
            "normal": 1 - blob,
            "split": np.where(index < 3 * count // 4, "train", "test"),
            "label:Blob": blob,
            "label:Rare": rare,
            "meta:orig_width": 1000 + 200 * blob + rng.normal(0, 80, count),
            "meta:orig_height": 900.0,
        }
    )


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of 120 films; read only."""
    folder = tmp_path_factory.mktemp("films")
    table = draw_films(folder / "films")
    pack(make_manifest(table, folder / "films"), folder / "pack", PackSettings(size=32), workers=1)
    return folder / "pack"


@pytest.fixture(scope="session")
def films(packed: Path) -> PackedFilms:
    return PackedFilms(packed)


@pytest.fixture(scope="session")
def smallest() -> Config:
    return load_config("tiny", overrides=SMALLEST)

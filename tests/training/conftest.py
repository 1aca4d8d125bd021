"""A pack of small drawn films, and settings for runs of seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from afire.config import Config
from afire.data.manifest import make_manifest
from afire.data.pack import PackSettings, pack
from afire.settings import load_config

SMALLEST = [
    "image.size=32",
    "encoder.width=16",
    "encoder.depth=1",
    "encoder.heads=2",
    "encoder.patch_size=8",
    "head.hidden=16",
    "head.bottleneck=8",
    "head.clusters=8",
    "decoder.width=16",
    "decoder.heads=2",
    "lesions.size_min=30",
    "training.batch_size=8",
    "training.epochs=3",
    "training.warmup_epochs=1",
    "run.picture_epochs=0",
]


def draw_pack(folder: Path, count: int = 40, size: int = 32) -> Path:
    """Smooth random films, three of four normal, the last fifth a test part; returns the pack's folder."""
    rng = np.random.default_rng(3)
    (folder / "films").mkdir(parents=True)
    names = [f"film{index:03d}.png" for index in range(count)]
    for name in names:
        coarse = Image.fromarray(rng.random((5, 5), np.float32)).resize((size, size), Image.Resampling.BICUBIC)
        Image.fromarray((np.clip(np.asarray(coarse), 0, 1) * 255).astype(np.uint8)).save(folder / "films" / name)
    normal = [float(index % 4 != 0) for index in range(count)]
    split = ["test" if index >= count * 4 // 5 else "train" for index in range(count)]
    table = pd.DataFrame({"image": names, "normal": normal, "split": split})
    pack(make_manifest(table, folder / "films"), folder / "pack", PackSettings(size=size), workers=1)
    return folder / "pack"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return draw_pack(tmp_path / "data")


@pytest.fixture
def smallest() -> Callable[..., Config]:
    return lambda *overrides: load_config("tiny", overrides=[*SMALLEST, *overrides])

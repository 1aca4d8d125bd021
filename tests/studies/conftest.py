"""A pack of small drawn films with a finding that can be seen, and settings of the smallest networks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from afire.config import Config
from afire.data.manifest import make_manifest
from afire.data.pack import PackSettings, pack
from afire.settings import load_config
from tests.tasks.conftest import draw_films

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
    "training.batch_size=8",
    "training.epochs=1",
]


def draw_pack(folder: Path, count: int = 64, builder: str = "drawn", size: int = 32) -> Path:
    """Films with and without a blob, packed; ``builder`` is where their manifest says that it comes from."""
    table = draw_films(folder / "films", count)
    manifest = make_manifest(table, folder / "films", {"builder": builder})
    pack(manifest, folder / "pack", PackSettings(size=size), workers=1)
    return folder / "pack"


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return draw_pack(tmp_path_factory.mktemp("ablate"))


@pytest.fixture(scope="session")
def smallest() -> Callable[..., Config]:
    return lambda *overrides: load_config("tiny", overrides=[*SMALLEST, *overrides])

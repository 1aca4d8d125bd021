"""A run on a pack in shards is the run on the pack in one array."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from afire.config import Config
from afire.data.manifest import read_manifest
from afire.data.pack import PackedFilms, PackSettings
from afire.data.shards import ShardedPack, pack_sharded
from afire.training.pretrain import pretrain
from tests.training.test_loop import metrics, weights


@pytest.mark.slow
def test_training_is_bit_identical_in_any_number_of_shards(
    packed: Path, smallest: Callable[..., Config], tmp_path: Path
) -> None:
    manifest = read_manifest(packed / "manifest.parquet")
    config = smallest("training.epochs=1", "lesions.views=2")
    folders = {"whole": packed}
    for count in (1, 7, 64):
        folders[str(count)] = tmp_path / f"pack{count}"
        pack_sharded(ShardedPack(manifest, folders[str(count)], PackSettings(size=32), count, workers=1))
    runs = []
    for name, folder in folders.items():
        pretrain(config, PackedFilms(folder), tmp_path / name)
        rows = metrics(tmp_path / name)
        losses = [(row["step"], row["total"], row["gradient_norm"]) for row in rows if "total" in row]
        runs.append((losses, weights(tmp_path / name)))
    assert len(runs[0][0]) > 2
    for losses, tensors in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(tensors[name], runs[0][1][name]) for name in runs[0][1])

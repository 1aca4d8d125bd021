"""Features in shards: each computed by itself, on any machine; the finish writes the file that one process writes.

    OUT.shards/features-00003-of-00064.npy    (n, D) or (n, L, D) float32
    OUT.shards/features-00003-of-00064.json   its record

Shards hold whole batches, so that every batch is that of one process, and so are the bytes of ``OUT``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afire.cluster.engine import do_shards
from afire.cluster.shards import Do, Shard, Where, Work, all_shards
from afire.cluster.store import ShardStore, begun_count
from afire.config import Config
from afire.data.pack import Films, open_films
from afire.errors import UserError
from afire.tasks.features import FEATURE_BATCH, Pooling, describe_features, feature_batches, write_batches
from afire.weights import Weights, open_weights, pick_device

_AGAIN = "`afire embed --shard`"
_STEM, _SUFFIX = "features", ".npy"


@dataclass(frozen=True)
class EmbedTask:
    """Which features of which films go to ``out``; ``part`` is ``all`` or a subset that the manifest lists."""

    weights: str
    data: Path
    out: Path
    root: Path | None = None
    pooling: Pooling = "mean"
    network: str | None = None
    part: str = "all"
    seed: int = 0
    config: Config | None = None
    device: str = "auto"

    def open(self) -> tuple[Weights, Films, NDArray[np.int64]]:
        """The weights, the films, and the rows that are asked for."""
        backbone = open_weights(self.weights, self.config, network=self.network, seed=self.seed)
        image = backbone.config.image
        films = open_films(self.data, self.root, image.size, image.fit, image.voi)
        rows = np.arange(len(films))
        if self.part != "all":
            rows = np.flatnonzero(films.manifest.table["split"] == self.part)
            if len(rows) == 0:
                raise UserError(f"the manifest lists no {self.part} films.")
        return backbone, films, rows

    @property
    def shards_folder(self) -> Path:
        """Where shards are kept until the finish."""
        return self.out.with_name(f"{self.out.name}.shards")


def embed_shards(task: EmbedTask, shards: Sequence[Shard], where: Where | None = None) -> int:
    """Compute ``shards``; returns the number of films, without those of shards that were finished before."""
    paths = {"data": task.data.absolute(), "out": task.out.absolute(), "root": task.root and task.root.absolute()}
    weights = Path(task.weights).absolute() if Path(task.weights).exists() else task.weights
    settings = {**vars(task), **paths, "weights": str(weights)}
    work = Work("features", embedder, settings, keeps=True, gpus=1 if task.device == "cuda" else 0)
    return do_shards(work, shards, where)


def embedder(settings: Mapping[str, Any]) -> Do:
    """The function that computes a shard, with weights and films already open."""
    task = EmbedTask(**settings)
    backbone, films, rows = task.open()
    device = pick_device(task.device)

    def embed_one(shard: Shard, _: Any) -> int:
        store, shape = _store(task, backbone, films, rows, shard.count)
        if store.read(shard) is not None:
            return 0
        mine = store.rows(shard)

        def fill(path: Path) -> list[dict[str, Any]]:
            shard_rows = rows[mine.start : mine.stop]
            _write_array(
                path, feature_batches(backbone, films, shard_rows, task.pooling, device), (len(mine), *shape[1:])
            )
            return [{"row": row, "image": store.names[row]} for row in mine]

        store.write(shard, fill)
        return len(mine)

    return embed_one


def finish_features(task: EmbedTask, count: int) -> tuple[int, ...]:
    """Write ``out`` from its shards and remove them; missing, doubled or foreign rows are refused and named."""
    backbone, films, rows = task.open()
    store, shape = _store(task, backbone, films, rows, count)
    store.finish(_AGAIN)
    _, about = describe_features(backbone, films, len(rows), task.pooling)
    write_batches(task.out, _stored_batches(store), films, rows, shape, about)
    shutil.rmtree(store.folder, ignore_errors=True)
    return shape


def begun_features(task: EmbedTask) -> int:
    """The number of shards of a file of features that was begun."""
    return begun_count(task.shards_folder, _STEM)


def _store(
    task: EmbedTask, backbone: Weights, films: Films, rows: NDArray[np.int64], count: int
) -> tuple[ShardStore, tuple[int, ...]]:
    shape, about = describe_features(backbone, films, len(rows), task.pooling)
    names = films.manifest.table["image"].iloc[rows].tolist()
    identity = {**about, "part": task.part, "shards": count}
    return ShardStore(task.shards_folder, _STEM, _SUFFIX, count, identity, names, FEATURE_BATCH), shape


def _write_array(path: Path, batches: Iterator[NDArray[np.float32]], shape: tuple[int, ...]) -> None:
    """As ``np.save`` writes, batch by batch; not through a map: on a full disk it would end the process."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)), "fortran_order": False, "shape": shape}
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for batch in batches:
            stream.write(batch.tobytes())


def _stored_batches(store: ShardStore) -> Iterator[NDArray[np.float32]]:
    for shard in all_shards(store.count):
        rows = len(store.rows(shard))
        features = np.load(store.data(shard), mmap_mode="r", allow_pickle=False) if rows else np.empty(0, np.float32)
        for start in range(0, rows, FEATURE_BATCH):
            yield np.array(features[start : start + FEATURE_BATCH])

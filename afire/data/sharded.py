"""The array of a pack in shards, read as if it were one: rows in the manifest's order, shards mapped when asked for.

DIR/images-00003-of-00064.npy    films first to end of the manifest, in its order
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from afire.cluster.shards import Shard, all_shards
from afire.errors import UserError

STEM, SUFFIX = "images", ".npy"
_MOST_MAPPED = 256  # shards: each keeps a file open


def shard_file(folder: Path, shard: Shard) -> Path:
    """The array of a shard, or the link to it."""
    return folder / f"{STEM}-{shard.name}{SUFFIX}"


class ShardedArray:
    """Indexed by a row, or by an array of rows in any order, like the memory map of one array."""

    def __init__(self, folder: Path, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.folder, self.shape, self.dtype = folder, shape, dtype
        self._shards = all_shards(count)
        self._rows = [shard.rows(shape[0]) for shard in self._shards]
        self._ends = np.array([rows.stop for rows in self._rows])
        self._mapped: dict[int, np.ndarray] = {}
        missing = [shard for shard in self._shards if not shard_file(folder, shard).exists()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            file = shard_file(folder, missing[0])
            raise UserError(f"{file}{more} cannot be found; mount the disk that it lies on, or pack again.")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | np.ndarray) -> np.ndarray:
        if isinstance(rows, int | np.integer):
            place = int(np.searchsorted(self._ends, rows, side="right"))
            row: np.ndarray = self._map(place)[rows - self._rows[place].start]
            return row
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for place, asked in self._by_shard(rows):
            found[asked] = self._map(place)[rows[asked] - self._rows[place].start]
        return found

    def _by_shard(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Shards, and where in ``rows`` theirs stand."""
        places = np.searchsorted(self._ends, rows, side="right")
        for place in np.unique(places).tolist():
            yield place, np.flatnonzero(places == place)

    def _map(self, place: int) -> np.ndarray:
        if (known := self._mapped.get(place)) is not None:
            return known
        file = shard_file(self.folder, self._shards[place])
        try:
            mapped: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{file} cannot be mapped ({error}); pack again.") from None
        shape = (len(self._rows[place]), *self.shape[1:])
        if mapped.shape != shape or mapped.dtype != self.dtype:
            raise UserError(f"{file} has shape {mapped.shape}, which is not what pack.json says; pack again.")
        if len(self._mapped) >= _MOST_MAPPED:
            self._mapped.pop(next(iter(self._mapped)), None)
        self._mapped[place] = mapped
        return mapped

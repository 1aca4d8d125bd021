"""The files of a pack: digests of its films, its array in shards, and the journal by which it is continued.

A digest stands for a film: of its source file's bytes, or of its pixels in a pack. It tells later whether a film is
still what it was. Bytes are compared, not sizes and times: a time of change says when a film was taken, which must stay
private, and copying changes it. Reading a file takes a small share of the time that decoding it does.

DIR/images-00003-of-00064.npy holds films first to end of the manifest, in its order. Shards are read as if they were
one array, and mapped when a row is asked for.

The journal of a pack says by row what was packed: both digests, or why the film was skipped. They are compared with
what is there now, because files change and disks fail.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from afire.cluster.shards import Shard, all_shards
from afire.data.manifest import Manifest, inside_root
from afire.errors import UserError
from afire.files import sha256_bytes
from afire.progress import track

_READERS = 8
STEM, SUFFIX = "images", ".npy"
_MOST_MAPPED = 256  # shards: each keeps a file open
Noted = dict[str, str]
_NAMED = 3  # films in a message
logger = logging.getLogger("afire")


def file_digest(data: bytes) -> str:
    """What stands for the bytes of a film's file in packs and in the records of runs."""
    return sha256_bytes(data)[:24]


def pixel_digest(pixels: bytes | memoryview) -> str:
    """What stands for a film's pixels as they are stored in a pack."""
    return hashlib.blake2b(pixels, digest_size=12).hexdigest()


def source_digests(manifest: Manifest, rows: Sequence[int], what: str) -> list[str]:
    """Of the files of ``rows``, empty where there is none; ``what`` is shown with the progress."""
    return files_digests(manifest.root, manifest.table["image"].iloc[list(rows)].tolist(), what)


def files_digests(root: Path, names: Sequence[str], what: str) -> list[str]:
    """Of the files ``names`` in ``root``, empty where there is none; ``what`` is shown with the progress."""
    with ThreadPoolExecutor(_READERS) as readers:  # reading waits for the disk
        digests = readers.map(lambda name: _source_digest(root, name), names)
        return list(track(digests, what, len(names), "films"))


def _source_digest(root: Path, name: str) -> str:
    try:
        path = inside_root(root, name)
        status = path.stat()
        return _digest_of_file(path, status.st_size, status.st_mtime_ns)
    except (OSError, UserError):  # no such file, or a link out of the root: reading the film gives the message
        return ""


@lru_cache(maxsize=1 << 20)
def _digest_of_file(path: Path, _size: int, _modified: int) -> str:
    """Computed once for each film in a process: several seeds and folds need the same."""
    return file_digest(path.read_bytes())


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
        images = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for place, positions in self._by_shard(rows):
            images[positions] = self._map(place)[rows[positions] - self._rows[place].start]
        return images

    def _by_shard(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Shards, and where in ``rows`` theirs stand."""
        places = np.searchsorted(self._ends, rows, side="right")
        for place in np.unique(places).tolist():
            yield place, np.flatnonzero(places == place)

    def _map(self, place: int) -> np.ndarray:
        if (array := self._mapped.get(place)) is not None:
            return array
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


def still_packed(
    manifest: Manifest, arrays: Sequence[Path], shape: tuple[int, ...], dtype: np.dtype[Any], journal: Path
) -> dict[int, Noted]:
    """What the journal says by row, without films that must be packed again; those are named.

    The pixels are in the first of ``arrays`` that is there. One that is not of ``shape`` and ``dtype`` is damaged, and
    removed.
    """
    opened = (_open_array(path, shape, dtype) for path in arrays)
    images = next((images for images in opened if images is not None), None)
    if images is None:
        return {}
    noted = {row: entry for row, entry in _read_journal(journal).items() if 0 <= row < len(manifest)}
    again = _changed(manifest, images, noted)
    if again:
        names = manifest.table["image"].iloc[again[:_NAMED]].tolist()
        more = f" and {len(again) - _NAMED:,} more" if len(again) > _NAMED else ""
        logger.warning("not what was packed any more, and packed again: %s%s", ", ".join(names), more)
    return {row: entry for row, entry in noted.items() if row not in set(again)}


def _open_array(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray | None:
    try:
        images: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        if images.shape == shape and images.dtype == dtype:
            return images
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError):
        pass
    path.unlink()
    return None


def _read_journal(journal: Path) -> dict[int, Noted]:
    """Entries by row; later lines win, and a line truncated by a kill is left out."""
    entries: dict[int, Noted] = {}
    if not journal.exists():
        return entries
    for line in journal.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            entries[int(entry.pop("row"))] = entry
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return entries


def _changed(manifest: Manifest, images: np.ndarray, noted: Mapping[int, Noted]) -> list[int]:
    """Rows whose file has other bytes than those that were packed, or whose pixels are not those that were stored.

    A film whose file is gone stays as it is. Earlier versions did not note the file: theirs are packed again.
    """
    rows = sorted(row for row, entry in noted.items() if "digest" in entry)
    if not rows:
        return []
    sources = source_digests(manifest, rows, "comparing films")
    return [
        row
        for row, source in zip(rows, sources, strict=True)
        if (source and source != noted[row].get("file")) or pixel_digest(images[row].data) != noted[row]["digest"]
    ]

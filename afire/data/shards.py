"""Packing in shards (pack format 2), by any number of processes and machines that share a file system.

    DIR/begun.json                       films, settings and number of shards
    DIR/images-00003-of-00064.npy        the films of a shard, in the order of the manifest; or a link to another disk
    DIR/images-00003-of-00064.json       its record: the hash of the file, digests of every film, why films were skipped
    DIR/manifest.parquet, DIR/pack.json  written by the finish, which looks at every record

Which films are in a shard follows from the manifest and the number of shards. A shard is whole or not there: one that
is whole is skipped, unless the file of one of its films has changed since, as when a pack is made in one array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from afire.cluster.engine import do_shards
from afire.cluster.shards import Do, Shard, Where, Work, all_shards, check_count
from afire.cluster.store import ShardStore
from afire.data.manifest import Manifest
from afire.data.pack import (
    BEGUN,
    CHUNK,
    MANIFEST,
    PackSettings,
    PackSummary,
    chunk_results,
    identity,
    name_bad,
    refuse_other,
    write_summary,
)
from afire.data.pack_files import STEM, SUFFIX, files_digests, shard_file
from afire.errors import UserError
from afire.files import folder_lock, making_sense_of, read_json, require_own
from afire.processes import usable_cores
from afire.progress import progress

_AGAIN = "`afire data pack --shard`"


@dataclass(frozen=True)
class ShardedPack:
    """A pack in ``count`` shards of ``manifest`` in ``out``; new shards go to ``disks`` in turn, if there are any."""

    manifest: Manifest
    out: Path
    settings: PackSettings
    count: int
    on_error: Literal["skip", "stop"] = "stop"
    workers: int | None = None
    disks: Sequence[Path] = ()

    def begin(self) -> None:
        """Claim the folder; other films, settings or another number of shards there are refused."""
        check_count(self.count)
        first = shard_file(self.out, Shard(0, self.count)).name
        require_own(self.out, BEGUN, (MANIFEST, first))
        self.out.mkdir(parents=True, exist_ok=True)
        refuse_other(self.out, identity(self.manifest, self.settings, self.count))

    def pack(self, shards: Sequence[Shard], where: Where | None = None) -> int:
        """Pack ``shards``; how many films were packed, those of whole shards not counted."""
        where = where or Where()
        self.begin()
        settings = {
            "root": str(self.manifest.root.resolve()),
            "out": str(self.out.resolve()),
            "films": len(self.manifest),
            "identity": identity(self.manifest, self.settings, self.count),
            "settings": asdict(self.settings),
            "on_error": self.on_error,
            "workers": self.workers if where.engine == "local" else 1,
            "disks": [str(disk.resolve()) for disk in self.disks],
        }
        return do_shards(Work("packing", packer, settings, self._names_of), shards, where)

    def finish(self) -> PackSummary:
        """Write ``manifest.parquet`` and ``pack.json``; missing, doubled or foreign rows are refused and named."""
        self.begin()
        names = self.manifest.table["image"].tolist()
        mine = identity(self.manifest, self.settings, self.count)
        store = ShardStore(self.out, STEM, SUFFIX, self.count, mine, names)
        entries = store.finish(_AGAIN)
        with folder_lock(self.out, "the pack"):
            results = {entry["row"]: {key: entry[key] for key in entry if key != "image"} for entry in entries}
            return write_summary(self.manifest, self.out, self.settings, results, self.count)

    def _names_of(self, shard: Shard) -> list[str]:
        rows = shard.rows(len(self.manifest))
        names: list[str] = self.manifest.table["image"].iloc[rows.start : rows.stop].tolist()
        return names


def pack_sharded(job: ShardedPack, where: Where | None = None) -> PackSummary:
    """All shards, then the finish."""
    job.pack(all_shards(job.count), where)
    return job.finish()


def begun_shards(out: Path) -> int:
    """How many shards the pack that was begun in ``out`` has."""
    record = out / BEGUN
    if not record.exists():
        raise UserError(f"{out} holds no pack that was begun; pack its shards first.")
    begun = read_json(record)
    with making_sense_of(record, "delete that folder and pack again"):
        if begun.get("shards") is None:
            raise UserError(f"{out} holds a pack in one array; choose another --out for one in shards.")
        return int(begun["shards"])


def packer(job: Mapping[str, Any]) -> Do:
    """What packs a shard, given the names of its films."""
    settings = PackSettings(**job["settings"])
    root, out = Path(job["root"]), Path(job["out"])
    disks = [Path(disk) for disk in job["disks"]]
    workers = job["workers"] if job["workers"] is not None else usable_cores()

    def pack_one(shard: Shard, names: Sequence[str]) -> int:
        rows = shard.rows(job["films"])
        names_by_row = _OnlyThese(job["films"], dict(zip(rows, names, strict=True)))
        store = ShardStore(out, STEM, SUFFIX, shard.count, job["identity"], names_by_row, disks=disks)
        record = store.read(shard)
        if record is not None and not _changed(root, record["films"]):
            return 0
        store.write(shard, lambda path: _fill(path, root, names, rows, settings, job["on_error"], workers))
        return len(rows)

    return pack_one


class _OnlyThese(Sequence[str]):
    """The names of the rows of one shard, indexed by row; other names are not sent."""

    def __init__(self, total: int, names: Mapping[int, str]) -> None:
        self._total, self._names = total, names

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, row: Any) -> Any:
        return self._names[row]


def _changed(root: Path, films: Sequence[Mapping[str, str]]) -> bool:
    """Whether the file of a film is another one than was packed, or could not be. One that is gone stays."""
    sources = files_digests(root, [film["image"] for film in films], "comparing films")
    return any(source and source != film.get("file") for source, film in zip(sources, films, strict=True))


def _fill(
    path: Path,
    root: Path,
    names: Sequence[str],
    rows: range,
    settings: PackSettings,
    on_error: str,
    workers: int,
) -> list[dict[str, Any]]:
    """Write the array of a shard; an entry for each film, in order."""
    shape = (len(names), settings.size, settings.size)
    np.lib.format.open_memmap(path, "w+", settings.dtype, shape).flush()
    places = range(len(names))
    chunks = [list(places[start : start + CHUNK]) for start in range(0, len(names), CHUNK)]
    jobs = ((root, [names[place] for place in chunk], chunk, path, settings) for chunk in chunks)
    entries: dict[int, dict[str, str]] = {}
    with progress("packing", len(names), "films") as bar:
        for results in chunk_results(jobs, min(workers, len(chunks))):
            name_bad(results, names, root, on_error, "Whole shards are kept")
            entries.update(results)
            bar.advance(len(results))
    return [{"row": rows[place], "image": names[place], **entries[place]} for place in places]

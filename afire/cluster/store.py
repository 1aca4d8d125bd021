"""The files of shards: each is written beside, synced and renamed, and its record appears last.

    FOLDER/images-00003-of-00064.npy     what was computed
    FOLDER/images-00003-of-00064.json    the record: of what, which rows, the hash of the file

A shard without a record does not count. A temporary file carries host, process and a random word in its name, so that
any number of processes may write one shard at the same time: the last one replaces a file by the same bytes. What a
killed process left is removed by the next one that writes the shard on its machine, and by :meth:`ShardStore.finish`.

A shard may lie on another disk; a link in the folder then leads to it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afire.cluster.shards import Shard, all_shards, shard_of_name
from afire.errors import UserError
from afire.files import ORDINARY_MODE, names_path, sha256_file, sha256_text

FORMAT = 1
WRITING = ".writing-"  # prefix of files that are not yet whole
_READERS = 4
_NAMED = 3  # films in a message
Record = dict[str, Any]
Fill = Callable[[Path], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class ShardStore:
    """The shards of one result. ``identity`` is what all of them must have in common: films, settings, weights.

    ``names`` are the films by row, and shards hold whole pieces of ``unit`` rows.
    """

    folder: Path
    stem: str
    suffix: str
    count: int
    identity: Mapping[str, Any]
    names: Sequence[str]
    unit: int = 1
    disks: Sequence[Path] = ()

    def rows(self, shard: Shard) -> range:
        """The rows of a shard."""
        return shard.rows(len(self.names), self.unit)

    def data(self, shard: Shard) -> Path:
        """The file of a shard, or the link to it."""
        return self.folder / f"{self.stem}-{shard.name}{self.suffix}"

    def record(self, shard: Shard) -> Path:
        """The record of a shard."""
        return self.folder / f"{self.stem}-{shard.name}.json"

    def write(self, shard: Shard, fill: Fill) -> Record:
        """Let ``fill`` write the shard to the path it is given; it returns an entry for each row: row, image, more."""
        place = self._place(shard)
        with names_path(self.data(shard)):
            self.folder.mkdir(parents=True, exist_ok=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            self._remove_left(shard)
            record: Record = {}

            def write(path: Path) -> None:
                entries = list(fill(path))
                record.update(self._record_of(shard, path, entries))

            try:
                put(place, write)
                self._link(shard, place)
                put(self.record(shard), lambda path: _write_record(path, record))
            except FileNotFoundError:  # another process wrote this shard too, and its finish has swept our file away
                whole = self.read(shard)
                if whole is None:
                    raise
                return whole
        return record

    def read(self, shard: Shard) -> Record | None:
        """The record of a shard that is whole and ours; None where it must be computed."""
        record = _read_record(self.record(shard))
        if record is None or record.get("identity") != dict(self.identity) or not _same_file(self.data(shard), record):
            return None
        return record

    def finish(self, again: str) -> list[dict[str, Any]]:
        """Entries of all rows in order. Missing, doubled, foreign rows and damaged shards are refused and named.

        ``again`` is how a shard is computed, such as ``afire data pack --shard``. What killed processes left is
        removed.
        """
        wrong = _Wrong(self.names)
        entries: dict[int, dict[str, Any]] = {}
        whole: list[tuple[Shard, Record]] = []
        for file in sorted(self.folder.glob(f"{self.stem}-*-of-*.json")):
            shard, record = shard_of_name(file.name), _read_record(file)
            if shard is None or record is None:
                continue  # its rows are missing, then
            if shard.count != self.count or record.get("identity") != dict(self.identity):
                wrong.foreign_files.append(file.name)
                continue
            whole.append((shard, record))
            wrong.take(record["films"], self.rows(shard), entries)
        missing = [row for row in range(len(self.names)) if row not in entries]
        damaged = self._damaged(whole)
        wrong.refuse(missing, damaged, self, again)
        for folder in {self.folder, *self.disks, *(self._place(shard).parent for shard in all_shards(self.count))}:
            for leftover in folder.glob(f"{WRITING}{self.stem}-*-of-{self.count:05d}*"):
                leftover.unlink(missing_ok=True)
        return [entries[row] for row in range(len(self.names))]

    def shards_of(self, rows: Sequence[int]) -> list[Shard]:
        """The shards that some rows are in."""
        numbers = set(rows)
        return [shard for shard in all_shards(self.count) if not numbers.isdisjoint(self.rows(shard))]

    def _damaged(self, whole: Sequence[tuple[Shard, Record]]) -> list[Shard]:
        with ThreadPoolExecutor(_READERS) as readers:
            same = readers.map(lambda pair: _same_file(self.data(pair[0]), pair[1]), whole)
            return [shard for (shard, _), ok in zip(whole, same, strict=True) if not ok]

    def _record_of(self, shard: Shard, path: Path, entries: Sequence[Mapping[str, Any]]) -> Record:
        rows = self.rows(shard)
        assert [entry["row"] for entry in entries] == list(rows)
        return {
            "format": FORMAT,
            "identity": dict(self.identity),
            "shard": [shard.index, shard.count],
            "rows": [rows.start, rows.stop],
            "bytes": path.stat().st_size,
            "sha256": sha256_file(path),
            "films": [dict(entry) for entry in entries],
        }

    def _place(self, shard: Shard) -> Path:
        """Where the file itself lies: on a disk that was asked for, where its link leads, or in the folder."""
        data = self.data(shard)
        if self.disks:
            whose = sha256_text(json.dumps(dict(self.identity), sort_keys=True))[:12]
            return self.disks[shard.index % len(self.disks)] / f"{data.stem}.{whose}{self.suffix}"
        return data.resolve() if data.is_symlink() else data

    def _link(self, shard: Shard, place: Path) -> None:
        data = self.data(shard)
        if place == data or (data.is_symlink() and data.resolve() == place.resolve()):
            return
        link = _temporary(data)
        link.symlink_to(place.resolve())
        link.replace(data)

    def _remove_left(self, shard: Shard) -> None:
        """Remove files of a shard that ended processes of this machine left behind."""
        for name in (self._place(shard), self.record(shard)):
            for leftover in name.parent.glob(f"{WRITING}{name.name}-{_host()}-*"):
                if not _is_alive(leftover.name.removeprefix(f"{WRITING}{name.name}-{_host()}-").partition("-")[0]):
                    leftover.unlink(missing_ok=True)


class _Wrong:
    """Collects what is wrong with the rows of shards, for one message."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.foreign_files: list[str] = []
        self.foreign: list[str] = []
        self.doubled: list[str] = []

    def take(self, films: Sequence[dict[str, Any]], own: range, entries: dict[int, dict[str, Any]]) -> None:
        for entry in films:
            row, image = entry["row"], entry["image"]
            if not 0 <= row < len(self.names) or self.names[row] != image:
                self.foreign.append(image)
            elif row in entries or row not in own:
                self.doubled.append(image)
            else:
                entries[row] = entry

    def refuse(self, missing: Sequence[int], damaged: Sequence[Shard], store: ShardStore, again: str) -> None:
        problems = []
        if missing:
            where = _some([str(shard) for shard in store.shards_of(missing)])
            films = _some([self.names[row] for row in missing])
            problems.append(f"{len(missing):,} rows are missing ({films}): run {again} for {where}")
        if self.doubled:
            problems.append(f"{len(self.doubled):,} rows are there twice ({_some(self.doubled)})")
        if self.foreign_files or self.foreign:
            files = f"files of something else ({_some(self.foreign_files)})" if self.foreign_files else ""
            films = f"{len(self.foreign):,} foreign rows ({_some(self.foreign)})" if self.foreign else ""
            problems.append(f"there are {' and '.join(word for word in (files, films) if word)}: move them away")
        if damaged:
            where = _some([str(shard) for shard in damaged])
            problems.append(f"shards {where} are not what their records say: run {again} for them again")
        if problems:
            raise UserError(f"{store.folder} cannot be finished: {'; '.join(problems)}.")


def begun_count(folder: Path, stem: str) -> int:
    """The number of shards, by the records in the folder."""
    shards = (shard_of_name(file.name) for file in folder.glob(f"{stem}-*-of-*.json"))
    counts = {shard.count for shard in shards if shard is not None}
    if len(counts) != 1:
        content = "shards of different numbers" if counts else "no shards"
        raise UserError(f"{folder} holds {content}; say with --shards how many there are.")
    return counts.pop()


def put(path: Path, write: Callable[[Path], None]) -> None:
    """``write`` to a temporary file of this process alone, sync it and rename it to ``path``."""
    temporary = _temporary(path)
    try:
        write(temporary)
        temporary.chmod(ORDINARY_MODE)
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{WRITING}{path.name}-{_host()}-{os.getpid()}-{secrets.token_hex(6)}")


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) or "host"


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # not every file system syncs a folder
            raise
    finally:
        os.close(handle)


def _write_record(path: Path, record: Record) -> None:
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_record(path: Path) -> Record | None:
    """A record as it was written; None for one that is missing or damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        films = [(int(film["row"]), str(film["image"])) for film in record["films"]]
        whole = record["format"] == FORMAT and len(films) == record["rows"][1] - record["rows"][0]
        return record if whole else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _same_file(path: Path, record: Record) -> bool:
    try:
        return bool(path.stat().st_size == record["bytes"] and sha256_file(path) == record["sha256"])
    except (OSError, KeyError):
        return False


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more

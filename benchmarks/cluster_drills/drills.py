"""Drills of packing in shards on two raylets: whatever is killed or full, the pack at the end is that of one process.

Each drill gets a source of films, what one process makes of them, and a number; it raises :class:`DrillError` when a
bit differs, a film is missing or there twice, or a temporary file is left.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from fault_drills.commands import ENVIRONMENT, DrillError, afire, last_line
from fault_drills.full_disk import small_disk
from PIL import Image

from afire.cluster.shards import Where, all_shards
from afire.cluster.store import WRITING, ShardStore
from afire.data.manifest import read_manifest, write_manifest
from afire.data.pack import PackedFilms, PackSettings, identity, pack
from afire.data.pack_files import STEM, SUFFIX
from afire.data.shards import ShardedPack
from afire.data.sources.folders import build_folder
from cluster_drills.raylets import Raylets

SETTINGS = PackSettings(size=64)
_SECONDS = 300.0
_TRIES = 20
Found = dict[str, Any]


def draw_films(folder: Path, count: int, side: int) -> None:
    """Smooth films, no two alike: what they show does not matter here."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8))
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{number:04d}.png", compress_level=1)


@dataclass(frozen=True)
class Source:
    """Films, and the pack in one array that one process makes of them."""

    manifest: Path
    whole: Path
    shards: int

    @classmethod
    def draw(cls, folder: Path, films: int, side: int, shards: int) -> Source:
        draw_films(folder / "films", films, side)
        write_manifest(build_folder(folder / "films"), folder / "films.parquet")
        pack(read_manifest(folder / "films.parquet"), folder / "whole", SETTINGS, workers=1)
        return cls(folder / "films.parquet", folder / "whole", shards)

    def words(self, out: Path, address: str | None = None) -> list[str]:
        words = afire("data", "pack", "--data", self.manifest, "--out", out, "--size", SETTINGS.size)
        engine = ["--engine", "ray", "--address", address] if address is not None else ["--workers", "1"]
        return [*words, "--shards", str(self.shards), *engine, "--quiet"]

    def store(self, out: Path) -> ShardStore:
        manifest = read_manifest(self.manifest)
        mine = identity(manifest, SETTINGS, self.shards)
        return ShardStore(out, STEM, SUFFIX, self.shards, mine, manifest.table["image"].tolist())

    def check(self, out: Path) -> None:
        """Every bit, every film once, nothing beside."""
        parts = [np.load(file) for file in sorted(out.glob(f"{STEM}-*{SUFFIX}"))]
        same = len(parts) == self.shards and np.array_equal(np.concatenate(parts), np.load(self.whole / "images.npy"))
        if not same:
            raise DrillError(f"{out}: the shards are not the array of one process")
        films, one = PackedFilms(out), PackedFilms(self.whole)
        if films.manifest.hash != one.manifest.hash:
            raise DrillError(f"{out}: the manifest is not that of one process")
        if films.summary.hash != one.summary.hash or films.altered(range(len(films))):
            raise DrillError(f"{out}: films are missing, doubled or altered")
        if left := [path.name for path in out.iterdir() if path.name.startswith(".")]:
            raise DrillError(f"{out}: {left[0]} is left")


class Started:
    """A command under way, in a session of its own."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("wb") as stream:
            environment = {**os.environ, **{key: ENVIRONMENT[key] for key in ("OMP_NUM_THREADS", "COLUMNS")}}
            self._process = subprocess.Popen(
                words, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Until ``condition`` holds; False when the command ended before."""
        deadline = time.monotonic() + _SECONDS
        while self._process.poll() is None:
            if condition():
                return True
            if time.monotonic() > deadline:
                raise DrillError(f"nothing happened: {last_line(self.said)}")
            time.sleep(0.002)
        return False

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self, code: int = 0) -> None:
        try:
            found = self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise DrillError(f"hangs: {last_line(self.said)}") from None
        if found != code or "Traceback" in self.said:
            raise DrillError(f"ended with {found}: {self.said[-800:]}")

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")


def writers(out: Path) -> list[tuple[str, int]]:
    """Shard and process of everything that is being written."""
    pattern = re.compile(rf"{re.escape(WRITING)}{STEM}-(\d+)-of-.*{re.escape(SUFFIX)}-[^-]*-(\d+)-")
    found = [pattern.match(path.name) for path in out.glob(f"{WRITING}{STEM}-*{SUFFIX}-*")]
    return [(match[1], int(match[2])) for match in found if match]


def whole_shards(out: Path) -> int:
    return len(list(out.glob(f"{STEM}-*.json")))


class Packing(Thread):
    """All shards and the finish, by the driver that this process is; watched and disturbed by another thread."""

    def __init__(self, source: Source, raylets: Raylets, out: Path, copies: int = 1) -> None:
        super().__init__()
        self._job = ShardedPack(read_manifest(source.manifest), out, SETTINGS, source.shards)
        self._shards = [shard for shard in all_shards(source.shards) for _ in range(copies)]
        self._where = Where("ray", raylets.address)
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._job.pack(self._shards, self._where)
            self._job.finish()
        except BaseException as error:
            self._error = error

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Until ``condition`` holds; False when all was packed before."""
        while self.is_alive():
            if condition():
                return True
            time.sleep(0.002)
        return False

    def end(self) -> BaseException | None:
        """The error it ended with, if any."""
        self.join(_SECONDS)
        if self.is_alive():
            raise DrillError("packing hangs")
        return self._error

    def succeed(self) -> None:
        if (error := self.end()) is not None:
            raise DrillError(f"packing ended with {type(error).__name__}: {error}")


def shards_equal_one(source: Source, raylets: Raylets, out: Path, chance: random.Random) -> Found:
    """Nothing happens."""
    Packing(source, raylets, out).succeed()
    source.check(out)
    return {}


def worker_killed(source: Source, raylets: Raylets, out: Path, chance: random.Random) -> Found:
    """kill -9 to a worker that has begun to write a shard, and not ended."""
    packing, first, kills = Packing(source, raylets, out), chance.randrange(source.shards // 2), 0
    if packing.wait_for(lambda: whole_shards(out) >= first and bool(writers(out))):
        time.sleep(chance.uniform(0, 0.05))
        for _, pid in writers(out)[:1]:
            os.kill(pid, signal.SIGKILL)
            kills += 1
    packing.succeed()
    source.check(out)
    return {"kills inside a write": kills}


def two_on_one(source: Source, raylets: Raylets, out: Path, chance: random.Random) -> Found:
    """Every shard is given to two workers at once, one on each raylet."""
    both = set[str]()

    def look() -> bool:
        shards = [shard for shard, _ in writers(out)]
        both.update(shard for shard in shards if shards.count(shard) > 1)
        return False

    packing = Packing(source, raylets, out, copies=2)
    packing.wait_for(look)
    packing.succeed()
    source.check(out)
    return {"shards seen with two writers": len(both)}


def raylet_killed(source: Source, raylets: Raylets, out: Path, chance: random.Random) -> Found:
    """The second raylet and its workers are killed in the middle; it comes back for the next time."""
    middle = chance.randrange(1, source.shards // 2)

    def writes_there() -> bool:
        return whole_shards(out) >= middle and any(raylets.is_on_second(pid) for _, pid in writers(out))

    tries = 0
    while not (packing := Packing(source, raylets, out)).wait_for(writes_there):
        packing.succeed()  # the second raylet had not woken up yet: again, or nothing would be killed in the middle
        shutil.rmtree(out)
        if (tries := tries + 1) == _TRIES:
            raise DrillError("the second raylet never wrote a shard")
    raylets.kill_second()
    try:
        packing.succeed()
        source.check(out)
    finally:
        raylets.start_second()
    return {"kills inside a write": 1}


def driver_killed(source: Source, raylets: Raylets, out: Path, chance: random.Random) -> Found:
    """kill -9 to the command, which is then run again."""
    command = Started(source.words(out, raylets.address), out.with_suffix(".log"))
    middle = chance.randrange(0, source.shards - 1)
    in_the_middle = command.wait_for(lambda: whole_shards(out) >= middle and bool(writers(out)))
    command.kill()
    again = Started(source.words(out, raylets.address), out.with_suffix(".again.log"))
    again.end()
    source.check(out)
    return {"kills inside a write": int(in_the_middle)}


def disk_full(source: Source, raylets: Raylets, out: Path, chance: random.Random) -> Found:
    """A disk that has no room for all shards; then it has, and the same goes on with what is whole."""
    need = sum(file.stat().st_size for file in source.whole.glob("images.npy")) // 1024
    with small_disk(out, chance.randrange(need // 4, need)) as disk:
        folder = disk / "pack"
        error = Packing(source, raylets, folder).end()
        if not isinstance(error, OSError) or error.errno != errno.ENOSPC or not error.filename:
            raise DrillError(f"a full disk was not named: {error}")
        settle(folder)
        store = source.store(folder)
        whole = [shard for shard in all_shards(source.shards) if store.read(shard) is not None]
        kept = {shard: store.data(shard).stat().st_ino for shard in whole}
        if len(kept) != whole_shards(folder):
            raise DrillError("a shard has a record and is not whole")
        subprocess.run(["mount", "-o", f"remount,size={4 * need + 4096}k", str(disk)], check=True)
        Packing(source, raylets, folder).succeed()
        source.check(folder)
        if any(store.data(shard).stat().st_ino != inode for shard, inode in kept.items()):
            raise DrillError("a shard that was whole was written again")
    return {"shards kept": len(kept)}


def settle(out: Path) -> None:
    """Wait until shards that were under way when the driver gave up are whole, or given up too."""
    deadline = time.monotonic() + _SECONDS
    while writers(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)  # one that was waiting may begin now
    while writers(out) and time.monotonic() < deadline:
        time.sleep(0.05)


DRILLS: dict[str, Callable[[Source, Raylets, Path, random.Random], Found]] = {
    "64 shards are one array": shards_equal_one,
    "a worker killed inside a write": worker_killed,
    "two workers on one shard": two_on_one,
    "the second raylet killed in the middle": raylet_killed,
    "the driver killed and run again": driver_killed,
    "a disk that fills": disk_full,
}


def drill(name: str, source: Source, raylets: Raylets, folder: Path, times: int, seed: int) -> Iterator[Found]:
    """So many times; after each, what was seen so far, added up."""
    chance = random.Random(f"{seed} {name}")
    start, seen = time.monotonic(), dict[str, int]()
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(times):
        out = folder / f"{number:02d}"
        for key, value in DRILLS[name](source, raylets, out, chance).items():
            seen[key] = seen.get(key, 0) + value
        shutil.rmtree(out, ignore_errors=True)
        seconds = round(time.monotonic() - start)
        yield {"times": number + 1, "identical": number + 1, "shards": source.shards, "seen": seen, "seconds": seconds}

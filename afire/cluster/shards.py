"""Shards: which rows are in which, the work on them, and where it is done.

Shards are contiguous pieces in the order of the rows, fixed by the number of rows alone. What a shard needs is made
once a process: ``make(settings)`` opens weights and films and gives a function of a shard, which writes its file and
returns how many rows it computed (none when the shard was whole already). ``piece`` is what one shard alone needs, so
that no process is sent a list of all films.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from afire.errors import UserError

MOST = 4096  # shards: each is a file, and larger folders are slow to list
_NAME = re.compile(r"(\d{5})-of-(\d{5})")
Engine = Literal["local", "ray"]


@dataclass(frozen=True, order=True)
class Shard:
    """Shard ``index`` of ``count``, from 0 to ``count`` - 1."""

    index: int
    count: int

    @property
    def name(self) -> str:
        """``00003-of-00064``, as in the names of files."""
        return f"{self.index:05d}-of-{self.count:05d}"

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def rows(self, total: int, unit: int = 1) -> range:
        """Its rows of ``total``, in whole pieces of ``unit`` rows but for the last of all.

        Batches of ``unit`` films are then the same in any number of shards, and so is every bit computed from them.
        """
        pieces = -(-total // unit)
        first, end = (place * pieces // self.count * unit for place in (self.index, self.index + 1))
        return range(min(first, total), min(end, total))


def parse_shard(text: str) -> Shard:
    """``3/64`` -> shard 3 of 64."""
    index, slash, count = text.partition("/")
    if not slash or not index.strip().isdecimal() or not count.strip().isdecimal():
        raise UserError(f"--shard {text!r} is not a shard such as 3/64.")
    shard = Shard(int(index), check_count(int(count)))
    if shard.index >= shard.count:
        raise UserError(
            f"--shard {text}: shards are counted from 0, so the last of {shard.count} is {shard.count - 1}."
        )
    return shard


def check_count(count: int) -> int:
    """``count``, if it is a possible number of shards."""
    if not 1 <= count <= MOST:
        raise UserError(f"{count} shards: choose between 1 and {MOST:,}.")
    return count


def all_shards(count: int) -> list[Shard]:
    """Every shard of ``count``."""
    return [Shard(index, count) for index in range(check_count(count))]


def shard_of_name(name: str) -> Shard | None:
    """The shard in a file's name, if there is one."""
    match = _NAME.search(name)
    return Shard(int(match[1]), int(match[2])) if match else None


def shards_asked(count: int | None, shard: str | None, finish: bool = False) -> tuple[int | None, Shard | None]:
    """The number of shards and the chosen one, from ``--shards`` and ``--shard`` as they were typed."""
    chosen = parse_shard(shard) if shard is not None else None
    if finish and chosen is not None:
        raise UserError("--finish is for all shards together; leave out --shard.")
    if count is not None and chosen is not None and chosen.count != check_count(count):
        raise UserError(f"--shards {count} and --shard {chosen} speak of different numbers of shards.")
    return (chosen.count if chosen is not None else count if count is None else check_count(count)), chosen


Do = Callable[[Shard, Any], int]


def nothing(_: Shard) -> None:
    """For work whose shards need nothing of their own."""


@dataclass(frozen=True)
class Work:
    """``make`` is a function of a module, so that other machines find it; ``settings`` is plain data."""

    what: str  # on the screen meanwhile
    make: Callable[[Mapping[str, Any]], Do]
    settings: Mapping[str, Any]
    piece: Callable[[Shard], Any] = nothing
    keeps: bool = False  # whether ``make`` is worth keeping: a process of its own holds it for many shards
    gpus: int = 0  # for each such process


@dataclass(frozen=True)
class Where:
    """Who computes: this process, or Ray, started here or found at ``address``."""

    engine: Engine = "local"
    address: str | None = None
    processes: int | None = None

    def __post_init__(self) -> None:
        if self.address is not None and self.engine != "ray":
            raise UserError("--address is that of a Ray cluster: add --engine ray.")

"""Which rows are in which shard: contiguous pieces in the order of the rows, fixed by the number of rows alone."""

from __future__ import annotations

import re
from dataclasses import dataclass

from afire.errors import UserError

MOST = 4096  # shards: each is a file, and a folder of more is no pleasure
_NAME = re.compile(r"(\d{5})-of-(\d{5})")


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
    """``count`` if it is a number of shards that can be."""
    if not 1 <= count <= MOST:
        raise UserError(f"{count} shards: choose between 1 and {MOST:,}.")
    return count


def all_shards(count: int) -> list[Shard]:
    """Every shard of ``count``."""
    return [Shard(index, count) for index in range(check_count(count))]


def shard_of_name(name: str) -> Shard | None:
    """The shard that a file's name speaks of, if it does."""
    found = _NAME.search(name)
    return Shard(int(found[1]), int(found[2])) if found else None


def shards_asked(count: int | None, shard: str | None, finish: bool = False) -> tuple[int | None, Shard | None]:
    """``--shards`` and ``--shard`` as they were typed: the number of shards, and the one that is asked for."""
    one = parse_shard(shard) if shard is not None else None
    if finish and one is not None:
        raise UserError("--finish is for all shards together; leave out --shard.")
    if count is not None and one is not None and one.count != check_count(count):
        raise UserError(f"--shards {count} and --shard {one} speak of different numbers of shards.")
    return (one.count if one is not None else count if count is None else check_count(count)), one

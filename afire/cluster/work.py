"""Work that falls into shards, done here or on the machines of a Ray cluster.

What a shard needs is made once a process: ``make(settings)`` opens weights and films and gives a function of a shard,
which writes its file and returns how many rows it computed (none when the shard was whole already). ``piece`` is what
one shard alone needs to be told, so that nobody is sent a list of all films.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from afire.cluster.shards import Shard
from afire.errors import UserError
from afire.progress import progress

Engine = Literal["local", "ray"]
Do = Callable[[Shard, Any], int]


def nothing(_: Shard) -> None:
    """No shard needs more than all of them."""


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


def do_shards(work: Work, shards: Sequence[Shard], where: Where | None = None) -> int:
    """Compute ``shards``; how many rows were computed, those of whole shards not counted."""
    where = where or Where()
    if where.engine == "ray":
        from afire.cluster.ray_engine import do_on_ray

        return do_on_ray(work, shards, where.address, where.processes)
    do = work.make(work.settings)
    rows = 0
    with progress(work.what, len(shards), "shards") as bar:
        for shard in shards:
            rows += do(shard, work.piece(shard))
            bar.advance()
    return rows

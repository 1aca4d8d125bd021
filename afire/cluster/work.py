"""Work that falls into shards, and where it is done.

What a shard needs is made once a process: ``make(settings)`` opens weights and films and gives a function of a shard,
which writes its file and returns how many rows it computed (none when the shard was whole already). ``piece`` is what
one shard alone needs to be told, so that nobody is sent a list of all films.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from afire.cluster.shards import Shard
from afire.errors import UserError

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

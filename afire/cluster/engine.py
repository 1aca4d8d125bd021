"""Who computes shards: this process, one after another, or the machines of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence

from afire.cluster.shards import Shard
from afire.cluster.work import Where, Work
from afire.progress import progress, silenced


def do_shards(work: Work, shards: Sequence[Shard], where: Where | None = None) -> int:
    """Compute ``shards``; how many rows were computed, those of whole shards not counted."""
    where = where or Where()
    if where.engine == "ray":
        from afire.cluster.ray_engine import do_on_ray

        return do_on_ray(work, shards, where.address, where.processes)
    do = work.make(work.settings)
    if len(shards) == 1:  # which shows its films as it goes
        return do(shards[0], work.piece(shards[0]))
    rows = 0
    with progress(work.what, len(shards), "shards") as bar, silenced():
        for shard in shards:
            rows += do(shard, work.piece(shard))
            bar.advance()
    return rows

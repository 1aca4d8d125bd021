"""What Ray costs a shard, what ViT-B costs a film, and what follows from the two for a million films.

Nothing of a million films was run. The prediction takes times measured here and adds them up: machines like this one,
each with as many processes as cores, a file system that keeps up, and no process that waits for the slowest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from afire.cluster import engine
from afire.cluster.shards import Do, Shard, Work, all_shards
from afire.cluster.store import ShardStore
from afire.processes import usable_cores
from afire.progress import _Silent
from afire.settings import load_config
from afire.weights import open_weights

FILMS, A_SHARD, NODES = 1_000_000, 1_000, (1, 8, 64)
_EMPTY = 200  # shards that do nothing
_ROWS = 50_000  # of a finish


def do_nothing(_: Mapping[str, Any]) -> Do:
    """Work without work: what is left is Ray's."""
    return lambda shard, piece: 0


def ray_costs() -> dict[str, float]:
    """Seconds: Ray's start here, the first actor, and a shard that does nothing, as a task and on an actor."""
    start = time.perf_counter()
    with engine.connected(None, 1) as ray:
        started = time.perf_counter() - start
        names = [f"images/film{number:07d}.png" for number in range(A_SHARD)]

        def seconds(shards: int, keeps: bool) -> float:
            work = Work("", do_nothing, {}, lambda shard: names, keeps)  # a task is told its films, as in packing
            begun = time.perf_counter()
            run = engine._on_actors if keeps else engine._as_tasks
            run(ray, work, all_shards(shards), 1, _Silent())
            return time.perf_counter() - begun

        first_task, first_actor = seconds(1, False), seconds(1, True)
        task = (seconds(_EMPTY, False)) / _EMPTY
        actor = seconds(_EMPTY, True) / _EMPTY  # with the start of the actor
    return {
        "start of Ray": started,
        "first task": first_task,
        "first actor": first_actor,
        "a shard as a task": task,
        "a shard on an actor, its start shared by 200": actor,
    }


def vit_b_seconds(films: int) -> dict[str, Any]:
    """Seconds that ViT-B takes for a film on one core: the forward pass alone, the least that scoring can cost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        backbone = open_weights("random", load_config("paper"))
        size, encoder = backbone.config.image.size, backbone.config.encoder
        images = torch.rand(8, 1, size, size, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            backbone.trunk(backbone.normalise(images))
            start = time.perf_counter()
            for _ in range(max(1, films // len(images))):
                backbone.trunk(backbone.normalise(images))
            taken = time.perf_counter() - start
    finally:
        torch.set_num_threads(before)
    counted = max(1, films // len(images)) * len(images)
    shape = {"size": size, "patch": encoder.patch_size, "width": encoder.width, "depth": encoder.depth}
    return {"films": counted, "seconds a film": taken / counted, **shape}


def finish_seconds(folder: Path) -> float:
    """Seconds a film that a finish takes: every record read, every file hashed, every row looked for."""
    names = [f"images/film{row:07d}.png" for row in range(_ROWS)]
    store = ShardStore(folder, "part", ".npy", _ROWS // A_SHARD, {"films": "drawn"}, names)

    def fill(path: Path, shard: Shard) -> list[dict[str, Any]]:
        rows = store.rows(shard)
        with path.open("wb") as stream:
            np.save(stream, np.zeros((len(rows), 192), np.float32))
        return [{"row": row, "image": names[row], "digest": "0" * 24, "file": "0" * 24} for row in rows]

    for shard in all_shards(store.count):
        store.write(shard, lambda path, shard=shard: fill(path, shard))  # type: ignore[misc]
    start = time.perf_counter()
    store.finish("")
    return (time.perf_counter() - start) / _ROWS


def measure(folder: Path, films: int) -> dict[str, Any]:
    """All parts, the share of Ray at a thousand films a shard, and the prediction."""
    scoring = vit_b_seconds(films)
    ray, finish = ray_costs(), finish_seconds(folder)
    a_film, a_shard = (
        scoring["seconds a film"],
        max(ray["a shard as a task"], ray["a shard on an actor, its start shared by 200"]),
    )
    return {
        "ray, seconds": {name: round(value, 4) for name, value in ray.items()},
        "ViT-B": {**scoring, "seconds a film": round(a_film, 4)},
        "finish, seconds a film": round(finish, 8),
        "share of Ray in a shard of 1,000 films": a_shard / (a_shard + A_SHARD * a_film),
        "share of Ray with its start in a shard of 1,000 films": (a_shard + ray["start of Ray"] + ray["first actor"])
        / (a_shard + ray["start of Ray"] + ray["first actor"] + A_SHARD * a_film),
        "prediction": predict(a_film, a_shard, ray["start of Ray"] + ray["first actor"], finish),
    }


def predict(a_film: float, a_shard: float, start: float, finish: float) -> list[dict[str, Any]]:
    """Hours for a million films. The driver hands out shards one after another, and one process finishes."""
    rows = []
    shards = FILMS // A_SHARD
    for nodes in NODES:
        processes = nodes * usable_cores()
        rounds = -(-shards // processes)  # the last ones are waited for
        scoring = rounds * A_SHARD * a_film
        handing = max(rounds * a_shard, shards * a_shard / processes)
        hours = (start + scoring + handing + FILMS * finish) / 3600
        rows.append(
            {
                "nodes": nodes,
                "processes": processes,
                "rounds of shards": rounds,
                "hours": round(hours, 2),
                "of it scoring": round(scoring / 3600, 2),
                "of it Ray": round((start + handing) / 3600, 4),
                "of it the finish": round(FILMS * finish / 3600, 4),
            }
        )
    return rows

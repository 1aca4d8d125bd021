"""Which films a figure shows: a part that no training has seen, and a random draw from it that can be repeated."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from afire.data.dataset import Films
from afire.data.splits import Split, films_hash
from afire.errors import UserError
from afire.tasks.features import data_content_hash
from afire.tasks.runs import plan_runs

Part = Literal["test", "val", "train", "all"]
Rows = NDArray[np.int64]


def part_rows(films: Films, part: Part, split: Split | None = None) -> tuple[Rows, str | None]:
    """Rows of a part and the hash of the split it belongs to.

    The parts are those that the tasks use with seed 0: a split file's, else the manifest's lists, else a split drawn
    by patient. ``all`` is every film, for a set that is foreign to the weights.
    """
    if part == "all":
        return np.arange(len(films)), None
    run = plan_runs(films.manifest, split, [0])[0]
    return np.asarray(run.rows[part], np.int64), run.split.hash


def draw_rows(rows: Rows, most: int, generator: np.random.Generator) -> Rows:
    """At most ``most`` of ``rows``, each as likely as any other, in the order of the manifest."""
    if most < 1:
        raise UserError(f"--films {most} leaves nothing to draw; give at least 1.")
    return np.sort(generator.permutation(rows)[:most])


def describe_films(films: Films, name: str, part: str, split_hash: str | None, rows: Rows, of: int) -> dict[str, Any]:
    """What a figure's JSON says about its films: ``rows`` were drawn from ``of`` candidates."""
    return {
        "name": name,
        "hash": data_content_hash(films),
        "part": part,
        "split_hash": split_hash,
        "films": len(rows),
        "drawn_from": of,
        "films_hash": films_hash(films.manifest, {"figure": rows}),
        "size": films.size,
    }

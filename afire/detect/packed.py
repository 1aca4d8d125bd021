"""A detector over the films of a pack, in shards: by one process, by many machines, with the same bytes at the end.

    OUT/shards/results-00003-of-00064.jsonl   a line for each film of a shard, as in the journal of a run over a folder
    OUT/shards/results-00003-of-00064.json    its record
    OUT/results.jsonl                         written by the finish, which then removes the shards

A batch is the same films in any number of shards, and is computed by one thread, so that its bits are the same too.
Films are used as they are packed: nothing is decoded, and places are those on the packed film.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import numpy as np
import torch

from afire._version import __version__
from afire.cluster.shards import Shard, all_shards
from afire.cluster.store import WRITING, ShardStore, begun_count
from afire.data.film import FilmInfo
from afire.data.pack import PackedFilms, check_reading
from afire.detect.base import AnomalyDetector
from afire.detect.findings import CSV, JOURNAL, JSON, UNREADABLE, FilmResult, read_journal, shown_name, to_line
from afire.detect.run import (
    PAGE,
    Draw,
    Drawing,
    Drawn,
    ReadFilm,
    remove_drawn,
    results_of,
    share_of_cores,
    side_by_side,
)
from afire.errors import UserError
from afire.files import write_text
from afire.processes import usable_cores
from afire.progress import progress

SHARDS = "shards"
PIECE = 1024  # films of a shard where the number of shards is not set
_STEM, _SUFFIX = "results", ".jsonl"
_AGAIN = "`afire detect run --data PACK --shard`"


@dataclass(frozen=True)
class PackedRun:
    """A detector and its pack. ``draw_in`` makes the function that draws pictures in a folder, which threads call."""

    detector: AnomalyDetector
    model_hash: str
    films: PackedFilms
    out: Path
    draw_in: Callable[[Path], Draw] | None = None
    restore: bool = True
    picture_settings: str = ""
    batch: int = 32
    workers: int | None = None

    def __post_init__(self) -> None:
        image = self.detector.config.image
        check_reading(self.films, image)
        if self.films.size != image.size:
            raise UserError(
                f"{self.films.folder} has films of {self.films.size} px, the detector takes {image.size} px; pack them "
                f"with --size {image.size}."
            )

    def store(self, count: int) -> ShardStore:
        """The shards of this run."""
        names = [shown_name(name) for name in self.films.manifest.table["image"]]
        identity = {**self.header(), "batch": self.batch, "afire": __version__, "shards": count}
        return ShardStore(self.out / SHARDS, _STEM, _SUFFIX, count, identity, names, self.batch)

    def header(self) -> dict[str, Any]:
        """What the journal says about the run."""
        source = f"pack {self.films.summary.hash}"
        return {"model": self.model_hash, "source": source, "picture_settings": self.picture_settings}


def shards_of(films: int, count: int | None = None) -> int:
    """``count`` shards, else shards of about a thousand films, so that a kill loses no more."""
    return count or max(1, -(-films // PIECE))


def score_shard(run: PackedRun, shard: Shard) -> int:
    """Score a shard unless it is finished; returns the number of films scored."""
    store = run.store(shard.count)
    if store.read(shard) is not None:
        return 0
    rows = store.rows(shard)

    def fill(path: Path) -> list[dict[str, Any]]:
        with path.open("w", encoding="utf-8") as stream:
            for results in _scored(run, rows):
                stream.writelines(to_line(result) for result in results)
        return [{"row": row, "image": store.names[row]} for row in rows]

    store.write(shard, fill)
    return len(rows)


def finish_run(run: PackedRun, count: int) -> list[FilmResult]:
    """Join the shards to the journal and remove them; missing, doubled or foreign rows are refused and named."""
    store = run.store(count)
    store.finish(_AGAIN)
    lines = [store.data(shard).read_text(encoding="utf-8") for shard in all_shards(count)]
    write_text(run.out / JOURNAL, json.dumps({"run": run.header()}) + "\n" + "".join(lines))
    shutil.rmtree(store.folder, ignore_errors=True)
    for leftover in run.out.glob(f"{WRITING}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return read_journal(run.out / JOURNAL)[1]


def _scored(run: PackedRun, rows: range) -> Iterator[list[FilmResult]]:
    """Results of the rows, batch by batch, in order."""
    workers = run.workers or usable_cores()
    side = side_by_side(run.detector, workers, alone=True)
    batches = [rows[start : start + run.batch] for start in range(0, len(rows), run.batch)]
    looking = BoundedSemaphore(side)
    on_cpu = run.detector.device.type == "cpu"
    with (
        share_of_cores(torch.get_num_threads() if on_cpu else 1),  # one thread a batch: bits do not depend on cores
        _drawing(run) as draw,
        ThreadPoolExecutor(workers) as threads,
        progress("detecting", len(rows), "films") as bar,
    ):
        for results in threads.map(partial(_score, run, draw, looking), batches):
            yield results
            bar.advance(len(results))


def _score(run: PackedRun, draw: Draw | None, looking: BoundedSemaphore, rows: range) -> list[FilmResult]:
    films, results = run.films, dict[int, FilmResult]()
    names, views = films.manifest.table["image"], films.manifest.table["view"]
    altered = films.altered(rows)
    for row, message in altered.items():
        reason = message.removeprefix(f"{films.folder}: ")
        results[row] = FilmResult(row, shown_name(names.iloc[row]), UNREADABLE, objections=(reason,))
    intact = [row for row in rows if row not in altered]
    images = films.batch(intact).numpy() if intact else np.empty(0)
    read_films = [
        ReadFilm(
            row,
            shown_name(names.iloc[row]),
            films.folder / "images",
            square[0],
            np.rint(square[0] * 255).astype(np.uint8) if draw is not None else None,
            FilmInfo(films.size, films.size, films.summary.settings.bits, "pack", view=views.iloc[row]),
        )
        for row, square in zip(intact, images, strict=True)
    ]
    results |= {
        result.number: result
        for result in results_of(run.detector, read_films, draw=draw, looking=looking, restore=run.restore)
    }
    return [results[row] for row in rows]


@contextmanager
def _drawing(run: PackedRun) -> Iterator[Draw | None]:
    """The function that draws into a folder of this process, from which finished pictures are moved to their places."""
    if run.draw_in is None:
        yield None
        return
    run.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=run.out, prefix=WRITING))
    try:
        yield partial(_draw_and_move, run.draw_in(folder), folder, run.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _draw_and_move(draw: Draw, folder: Path, out: Path, drawing: Drawing) -> Drawn:
    pictures = draw(drawing)
    for name in pictures.pictures.values():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).replace(out / name)
    return pictures


def check_out(out: Path, force: bool) -> None:
    """Refuse a folder that holds the results of a finished run, unless they are to be replaced."""
    existing = [name for name in (JOURNAL, CSV, JSON, PAGE) if (out / name).exists()]
    if existing and not force:
        raise UserError(f"{out} already holds {existing[0]}; add --force to begin again, or choose another --out.")
    for name in existing:
        (out / name).unlink()
    if force:
        remove_drawn(out)
        shutil.rmtree(out / SHARDS, ignore_errors=True)


def begun_run(out: Path) -> int:
    """The number of shards of a run that was begun in the folder."""
    return begun_count(out / SHARDS, _STEM)

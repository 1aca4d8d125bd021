"""Measure all films of a manifest: in parallel, with a cache, and past films that kill the process reading them."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pandas as pd

from afire.data.audit.cache import MeasurementCache
from afire.data.audit.measure import Measurement, measure_film
from afire.data.manifest import Manifest
from afire.errors import UserError
from afire.processes import follow_parent
from afire.progress import progress

logger = logging.getLogger(__name__)

Job = tuple[str, str]
"""Full path and name in the manifest."""

_CHUNK = 32
_IN_FLIGHT = 2  # chunks for each worker: one being read, one waiting
_SECONDS_BETWEEN_SAVES = 60.0


def default_workers() -> int:
    """One process for each core, at most eight: beyond that the disk is the limit."""
    return min(8, os.cpu_count() or 1)


def measure_manifest(manifest: Manifest, cache_file: Path | None, workers: int) -> pd.DataFrame:
    """One row of measurements for each row of the manifest, in its order.

    ``cache_file`` keeps measurements for the next run; it is written once a minute and at the end, also when the run is
    interrupted. Films that could not be read are tried again in the next run.
    """
    cache = MeasurementCache(cache_file)
    found: dict[str, Measurement] = {}
    jobs: list[Job] = []
    for row, image in enumerate(manifest.table["image"]):
        try:
            path = manifest.path(row)
        except UserError as error:  # a link out of the root
            found[image] = Measurement(image, error=str(error).replace(f" {manifest.root}", ""))
            continue
        known = cache.get(path, image)
        if known is not None:
            found[image] = known
        else:
            jobs.append((str(path), image))
    if len(found) > sum(bool(one.error) for one in found.values()):
        logger.info("%s of %s films were measured before (%s)", f"{len(found):,}", f"{len(manifest):,}", cache_file)
    if not jobs:
        return as_table([found[image] for image in manifest.table["image"]])
    try:
        with progress("measuring films", len(jobs), "films") as bar:
            for measurement in run_jobs(jobs, workers):
                found[measurement.image] = measurement
                cache.add(measurement)
                cache.save_if_older_than(_SECONDS_BETWEEN_SAVES)
                bar.advance()
    finally:
        cache.save()
    return as_table([found[image] for image in manifest.table["image"]])


def as_table(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """A data frame with one column for each field."""
    names = list(Measurement.__dataclass_fields__)
    columns = {name: [getattr(one, name) for one in measurements] for name in names}
    table: pd.DataFrame = pd.DataFrame(columns).astype(_DTYPES)
    return table


_DTYPES = {"phash": "uint64", "modified": "int64", "file_bytes": "int64", "ranks": "object"}


def run_jobs(
    jobs: Sequence[Job], workers: int, measure: Callable[[Path, str], Measurement] = measure_film
) -> Iterator[Measurement]:
    """Measurements in any order. A film on which the process itself dies is reported as unreadable, once, by name."""
    if workers <= 1 or len(jobs) <= _CHUNK:  # starting processes takes longer than reading a few films
        for path, image in jobs:
            yield measure(Path(path), image)
        return
    remaining = dict.fromkeys(jobs)
    while remaining:
        try:
            for measurement, job in _in_parallel(list(remaining), workers, _CHUNK, measure):
                del remaining[job]
                yield measurement
        except BrokenProcessPool:
            # A process died, but on which film? It is among the first that are left: read those one at a time.
            suspects = list(remaining)[: _IN_FLIGHT * workers * _CHUNK]
            try:
                for measurement, job in _in_parallel(suspects, 1, 1, measure):
                    del remaining[job]
                    yield measurement
            except BrokenProcessPool:
                culprit = next(iter(remaining))
                del remaining[culprit]
                yield Measurement(culprit[1], error=f"{culprit[1]} ends the process that decodes it; drop the film.")


def _in_parallel(
    jobs: Sequence[Job], workers: int, chunk: int, measure: Callable[[Path, str], Measurement]
) -> Iterator[tuple[Measurement, Job]]:
    # spawn: a fork of a process that has started threads (BLAS, progress bar) may deadlock
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=follow_parent)
    upcoming = iter([jobs[start : start + chunk] for start in range(0, len(jobs), chunk)])
    waiting: dict[Future[list[Measurement]], Sequence[Job]] = {}
    try:
        _check_start(pool)
        while True:
            for part in itertools.islice(upcoming, _IN_FLIGHT * workers - len(waiting)):
                waiting[pool.submit(_measure_chunk, part, measure)] = part
            if not waiting:
                return
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda one: one.exception() is not None):  # keep what was finished
                yield from zip(future.result(), waiting.pop(future), strict=True)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _check_start(pool: ProcessPoolExecutor) -> None:
    try:
        pool.submit(int).result()
    except BrokenProcessPool:
        raise UserError(
            "the processes that read films could not be started; use one worker, or guard a script of your own with "
            "if __name__ == '__main__'."
        ) from None


def _measure_chunk(jobs: Sequence[Job], measure: Callable[[Path, str], Measurement]) -> list[Measurement]:
    return [measure(Path(path), image) for path, image in jobs]

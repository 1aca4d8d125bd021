"""Measure all films of a manifest: in parallel, with a cache, and past films that kill the process reading them."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pandas as pd

from afire.data.audit.measure import VERSION, Measurement, measure_film
from afire.data.manifest import Manifest
from afire.errors import UserError
from afire.files import write_atomic
from afire.processes import follow_parent
from afire.progress import progress

_VERSION_KEY = b"afire.measurements"
Job = tuple[str, str]
"""Full path and name in the manifest."""
_CHUNK = 32
_IN_FLIGHT = 2  # chunks for each worker: one being read, one waiting
_SECONDS_BETWEEN_SAVES = 60.0
_DTYPES = {"phash": "uint64", "modified": "int64", "file_bytes": "int64", "ranks": "object"}

logger = logging.getLogger(__name__)


def default_workers() -> int:
    """One process for each core, at most eight: beyond that the disk is the limit."""
    return min(8, os.cpu_count() or 1)


def measure_manifest(manifest: Manifest, cache_file: Path | None, workers: int) -> pd.DataFrame:
    """One row of measurements for each row of the manifest, in its order.

    ``cache_file`` keeps measurements for the next run; it is written once a minute and at the end, also when the run is
    interrupted. Films that could not be read are tried again in the next run.
    """
    cache = MeasurementCache(cache_file)
    measured: dict[str, Measurement] = {}
    jobs: list[Job] = []
    for row, image in enumerate(manifest.table["image"]):
        try:
            path = manifest.path(row)
        except UserError as error:  # a link out of the root
            measured[image] = Measurement(image, error=str(error).replace(f" {manifest.root}", ""))
            continue
        cached = cache.get(path, image)
        if cached is not None:
            measured[image] = cached
        else:
            jobs.append((str(path), image))
    if len(measured) > sum(bool(measurement.error) for measurement in measured.values()):
        logger.info("%s of %s films were measured before (%s)", f"{len(measured):,}", f"{len(manifest):,}", cache_file)
    if not jobs:
        return as_table([measured[image] for image in manifest.table["image"]])
    try:
        with progress("measuring films", len(jobs), "films") as bar:
            for measurement in run_jobs(jobs, workers):
                measured[measurement.image] = measurement
                cache.add(measurement)
                cache.save_if_older_than(_SECONDS_BETWEEN_SAVES)
                bar.advance()
    finally:
        cache.save()
    return as_table([measured[image] for image in manifest.table["image"]])


def as_table(measurements: Sequence[Measurement]) -> pd.DataFrame:
    """A data frame with one column for each field."""
    names = list(Measurement.__dataclass_fields__)
    columns = {name: [getattr(measurement, name) for measurement in measurements] for name in names}
    table: pd.DataFrame = pd.DataFrame(columns).astype(_DTYPES)
    return table


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
            for batch in itertools.islice(upcoming, _IN_FLIGHT * workers - len(waiting)):
                waiting[pool.submit(_measure_chunk, batch, measure)] = batch
            if not waiting:
                return
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: future.exception() is not None):  # keep what was finished
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


class MeasurementCache:
    """A Parquet file of measurements; one counts as long as the film's size and time of change are the same.

    A file that cannot be read, or that another version of afire wrote, is an empty cache, never an error.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known = _read(path) if path is not None else {}
        self._changed = False
        self._saved = time.monotonic()

    def get(self, path: Path, image: str) -> Measurement | None:
        """What was measured of ``image`` before, if the file at ``path`` has not changed since."""
        entry = self._known.get(image)
        if entry is None:
            return None
        try:
            status = path.stat()
        except OSError:
            return None
        same = status.st_size == entry.file_bytes and status.st_mtime_ns == entry.modified
        return entry if same else None

    def add(self, measurement: Measurement) -> None:
        """Remember a measurement; failures are not remembered, the next run tries again."""
        if not measurement.error:
            self._known[measurement.image] = measurement
            self._changed = True

    def save_if_older_than(self, seconds: float) -> None:
        """Write the file if the last time is long enough ago."""
        if time.monotonic() - self._saved >= seconds:
            self.save()

    def save(self) -> None:
        """Write the file, if there is something new."""
        if self._path is not None and self._changed:
            measurements = list(self._known.values())
            write_atomic(self._path, lambda temporary: _write(measurements, temporary))
            self._changed = False
        self._saved = time.monotonic()


def _write(measurements: list[Measurement], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(Measurement.__dataclass_fields__)
    types = {"phash": pa.uint64(), "ranks": pa.binary()}
    columns = {
        name: pa.array([getattr(measurement, name) for measurement in measurements], types.get(name)) for name in names
    }
    table = pa.table(columns).replace_schema_metadata({_VERSION_KEY: str(VERSION)})
    pq.write_table(table, path, compression="zstd")


def _read(path: Path) -> dict[str, Measurement]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        return {}
    try:
        table = pq.read_table(path)
        if (table.schema.metadata or {}).get(_VERSION_KEY) != str(VERSION).encode():
            return {}
        return {row["image"]: Measurement(**row) for row in table.to_pylist()}
    except (pa.ArrowException, OSError, TypeError, KeyError):
        return {}

"""Measurements of an earlier run, so that a second audit of the same films takes seconds."""

from __future__ import annotations

import time
from pathlib import Path

from afire.data.audit.measure import VERSION, Measurement
from afire.files import write_atomic

_VERSION_KEY = b"afire.measurements"


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
        known = self._known.get(image)
        if known is None:
            return None
        try:
            status = path.stat()
        except OSError:
            return None
        same = status.st_size == known.file_bytes and status.st_mtime_ns == known.modified
        return known if same else None

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
    columns = {name: pa.array([getattr(one, name) for one in measurements], types.get(name)) for name in names}
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

"""Files that a power cut must not undo, synced together where possible; and new films in memory beside the spool.

A film that was received a moment ago is kept as it was parsed then, so that it need not be read again to be scored.
Such films take a limited number of bytes; a film that is not in memory is read from the spool.
"""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock, local

from pydicom.dataset import Dataset

from afire.files import names_path

_DIRECT = getattr(os, "O_DIRECT", 0)  # past the system's memory of files; not everywhere
_BLOCK = 4096  # bytes, of which such writes are whole numbers, from an address that is one too
_CHUNK = 1 << 20
_here = local()


def sync(path: Path) -> None:
    """A file or the names in a folder, so that a power cut does not undo them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes, *, direct: bool = False) -> None:
    """A new file, for its owner alone, that a power cut does not undo; its name is another matter. ``direct`` is past
    the system's memory of files, where it can be. What could not be written whole is removed."""
    with names_path(path):
        handle = _create(path, _DIRECT if direct else 0)
        try:
            try:
                (_write_direct if direct and _DIRECT else _write)(handle, data)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                path.unlink()  # a file system that does not take such writes
                refused, handle = handle, _create(path, 0)
                os.close(refused)  # not before there is another: what fails until then closes this one below
                _write(handle, data)
            os.fsync(handle)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)


def _create(path: Path, flags: int) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
    except OSError as error:
        if not flags or error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some make it before they say no
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _write_direct(handle: int, data: bytes) -> None:
    """Through a buffer of this thread that lies as such writes need it."""
    buffer = getattr(_here, "buffer", None)
    if buffer is None:
        buffer = _here.buffer = memoryview(mmap.mmap(-1, _CHUNK))
    view = memoryview(data)
    for start in range(0, len(data), _CHUNK):
        part = view[start : start + _CHUNK]
        buffer[: len(part)] = part
        left = buffer[: -(-len(part) // _BLOCK) * _BLOCK]
        while left:
            written = os.write(handle, left)
            if written % _BLOCK:  # the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left = left[written:]
    os.ftruncate(handle, len(data))


class SharedSync:
    """Syncs a folder for several threads at once: those that call during a sync share the next one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turn = Condition()
        self._begun = self._finished = 0  # numbers of the last sync that began, and of the last that went well
        self._is_running = False

    def __call__(self) -> None:
        """When this returns, what was renamed in the folder before the call is safe."""
        with self._turn:
            wanted = self._begun + 1
            self._turn.wait_for(lambda: not self._is_running or self._finished >= wanted)
            if self._finished >= wanted:
                return
            self._is_running, self._begun = True, self._begun + 1
            number = self._begun
        went_well = False
        try:
            sync(self._folder)
            went_well = True
        finally:
            with self._turn:
                self._is_running = False
                self._finished = number if went_well else self._finished
                self._turn.notify_all()


MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class ParsedFilm:
    """The tags of a film that scoring and its results need, pixels included, and the bytes of its file."""

    tags: Dataset
    size: int


class FreshFilms:
    """At most ``most_bytes`` of films, by their names in the spool. Threads may share it."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._bytes = most_bytes, 0
        self._films: dict[str, ParsedFilm] = {}
        self._lock = Lock()

    def has_room(self, size: int) -> bool:
        return self._bytes + size <= self._most

    def keep(self, name: str, film: ParsedFilm) -> None:
        """Unless there is no room."""
        with self._lock:
            if name not in self._films and self.has_room(film.size):
                self._films[name] = film
                self._bytes += film.size

    def take(self, name: str) -> ParsedFilm | None:
        """A film, which is forgotten with this; nothing if it is not here."""
        with self._lock:
            film = self._films.pop(name, None)
            self._bytes -= film.size if film is not None else 0
            return film

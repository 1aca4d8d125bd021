"""Films that came in a moment ago, as they were parsed then: whoever scores them need not read them again.

They are in memory only, so many bytes of them, and also in the spool: what is not here is read from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from pydicom.dataset import Dataset

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

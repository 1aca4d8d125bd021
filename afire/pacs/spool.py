"""Films and results of the service on disk: wherever it is interrupted, nothing is lost and nothing is done twice.

    incoming/FILM-PIXELS.dcm            a film whose sender was told that we have it
    scored/FILM-PIXELS-RECIPE/          its results, all of them; the film is still there
    outgoing/FILM-PIXELS-RECIPE/        its results, to be sent; the film is gone
    done/FI/FILM.json                   what was delivered: hashes and days, nothing that identifies
    failed/...                          films that cannot be read and results that are refused, with reason.json
    quarantine/FILM-PIXELS.dcm          another film under an id that we have seen with other pixels

FILM and PIXELS are keyed hashes of the SOP Instance UID and of the pixels, RECIPE is one of the model and the kinds of
objects: a name does not tell whose film it is, and a second delivery has the name of the first. Every step is one
rename or one unlink, and a start continues from the files that it finds. Unfinished files have a name that is not taken
for a film. A film is synced to the disk before it is acknowledged, and its results before it is removed. Later steps
are not: a power cut may undo them, and repeating them changes nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from enum import Enum
from pathlib import Path
from threading import Condition, RLock
from typing import Any, Protocol

from afire.files import names_path, read_json, remove_unfinished, write_json
from afire.pacs.sync import FreshFilms, ParsedFilm, SharedSync, sync, write_synced

INCOMING, SCORED, OUTGOING = "incoming", "scored", "outgoing"
DONE, FAILED, QUARANTINE = "done", "failed", "quarantine"
STATES = (INCOMING, SCORED, OUTGOING, DONE, FAILED, QUARANTINE)
REASON, FILM_FILE = "reason.json", "film.dcm"
_UNFINISHED = ".part-"  # what `remove_unfinished` removes
_SUFFIX = ".dcm"
_FEW = 4  # films: so many are worth a network's look
_PAUSE, _LONGEST_PAUSE = 0.02, 0.1  # seconds: after the last film, and in all


class Receipt(Enum):
    """What became of a delivery. Each of them may be acknowledged: it is on disk, or was before."""

    NEW = "received"
    DUPLICATE = "duplicate"
    QUARANTINED = "quarantined"


@dataclass(frozen=True)
class FilmName:
    """A film in the spool, by keyed hashes of its id and its pixels."""

    film: str
    pixels: str

    def __str__(self) -> str:
        return f"{self.film}-{self.pixels}"


@dataclass(frozen=True)
class ResultName:
    """The results of a film that one recipe (model and kinds of objects) gave."""

    name: FilmName
    recipe: str

    def __str__(self) -> str:
        return f"{self.name}-{self.recipe}"


class Observe(Protocol):
    """Called after each step that is safe on disk; ``film`` is its keyed hash."""

    def __call__(self, event: str, film: str, *, reason: str = "", kind: str = "") -> None: ...


def _nobody(event: str, film: str, *, reason: str = "", kind: str = "") -> None:
    pass


class Spool:
    """The folders of one service, which must be their only writer. Threads may share it.

    ``recipe`` is that of the results that are made now; results of an earlier one are still sent.
    """

    def __init__(self, root: Path, recipe: str, observe: Observe = _nobody) -> None:
        self.root, self.recipe, self._observe = root, recipe, observe
        self._lock = RLock()
        self._to_be_scored, self._to_be_sent = Condition(self._lock), Condition(self._lock)
        self._to_score: deque[FilmName] = deque()
        self._to_send: deque[ResultName] = deque()
        self._pixels: dict[str, str] = {}  # of every film outside of done, by FILM
        self._fresh = FreshFilms()
        self._synced = SharedSync(root / INCOMING)
        self._recover()

    # Receiving

    def receive(self, name: FilmName, data: bytes, parsed: ParsedFilm | None = None) -> Receipt:
        """Keep a film. When this returns, a power cut changes nothing about it.

        ``parsed`` is kept in memory for scoring, if there is room. The file is then written past the system's page
        cache, because it is not read again and filling the cache takes longer than the disk.
        """
        part = self.root / INCOMING / f"{_UNFINISHED}{secrets.token_hex(8)}{_SUFFIX}"
        write_synced(part, data, direct=parsed is not None and self._fresh.has_room(parsed.size))
        try:
            with self._lock:
                receipt = self._place(part, name)
        finally:
            part.unlink(missing_ok=True)
        try:
            self._synced()  # of two deliveries at once, the second must not be told so before it is true of the first
        finally:
            if receipt is Receipt.NEW:  # in any case: it is there
                with self._lock:
                    if parsed is not None:
                        self._fresh.keep(str(name), parsed)
                    self._to_score.append(name)
                    self._to_be_scored.notify_all()
        self._observe(receipt.value, name.film)
        return receipt

    def _place(self, part: Path, name: FilmName) -> Receipt:
        is_under_way = self._is_under_way(name)  # asked first: what is delivered meanwhile has a record when it is read
        record = self._record(name.film)
        pixels = self._pixels.get(name.film) or record.get("pixels")
        if pixels is not None and pixels != name.pixels:
            _move(part, self.root / QUARANTINE / f"{name}{_SUFFIX}")
            return Receipt.QUARANTINED
        if is_under_way or self.recipe in record.get("recipes", {}):
            return Receipt.DUPLICATE
        part.rename(self._film(name))
        self._pixels[name.film] = name.pixels
        return Receipt.NEW

    def _is_under_way(self, name: FilmName) -> bool:
        result = str(ResultName(name, self.recipe))
        return self._film(name).exists() or any((self.root / state / result).exists() for state in (SCORED, OUTGOING))

    # Scoring

    def claim(self, most: int, share: int, seconds: float) -> list[FilmName]:
        """Films to score, at most ``most`` and one of ``share`` parts of those that wait; none after ``seconds``.

        A few films wait a moment for others, if films follow each other closely: a larger batch takes the networks
        less time per film.
        """
        with self._lock:
            self._to_be_scored.wait_for(lambda: bool(self._to_score), seconds)
            enough, deadline = min(most, _FEW) * share, time.monotonic() + _LONGEST_PAUSE
            while 0 < len(self._to_score) < enough and time.monotonic() < deadline:
                if not self._to_be_scored.wait(_PAUSE):
                    break
            count = min(most, -(-len(self._to_score) // share))
            return [self._to_score.popleft() for _ in range(count)]

    def put_back(self, names: Iterable[FilmName]) -> None:
        """Films that were claimed and could not be scored now."""
        with self._lock:
            self._to_score.extendleft(names)
            self._to_be_scored.notify_all()

    def fresh(self, name: FilmName) -> ParsedFilm | None:
        """A recently received film as it was parsed then; it can be fetched once."""
        return self._fresh.take(str(name))

    def film(self, name: FilmName) -> Path:
        """Where a film that waits to be scored is, relative to :attr:`root`."""
        return self._film(name).relative_to(self.root)

    def waits(self, name: FilmName) -> bool:
        """Whether a film has still to be scored."""
        return self._film(name).exists()

    def commit(self, results: Mapping[FilmName, Mapping[str, bytes]]) -> None:
        """Take the results of films, kind -> bytes of a DICOM file, of each film all or none; the films are removed.

        All are written before any is synced, so that the disk takes them together.
        """
        parts = {ResultName(name, self.recipe): self._part(name) for name in results}
        try:
            for part, objects in zip(parts.values(), results.values(), strict=True):
                _write_results(part, objects)
            for part in parts.values():
                for file in part.iterdir():
                    sync(file)
                sync(part)
        except OSError:  # a full disk: what was written of them would keep it full
            for part in parts.values():
                shutil.rmtree(part, ignore_errors=True)
            raise
        for result, part in parts.items():
            target = self.root / SCORED / str(result)
            if target.exists():
                shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
        sync(self.root / SCORED)
        for result in parts:
            self._observe("scored", result.name.film)
            self._clear_film(result)

    def _part(self, name: FilmName) -> Path:
        """A folder that no start takes for results."""
        return self.root / SCORED / f"{_UNFINISHED}{ResultName(name, self.recipe)}"

    def _clear_film(self, result: ResultName) -> None:
        """The film goes before its results move on: in outgoing there is nothing left of it."""
        self._film(result.name).unlink(missing_ok=True)
        self._observe("cleared", result.name.film)
        source, target = (self.root / state / str(result) for state in (SCORED, OUTGOING))
        if target.exists():  # results that had failed were put back to be sent while the film came again: they wait
            _remove(source)
            return
        source.rename(target)
        self._observe("outgoing", result.name.film)
        with self._lock:
            self._to_send.append(result)
            self._to_be_sent.notify()

    def fail_film(self, name: FilmName, reason: str) -> None:
        """A film that cannot be scored: kept for a person to look at."""
        folder = self.root / FAILED / str(name)
        folder.mkdir(exist_ok=True)
        write_json(folder / REASON, {"reason": reason})
        sync(self.root / FAILED)
        _move(self._film(name), folder / FILM_FILE)
        self._observe("failed", name.film, reason=reason)

    # Sending

    def next_results(self, most: int, seconds: float) -> list[ResultName]:
        """Results to send, those that wait longest first, at most ``most``; none after ``seconds``."""
        with self._lock:
            self._to_be_sent.wait_for(lambda: bool(self._to_send), seconds)
            return [self._to_send.popleft() for _ in range(min(most, len(self._to_send)))]

    def send_later(self, results: Iterable[ResultName]) -> None:
        """Put results at the end of the queue, so that one with a problem does not hold up the others."""
        with self._lock:
            self._to_send.extend(results)

    def objects(self, result: ResultName) -> dict[str, Path]:
        """What is left to send of a film's results: kind -> file."""
        folder = self.root / OUTGOING / str(result)
        paths = sorted(folder.iterdir()) if folder.exists() else []
        return {path.stem: path for path in paths if path.suffix == _SUFFIX}

    def acknowledge(self, result: ResultName, kinds: Iterable[str]) -> None:
        """The receiver has these objects. With the last one, nothing is left but the record that it was delivered.

        Results that have left the folder meanwhile, for ``done`` or for ``failed``, stay where they are.
        """
        folder = self.root / OUTGOING / str(result)
        for kind in kinds:
            (folder / f"{kind}{_SUFFIX}").unlink(missing_ok=True)
            self._observe("sent", result.name.film, kind=kind)
        if folder.exists() and not self.objects(result):
            self._finish(result)

    def _finish(self, result: ResultName) -> None:
        self._write_record(result)
        self._observe("recorded", result.name.film)
        for stale in (self.root / FAILED).iterdir():
            if stale.name.startswith(str(result.name)):
                _remove(stale)
        _remove(self.root / OUTGOING / str(result))
        with self._lock:
            if not self._film(result.name).exists():  # or it came again, for another recipe
                self._pixels.pop(result.name.film, None)
        self._observe("done", result.name.film)

    def fail_result(self, result: ResultName, reason: str) -> None:
        """The receiver refuses these results for good: kept for a person to look at."""
        folder, target = (self.root / state / str(result) for state in (OUTGOING, FAILED))
        write_json(folder / REASON, {"reason": reason})
        _remove(target)
        _move(folder, target)
        self._observe("refused", result.name.film, reason=reason)

    # What there is

    def counts(self) -> dict[str, int]:
        """How many films or results wait in each state."""
        return {state: _count(self.root / state) for state in STATES if state != DONE}

    def has_work(self) -> bool:
        """Whether something waits to be scored or sent."""
        return any(_count(self.root / state) for state in (INCOMING, SCORED, OUTGOING))

    def retry_failed(self) -> int:
        """Put everything that failed back to where it failed; how many that are."""
        folders = [folder for folder in (self.root / FAILED).iterdir() if folder.is_dir()]
        for folder in folders:
            film, results = folder / FILM_FILE, self.root / OUTGOING / folder.name
            if film.exists():
                _move(film, self.root / INCOMING / f"{folder.name}{_SUFFIX}")
            elif any(folder.glob(f"*{_SUFFIX}")) and not results.exists():
                (folder / REASON).unlink(missing_ok=True)
                _move(folder, results)
            _remove(folder)
        self._queue()
        return len(folders)

    # After a start

    def _recover(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for state in STATES:
            (self.root / state).mkdir(mode=0o700, exist_ok=True)
            remove_unfinished(self.root / state)
        for folder in (self.root / DONE).iterdir():
            remove_unfinished(folder)
        sync(self.root)
        for folder in _oldest_first(self.root / SCORED):
            self._clear_film(_result_name(folder))
        for folder in _oldest_first(self.root / OUTGOING):
            if not any(folder.glob(f"*{_SUFFIX}")):  # all acknowledged, not yet recorded
                self._finish(_result_name(folder))
        self._queue()

    def _queue(self) -> None:
        """Line up what the folders hold."""
        with self._lock:
            self._to_score = deque(_film_name(path.stem) for path in _oldest_first(self.root / INCOMING))
            self._to_send = deque(_result_name(path) for path in _oldest_first(self.root / OUTGOING))
            known = [*self._to_score, *(result.name for result in self._to_send)]
            known += [_film_name(path.name) for path in (self.root / FAILED).iterdir()]
            self._pixels = {name.film: name.pixels for name in known}
            self._to_be_scored.notify_all()
            self._to_be_sent.notify_all()

    # Files

    def _film(self, name: FilmName) -> Path:
        return self.root / INCOMING / f"{name}{_SUFFIX}"

    def _record_path(self, film: str) -> Path:
        return self.root / DONE / film[:2] / f"{film}.json"

    def _record(self, film: str) -> dict[str, Any]:
        path = self._record_path(film)
        record: dict[str, Any] = read_json(path) if path.exists() else {}
        return record

    def _write_record(self, result: ResultName) -> None:
        path = self._record_path(result.name.film)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        recipes = {**self._record(result.name.film).get("recipes", {}), result.recipe: date.today().isoformat()}
        record = json.dumps({"pixels": result.name.pixels, "recipes": recipes}, indent=2) + "\n"
        part = path.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}.json")
        write_synced(part, record.encode("ascii"))
        part.replace(path)


def _write_results(folder: Path, objects: Mapping[str, bytes]) -> None:
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for kind, data in objects.items():
        path = folder / f"{kind}{_SUFFIX}"
        with names_path(path):
            path.write_bytes(data)


def _film_name(text: str) -> FilmName:
    return FilmName(*text.split("-")[:2])


def _result_name(folder: Path) -> ResultName:
    film, pixels, recipe = folder.name.split("-")
    return ResultName(FilmName(film, pixels), recipe)


def _oldest_first(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: (path.stat().st_mtime_ns, path.name))


def _count(folder: Path) -> int:
    with os.scandir(folder) as entries:
        return sum(not entry.name.startswith(_UNFINISHED) for entry in entries)


def _move(source: Path, target: Path) -> None:
    """Rename so that a power cut does not undo it."""
    source.rename(target)
    for folder in {source.parent, target.parent}:
        sync(folder)


def _remove(folder: Path) -> None:
    """A folder in a state, in one step as far as anyone can see: an empty one at once, another first loses its name."""
    with suppress(OSError):
        folder.rmdir()
        return
    if folder.exists():
        gone = folder.with_name(f"{_UNFINISHED}{folder.name}")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone)

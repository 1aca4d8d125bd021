"""Keys that tell films apart in whatever form they are kept, and the record of the films behind a model.

A key is a digest with its kind. ``file`` is of the source file's bytes: the same in a manifest and in packs of any
size, bit depth, fit or VOI, which keep it in a column. ``packed-224-8-squash-auto`` is of the pixels in a pack and can
be compared between packs of equal settings only; it stands in where the source file is gone.

A run and a detector keep ``films.txt``, a line of keys (``kind:digest``) for each film they were trained on, and in
``pretrain/films.txt`` the films of the weights they started from. Keys are one-way: without the film they tell nothing
about it. Earlier versions wrote bare keys that do not say of what: those can show that a film was seen, and that it was
not only where other films of the same data match.

A copy in another format or re-compressed is another file, and nothing here finds it; ``afire data check`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from afire.data.pack import DIGEST, FILE_DIGEST, Films, NumberedFilms, PackedFilms
from afire.data.pack_files import source_digests
from afire.files import sha256_text, write_text

Rows = NDArray[np.int64]
FILMS = "films.txt"
BEHIND = "pretrain"  # folder with the record of the weights that a run or a detector started from
_FITTED = "adapt"  # folder of a detector with the record of its own training
_CHECKPOINTS = "checkpoints"
FILE = "file"
DRAWN = "drawn"  # films that a method drew itself, which equal no real film
_OLD_PIXELS, _OLD_PATH = "old-pixels", "old-path"  # bare keys of earlier versions: hashes of a pack's digest, of a path
_OLD = (_OLD_PIXELS, _OLD_PATH)
_NOT_RECORDED = "not-recorded"  # in place of keys: reads as one that fits no film


@dataclass(frozen=True)
class Seen:
    """How many of ``films`` a model has seen, and for how many this is unknown."""

    films: int
    seen: int = 0
    unknown: int = 0
    rows: Rows = field(default_factory=lambda: np.empty(0, np.int64), compare=False, repr=False)
    """Those that were seen."""

    @property
    def answer(self) -> Literal["seen", "none", "unknown"]:
        """``none`` only where every film is known to be new."""
        return "seen" if self.seen else "unknown" if self.unknown else "none"

    def as_dict(self) -> dict[str, int | str]:
        """For JSON."""
        return {"answer": self.answer, "films": self.films, "seen": self.seen, "unknown": self.unknown}


def most_seen(answers: Iterable[Seen]) -> Seen:
    """The answer of the model that has seen most; among equals, the one with most unknown films."""
    return max(answers, key=lambda answer: (answer.seen, answer.unknown))


def remember_films(out: Path, films: Films, rows: Rows, beside_earlier: bool = False) -> None:
    """Write the keys of a run's films into its folder.

    ``beside_earlier`` keeps those that are there: a run that went on with other films has seen both. A record of bare
    keys is replaced, because it would leave every film unknown.
    """
    keys = _keys(films, rows, [kind for kind in _kinds(films) if kind not in _OLD])
    lines = [" ".join(f"{kind}:{key}" for kind, key in film) for film in keys if film]
    records = _read_records(out) if beside_earlier else []
    earlier = [line for record in records if record.keys.keys() != {""} for line in record.lines]
    known = set(earlier)
    write_text(out / FILMS, "".join(f"{line}\n" for line in [*earlier, *(line for line in lines if line not in known)]))


def changed_films(folder: Path, films: Films, rows: Rows) -> list[str]:
    """Names of loose films whose files are gone or have other bytes than when ``rows`` were recorded in ``folder``.

    A pack is checked by its hash instead. Empty where there is no record, or one of an earlier version.
    """
    records = [] if isinstance(films, PackedFilms) else _read_records(folder)
    if not records or FILE not in records[0].complete:
        return []
    [record], keys = records, _file_keys(films, rows)
    names = films.manifest.table["image"].iloc[rows].astype(str).tolist()
    before = [dict(_kind_and_key(text) for text in line.split())[FILE] for line in record.lines]
    present = [(name, key) for name, key in zip(names, keys, strict=True) if key]
    gone = [name for name, key in zip(names, keys, strict=True) if not key]
    if len(present) == len(before):  # in the order of the rows: two films that changed places are noticed too
        return [name for (name, key), old in zip(present, before, strict=True) if key != old]
    # A film that was not there when the run began has no line; with fewer lines than films, that is why.
    new = [name for name, key in present if key not in record.keys[FILE]]
    return [*(gone if len(gone) > len(rows) - len(before) else []), *new]


def remember_behind(out: Path, weights: str | Path | None) -> None:
    """Write what is known about the films of the ``weights`` that a run or a detector starts from (None: nothing)."""
    lines = dict.fromkeys(line for record in _records_of(weights) for line in record.lines)
    write_text(out / BEHIND / FILMS, "".join(f"{line}\n" for line in lines) or f"{_NOT_RECORDED}\n")


def films_seen(folders: Path | Sequence[Path], films: Films, rows: Rows) -> Seen:
    """Which of ``rows`` are in the record of a folder, or of any of several; unknown where there is no record."""
    return _compare(_read_records(folders), films, rows)


def seen_by_weights(weights: str | Path | None, films: Films, rows: Rows) -> Seen:
    """Which of ``rows`` the weights of a run, a checkpoint or a detector have seen, or those that it started from.

    Unknown for a bundle, a file or None, which keep no record.
    """
    return _compare(_records_of(weights), films, rows)


@dataclass(frozen=True)
class _Record:
    """A ``films.txt``: its lines, and its keys by kind. ``complete`` are the kinds that every film of it has."""

    lines: list[str]
    keys: dict[str, set[str]] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)


def _read_records(folders: Path | Sequence[Path]) -> list[_Record]:
    """The records of those folders that have one."""
    several = [folders] if isinstance(folders, Path) else folders
    return [_read_record(folder) for folder in several if (folder / FILMS).is_file()]


def _read_record(folder: Path) -> _Record:
    text = (folder / FILMS).read_text(encoding="utf-8", errors="replace")  # a damaged key fits no film
    lines = [line for line in text.splitlines() if line.strip()]
    films = [dict(_kind_and_key(text) for text in line.split()) for line in lines]
    keys: dict[str, set[str]] = {}
    for film in films:
        for kind, key in film.items():
            keys.setdefault(kind, set()).add(key)
    real = [set(film) for film in films if DRAWN not in film]
    return _Record(lines, keys, set.intersection(*real) if real else set())


def _kind_and_key(text: str) -> tuple[str, str]:
    kind, colon, key = text.partition(":")
    return (kind, key) if colon else ("", text)


def _records_of(weights: str | Path | None) -> list[_Record]:
    """The records beside weights: of a run or of a detector, and of what it started from."""
    home = _home(Path(weights)) if weights is not None else None
    return _read_records([home / name for name in ("", _FITTED, BEHIND)]) if home is not None else []


def _home(path: Path) -> Path | None:
    """The folder whose weights ``path`` is or belongs to: itself, the one it lies in, or the run of a checkpoint."""
    above = list(path.resolve().parents)
    runs = [folder for folder in above[:3] if folder / _CHECKPOINTS in [path.resolve(), *above]]
    candidates = [path, *above[:1], *runs] if path.is_file() else [path, *runs]
    return next((folder for folder in candidates if (folder / FILMS).is_file()), None)


def _compare(records: Sequence[_Record], films: Films, rows: Rows) -> Seen:
    """Look every film up in all records; one that is in none, where some record is inconclusive, is unknown."""
    seen, unknown = np.zeros(len(rows), bool), np.full(len(rows), not records)
    for record in records:
        if record.keys.keys() == {DRAWN}:  # it drew all of its films, so it has seen no other
            continue
        kinds = [kind for kind in _kinds(films) if _stored_as(kind) in record.keys]
        conclusive = {kind for kind in kinds if _is_conclusive(kind, record, films)}
        for number, film in enumerate(_keys(films, rows, kinds)):
            seen[number] |= any(key in record.keys[_stored_as(kind)] for kind, key in film)
            unknown[number] |= not any(kind in conclusive for kind, _ in film)
    return Seen(len(rows), int(seen.sum()), int((unknown & ~seen).sum()), rows[seen])


def _is_conclusive(kind: str, record: _Record, films: Films) -> bool:
    """Whether a film whose key of this kind is not in the record is known to be another film.

    Bare keys do not say what they are of: they count as this kind where some film of the data has such a key.
    """
    if kind not in _OLD:
        return kind in record.complete
    keys = _keys(films, np.arange(len(films)), [kind]) if "" in record.complete else []
    return any(key in record.keys[""] for film in keys for _, key in film)


def _stored_as(kind: str) -> str:
    return "" if kind in _OLD else kind


def _kinds(films: Films) -> list[str]:
    """The kinds of keys that these films may have."""
    if isinstance(films, NumberedFilms):
        return [DRAWN]
    old = [_OLD_PIXELS, _OLD_PATH] if DIGEST in films.manifest.table else [_OLD_PATH]
    if not isinstance(films, PackedFilms):
        return [FILE, *old]
    settings = films.summary.settings
    return [FILE, f"packed-{settings.size}-{settings.bits}-{settings.fit}-{settings.voi}", *old]


def _keys(films: Films, rows: Rows, kinds: Sequence[str]) -> list[list[tuple[str, str]]]:
    """For each film its keys with their kinds; a film that has none of a kind lacks it."""
    columns = [(kind, _column(films, rows, kind)) for kind in kinds]
    return [[(kind, keys[row]) for kind, keys in columns if keys[row]] for row in range(len(rows))]


def _column(films: Films, rows: Rows, kind: str) -> list[str]:
    if kind == FILE:
        return _file_keys(films, rows)
    name = "image" if kind in (_OLD_PATH, DRAWN) else DIGEST
    values = [str(value) for value in films.manifest.table[name].iloc[rows]]
    return [sha256_text(value)[:24] for value in values] if kind in _OLD else values


def _file_keys(films: Films, rows: Rows) -> list[str]:
    """Those that a pack keeps; the others from the files, empty where there is none.

    Loose films are read from their files, whatever a column of their manifest says about an earlier time.
    """
    manifest, table = films.manifest, films.manifest.table
    recorded = isinstance(films, PackedFilms) and FILE_DIGEST in table
    keys = [str(key) for key in table[FILE_DIGEST].iloc[rows]] if recorded else [""] * len(rows)
    lacking = [number for number, key in enumerate(keys) if not key]
    if lacking:
        digests = source_digests(manifest, [int(rows[number]) for number in lacking], "film keys")
        for number, digest in zip(lacking, digests, strict=True):
            keys[number] = digest
    return keys

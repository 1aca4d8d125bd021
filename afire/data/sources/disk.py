"""What is on disk: films, listed once and then looked up in sets, and the tables that come with a public dataset."""

from __future__ import annotations

import gzip
import logging
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from afire.data.decode import IMAGE_SUFFIXES, is_image_file
from afire.data.manifest import inside_root, unreadable_csv
from afire.errors import UserError
from afire.files import require_file, require_folder
from afire.progress import Progress, progress

_NAMES = {
    "train": ("train", "training", "trn"),
    "val": ("val", "valid", "validate", "validation", "dev"),
    "test": ("test", "testing", "tst"),
}
SPLIT_OF = {name: split for split, names in _NAMES.items() for name in names}
"""``validation`` -> ``val``, for names in lower case."""
_PREFERRED = (".png", ".jpg", ".jpeg", ".dcm")  # of two files that differ in the ending only
_MOST_NAMED = 10  # missing films, one by one: of a public set users often have a part only

logger = logging.getLogger(__name__)


def find_source(folder: Path, names: Sequence[str], what: str) -> Path:
    """The first of ``names`` in ``folder``, or a message that says what was looked for and where."""
    path = find_optional(folder, names)
    if path is None:
        other = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        raise UserError(f"{what} is missing: looked for {names[0]}{other} in {folder}.")
    return path


def find_optional(folder: Path, names: Iterable[str]) -> Path | None:
    """The first of ``names`` that is a file in ``folder``."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_source(path: Path, columns: Iterable[str], separator: str = ",") -> pd.DataFrame:
    """A CSV file, also gzipped, as text; empty cells are empty text. Missing ``columns`` are named.

    Spaces around column names are dropped: SIIM-ACR's header is ``ImageId, EncodedPixels``.
    """
    require_file(path, "table")
    try:
        with warnings.catch_warnings():
            # More cells in a row than in the header: a comma in a path shifts every label after it.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(path, sep=separator, dtype=str, index_col=False, encoding="utf-8-sig", na_filter=False)
    except (pd.errors.ParserError, pd.errors.ParserWarning, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise unreadable_csv(path, error) from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise UserError(f"{path} is not a whole gzip file; download it again.") from None
    table.columns = [str(name).strip() for name in table.columns]
    missing = [name for name in columns if name not in table.columns]
    if missing:
        for mark, word in ((";", "semicolons"), ("\t", "tabs")):
            if len(table.columns) == 1 and mark in table.columns[0]:
                raise UserError(f"{path} has {word} between its columns; save it with commas.")
        raise UserError(f"{path} has no column {missing[0]!r}; its columns are {', '.join(table.columns[:20])}.")
    return table


def read_list(path: Path) -> list[str]:
    """The lines of a text file, without empty ones."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file with one film per line.") from None


def about(builder: str, normal: str, /, **options: Any) -> Mapping[str, Any]:
    """What a manifest says about how it was made: the builder, its rule for ``normal``, and its options."""
    return {"builder": builder, "normal": normal, "options": options}


def split_of(name: str) -> str | None:
    """``train``, ``val`` or ``test`` for one of their usual names, whatever its case; else None."""
    return SPLIT_OF.get(name.strip().lower())


def list_films(
    root: Path,
    below: str | Path = "",
    look_inside: bool = False,
    any_name: bool = False,
    recursive: bool = True,
) -> list[str]:
    """Films in ``root/below`` and its subfolders, as sorted paths relative to ``root`` with forward slashes.

    Hidden files are passed over. So are links that leave the root, with a warning, because no manifest may name them.
    ``look_inside`` also opens files without a real ending, such as DICOM exports named after a UID. ``any_name`` keeps
    names with control characters, backslashes or bytes that are not UTF-8, which no manifest may hold.
    """
    start = subfolder(root, below)
    films: list[str] = []
    leaving: list[str] = []
    unusable: list[str] = []
    with progress(f"listing {start}", unit="entries") as bar:
        for relative, entry in _walk(root, start, leaving, bar, recursive):
            if _ending(entry.name) in IMAGE_SUFFIXES or (look_inside and is_image_file(Path(entry.path))):
                (films if any_name or _usable(relative) else unusable).append(relative)
    if leaving:
        logger.warning("left out: %s, a link that leaves the root %s%s", leaving[0], root, _and_more(leaving))
    if unusable:
        logger.warning("left out: %r, a name that no manifest can hold%s; rename it", unusable[0], _and_more(unusable))
    films.sort()
    return films


def require_films(films: list[str], root: Path, below: str | Path = "") -> list[str]:
    """``films``, or a message that there is none."""
    if not films:
        kinds = ", ".join(sorted(IMAGE_SUFFIXES))
        raise UserError(f"there are no films in {root / below} or its subfolders; looked for {kinds}.")
    return films


def subfolder(root: Path, below: str | Path) -> Path:
    """The folder ``root/below``, checked to exist and to lie inside the root. ``below`` may start with the root."""
    require_folder(root, "root")
    folder = Path(below)
    if folder.is_relative_to(root) and (folder.is_absolute() or not (root / folder).is_dir()):
        folder = folder.relative_to(root)
    if folder == Path():
        return root
    return require_folder(inside_root(root, folder.as_posix(), "folder"), "folder")


def _walk(
    root: Path, start: Path, leaving: list[str], bar: Progress, recursive: bool
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Files below ``start`` with their path relative to ``root``; links out of the root are added to ``leaving``."""
    real_root = os.path.realpath(root)
    folders = [start]
    while folders:
        folder = folders.pop()
        prefix = "" if folder == root else folder.relative_to(root).as_posix() + "/"
        with os.scandir(folder) as entries:
            inside = [entry for entry in entries if not entry.name.startswith((".", "__MACOSX"))]
        for entry in inside:
            linked = entry.is_symlink()
            if linked and not _is_within(os.path.realpath(entry.path), real_root):
                leaving.append(prefix + entry.name)
            elif entry.is_file():
                yield prefix + entry.name, entry
            elif (
                recursive and entry.is_dir() and not linked
            ):  # a link to a folder inside the root: its films are listed there
                folders.append(Path(entry.path))
        bar.advance(len(inside))


def _is_within(path: str, root: str) -> bool:
    return os.path.commonpath([root, path]) == root


def _usable(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    if "\\" in name or name[1:2] == ":":  # a manifest reads them as a slash and as a drive
        return False
    return name.isprintable() or not any(ord(character) < 32 or ord(character) == 127 for character in name)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 - called for every file; a Path costs ten times as much


def strip_ending(path: str) -> str:
    """The path without an image's ending; a UID such as ``1.2.3`` has none and stays."""
    return path[: -len(_ending(path))] if _ending(path) in IMAGE_SUFFIXES else path


def by_stem(films: Iterable[str]) -> dict[str, str]:
    """Films by path without ending. Of ``a.png`` and ``a.jpg`` in one folder the first of a fixed order is taken."""
    chosen: dict[str, str] = {}
    for film in sorted(films, key=_preference, reverse=True):
        chosen[strip_ending(film)] = film
    return chosen


def by_name(films: Iterable[str], root: Path) -> dict[str, str]:
    """Films by file name without folder and ending; a name in two folders is refused, because it would be a guess."""
    films_of: dict[str, str] = {}
    for stem, film in by_stem(films).items():
        name = stem.rpartition("/")[2]
        if name in films_of:
            raise UserError(
                f"{root} holds {name} twice, as {films_of[name]} and {film}; choose one folder of films with --images."
            )
        films_of[name] = film
    return films_of


def _preference(film: str) -> tuple[int, str]:
    ending = _ending(film)
    return (_PREFERRED.index(ending) if ending in _PREFERRED else len(_PREFERRED), film)


def keep_present(table: pd.DataFrame, films: pd.Series, root: Path, listed_in: Path | str) -> pd.DataFrame:
    """The rows whose film is on disk, with ``films`` (a path, or missing) as their ``image``.

    Users often have some of a public set, so rows without a film are counted and left out; none at all is an error.
    """
    present = table.assign(image=films)[films.notna()].reset_index(drop=True)
    if len(table) == 0:
        raise UserError(f"{listed_in} lists no films.")
    if len(present) == 0:
        example = f"; the first looked for is {table['image'].iloc[0]}"
        raise UserError(f"none of the {len(table):,} films listed in {listed_in} is in {root}{example}.")
    absent = list(table["image"][films.isna()])
    named = "; missing: " + ", ".join(map(str, absent)) if 0 < len(absent) <= _MOST_NAMED else ""
    logger.info("%s of %s listed films are in %s%s", f"{len(present):,}", f"{len(table):,}", root, named)
    return present

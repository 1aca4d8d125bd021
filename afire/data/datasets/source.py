"""The tables that come with a public dataset: found, read as text, and checked for the columns they should have."""

from __future__ import annotations

import gzip
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from afire.errors import UserError
from afire.files import require_file


def find_source(folder: Path, names: Sequence[str], what: str) -> Path:
    """The first of ``names`` in ``folder``, or a sentence that says what was looked for and where."""
    found = find_optional(folder, names)
    if found is None:
        other = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        raise UserError(f"{what} is missing: looked for {names[0]}{other} in {folder}.")
    return found


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
        raise UserError(f"{path} is not a readable CSV file ({str(error).splitlines()[0]}).") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise UserError(f"{path} is not a whole gzip file; download it again.") from None
    table.columns = [str(name).strip() for name in table.columns]
    missing = [name for name in columns if name not in table.columns]
    if missing:
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

"""The rows of an ablation: what each changes, which table it belongs to, and what the paper found.

A row is a YAML file with a small header and ``settings``, which hold only what differs from the base. Those that come
with afire lie in ``presets/ablations`` (in a checkout also seen as ``configs/ablations``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from afire.config import Config, Section, changed, load_settings
from afire.errors import UserError

FOLDER = Path(__file__).parents[1] / "presets" / "ablations"
FULL = "full"
TABLES = {"table1": "Table 1 of the paper", "table4": "Table 4 of the paper", "ours": "Ours"}
ALL = "all"


class Published(Section):
    """The paper's linear probe of ChildCXR, in percent as printed."""

    auc: float = Field(ge=0, le=100)
    accuracy: float = Field(ge=0, le=100)
    f1: float = Field(ge=0, le=100)


class RowFile(Section):
    """What a row's YAML file says."""

    title: str = Field(min_length=1, description="what tables call the row")
    tables: dict[Literal["table1", "table4", "ours"], int] = Field(
        default_factory=dict, description="the tables it belongs to, and its place in each"
    )
    paper: Published | None = Field(None, description="published numbers, if any")
    note: str = Field("", description="what to know when reading its numbers, such as another cost")
    settings: dict[str, Any] = Field(default_factory=dict, description="what differs from the base")


class Row:
    """A row with its name, the stem of its file."""

    def __init__(self, name: str, file: RowFile) -> None:
        self.name, self.title, self.note, self.paper = name, file.title, file.note, file.paper
        self.tables: Mapping[str, int] = {str(table): place for table, place in file.tables.items()}
        self.settings = file.settings

    def config(self, base: Config, seed: int) -> Config:
        """The base with this row's changes and a seed; a change that does not fit is a sentence with the row's name."""
        try:
            return changed(base, {**self.settings, "seed": seed})
        except UserError as error:
            raise UserError(f"row {self.name}: {error}") from None


def read_row(path: Path) -> Row:
    """Read one row's file."""
    return Row(path.stem, load_settings(RowFile, [path]))


def known_rows() -> dict[str, Row]:
    """The rows that come with afire, in the order of their tables."""
    rows = [read_row(path) for path in sorted(FOLDER.glob("*.yaml"))]
    order = list(TABLES)
    rows.sort(key=lambda row: min((order.index(table), place) for table, place in row.tables.items()))
    return {row.name: row for row in rows}


def choose_rows(text: str) -> list[Row]:
    """``table1``, ``table4``, ``ours``, ``all``, names, YAML files or folders of them, separated by commas.

    The full method is always among them, first: it is what the others are compared with.
    """
    known = known_rows()
    chosen: dict[str, Row] = {FULL: known[FULL]}
    for word in (word.strip() for word in text.split(",")):
        if word:
            chosen.update((row.name, row) for row in _rows_of(word, known))
    return list(chosen.values())


def _rows_of(word: str, known: Mapping[str, Row]) -> Iterable[Row]:
    if word == ALL:
        return known.values()
    if word in TABLES:
        return sorted((row for row in known.values() if word in row.tables), key=lambda row: row.tables[word])
    if word in known:
        return [known[word]]
    path = Path(word)
    if path.is_dir():
        return _own_rows(sorted(path.glob("*.yaml")), path, known)
    if path.suffix in (".yaml", ".yml"):
        return _own_rows([path], path, known)
    words = [ALL, *TABLES, *known]
    close = difflib.get_close_matches(word, words, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UserError(f"there is no row {word!r}{hint} (--rows takes {', '.join(words)}, or YAML files).")


def _own_rows(paths: Sequence[Path], where: Path, known: Mapping[str, Row]) -> list[Row]:
    """A user's own rows; one that takes the name of ours without being it would be mistaken for it."""
    if not paths:
        raise UserError(f"{where} holds no .yaml file of a row.")
    rows = [read_row(path) for path in paths]
    for row in rows:
        if row.name in known and row.settings != known[row.name].settings:
            raise UserError(f"{where}: {row.name} is the name of a row of afire with other settings; rename the file.")
    return rows

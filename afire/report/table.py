"""The one table of results, as Markdown, LaTeX (booktabs), CSV and on the terminal; how numbers and lists are written.

A table holds columns and rows, whatever they are about. Texts come as they are: each writer escapes what its format
would misread.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from afire.tasks.results import Estimate

DISCLAIMER = "Research software, not a medical device."
METRIC_WORDS = {
    "auc": "AUC",
    "average_precision": "average precision",
    "accuracy": "accuracy",
    "f1": "F1",
    "dice": "Dice",
    "dice_positive": "Dice of positives",
    "iou": "IoU",
    "iou_positive": "IoU of positives",
}
_SHORT = {"average_precision": "AP", "accuracy": "ACC", "dice_positive": "Dice+", "iou_positive": "IoU+"}
DASH = "–"  # a number that does not exist


def metric_word(name: str) -> str:
    """``average_precision`` -> ``average precision``; known abbreviations in their usual spelling."""
    return METRIC_WORDS.get(name, name.replace("_", " "))


def short_word(name: str) -> str:
    """The same for a narrow column: ``AP``, ``ACC``."""
    return _SHORT.get(name, metric_word(name))


def number(value: float, digits: int = 3) -> str:
    """``0.853``, or a dash for a number that does not exist."""
    return DASH if math.isnan(value) else f"{value:.{digits}f}"


def signed(value: float) -> str:
    """``+0.034``, ``−0.012``."""
    return DASH if math.isnan(value) else f"{value:+.3f}".replace("-", "−")


def mean_sd(estimate: Estimate, digits: int = 3) -> str:
    """``0.853 ± 0.004``; one run has no sd."""
    text = number(estimate.mean, digits)
    return text if math.isnan(estimate.sd) else f"{text} ± {estimate.sd:.{digits}f}"


def interval_text(estimate: Estimate, digits: int = 3) -> str:
    """``0.821 to 0.880``, or nothing."""
    return "" if math.isnan(estimate.low) else f"{estimate.low:.{digits}f} to {estimate.high:.{digits}f}"


def p_text(p: float) -> str:
    """``0.031``, ``< 0.001`` or a dash."""
    return DASH if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


_FRAMED = 80  # columns of a terminal from which a frame leaves room for names
Mark = Literal["", "bold", "italic", "dim"]


@dataclass(frozen=True)
class Column:
    """``text`` columns stand left and may wrap, those of numbers right and may not; ``wrap`` says otherwise.

    ``group`` is a heading over several columns, ``short`` the title where there is little room (terminal and LaTeX),
    ``latex`` the title as LaTeX. ``key`` is what :meth:`Table.only` calls it; without one it is the title.
    """

    title: str
    text: bool = False
    group: str = ""
    short: str | None = None
    latex: str | None = None
    key: str = ""
    wrap: bool | None = None

    @property
    def narrow(self) -> str:
        return self.title if self.short is None else self.short


@dataclass(frozen=True)
class Cell:
    """A text with LaTeX of its own, where the text escaped would not do."""

    text: str
    latex: str


Entry = str | Cell


@dataclass(frozen=True)
class Row:
    """``mark`` sets its name (Markdown) or the whole line (terminal) off from the others."""

    cells: Sequence[Entry]
    mark: Mark = ""


@dataclass(frozen=True)
class Block:
    """Rows that belong together, with a title where there is room for one (LaTeX)."""

    rows: Sequence[Row]
    title: str = ""


@dataclass(frozen=True)
class Table:
    """Columns and blocks of rows; :func:`table_of` makes the usual one."""

    columns: Sequence[Column]
    blocks: Sequence[Block]
    title: str = ""

    @property
    def rows(self) -> list[Row]:
        return [row for block in self.blocks for row in block.rows]

    def only(self, *keys: str) -> Table:
        """The same table with these columns, in this order."""
        names = [column.key or column.title for column in self.columns]
        places = [names.index(key) for key in keys]
        blocks = [
            replace(block, rows=[replace(row, cells=[row.cells[place] for place in places]) for row in block.rows])
            for block in self.blocks
        ]
        return replace(self, columns=[self.columns[place] for place in places], blocks=blocks)

    def markdown(self) -> str:
        """A Markdown table, without the title."""
        header = [f"{column.group}, {column.title}" if column.group else column.title for column in self.columns]
        lines = [[_markdown_text(title) for title in header], ["---" if c.text else "---:" for c in self.columns]]
        for row in self.rows:
            cells = [_markdown_text(_text(cell)) for cell in row.cells]
            lines.append([f"{_MARKDOWN[row.mark]}{cells[0]}{_MARKDOWN[row.mark]}", *cells[1:]])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def latex(self, caption: str, small: bool = True) -> str:
        """A booktabs table, its blocks apart by rules; ``caption`` is LaTeX."""
        lines: list[str] = []
        for place, block in enumerate(self.blocks):
            lines += [r"\midrule"] if place else []
            if block.title:
                lines.append(rf"\multicolumn{{{len(self.columns)}}}{{l}}{{\emph{{{latex_text(block.title)}}}}} \\")
            lines += [_latex_line(_latex(cell) for cell in row.cells) for row in block.rows]
        body = [
            r"\centering\small" if small else r"\centering",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{''.join('l' if column.text else 'r' for column in self.columns)}}}",
            r"\toprule",
            *self._latex_header(),
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return "\n".join([r"\begin{table}", *(f"  {line}" for line in body), r"\end{table}", ""])

    def _latex_header(self) -> list[str]:
        titles = [latex_text(c.narrow) if c.latex is None else c.latex for c in self.columns]
        if not any(column.group for column in self.columns):
            return [_latex_line(titles)]
        above = []
        for group, members in groupby(self.columns, key=lambda column: column.group):
            count = len(list(members))
            above += [rf"\multicolumn{{{count}}}{{c}}{{{latex_text(group)}}}"] if group else [""] * count
        return [_latex_line(above), _latex_line(titles)]

    def csv(self) -> str:
        """Comma-separated values, under the columns' keys."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([column.key or column.title for column in self.columns])
        writer.writerows([_text(cell) for cell in row.cells] for row in self.rows)
        return stream.getvalue()

    def console(self, frame: bool = True) -> RichTable:
        """For the terminal; without a ``frame`` it is narrower."""
        bare: dict[str, Any] = {} if frame else {"box": None, "padding": (0, 1, 0, 0), "pad_edge": False}
        table = RichTable(title=Text(self.title), title_justify="left", **bare)
        for column in self.columns:
            title = Text(f"{column.group}\n{column.narrow}" if column.group else column.narrow)
            wrap = column.text if column.wrap is None else column.wrap
            # Folded, not cut: a name cut short may be the name of another result.
            table.add_column(title, justify="left" if column.text else "right", no_wrap=not wrap, overflow="fold")
        for place, block in enumerate(self.blocks):
            if place:
                table.add_row()
            for row in block.rows:
                table.add_row(*(Text(_text(cell), style=row.mark) for cell in row.cells))
        return table


def table_of(header: Sequence[str | Column], rows: Iterable[Sequence[Entry] | Row], title: str = "") -> Table:
    """A table whose first column is text and the others numbers, unless they are columns that say otherwise."""
    columns = [Column(title, text=not place) if isinstance(title, str) else title for place, title in enumerate(header)]
    lines = [row if isinstance(row, Row) else Row(row) for row in rows]
    return Table(columns, [Block(lines)], title)


def facts_table(facts: Mapping[str, str]) -> Table:
    """Names and facts, without a header."""
    return table_of(["", Column("", text=True)], list(facts.items()))


def records_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each record, every number in full; the columns are all the names that occur."""
    names = list(dict.fromkeys(name for record in records for name in record))
    return table_of(names, [[_full(record.get(name)) for name in names] for record in records])


def bullets(lines: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def picture_names(paths: Sequence[Path]) -> list[str]:
    """Of the files of figures, the names of those that a page shows."""
    return [path.name for path in paths if path.suffix == ".png"]


def show_table(screen: Console, table: Table) -> None:
    """A table on the terminal, without its frame where that would leave no room for names."""
    screen.print(table.console(frame=screen.width >= _FRAMED))


def show_summary(screen: Console, table: Table, messages: Iterable[str]) -> None:
    """A table on the terminal and the messages that sum it up."""
    screen.print(table.console(frame=False))
    for message in messages:
        screen.print(Text(f"- {message}"))
    screen.print()


def estimate_cell(estimate: Estimate, best: float = math.nan) -> Cell:
    """Mean and sd; in LaTeX the ``best`` mean of a column is bold."""
    if math.isnan(estimate.mean):
        return Cell(DASH, "--")
    mean = number(estimate.mean)
    mean = rf"\mathbf{{{mean}}}" if estimate.mean == best else mean
    sd = "" if math.isnan(estimate.sd) else rf" \pm {number(estimate.sd)}"
    return Cell(mean_sd(estimate), f"${mean}{sd}$")


def best_mean(estimates: Iterable[Estimate]) -> float:
    """The largest mean, without those that do not exist; NaN where none does."""
    return max((value.mean for value in estimates if not math.isnan(value.mean)), default=math.nan)


_MARKDOWN: Mapping[Mark, str] = {"": "", "bold": "**", "italic": "*", "dim": ""}
_ESCAPED = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
_SIGNED = re.compile(r"[+−][\d.]+")


def latex_text(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return "".join(_ESCAPED.get(character, character) for character in text)


def _latex(cell: Entry) -> str:
    """A cell as LaTeX: escaped, and with the signs of numbers in LaTeX's spelling."""
    if isinstance(cell, Cell):
        return cell.latex
    if _SIGNED.fullmatch(cell):
        return f"${cell.replace('−', '-')}$"
    return latex_text(cell.replace("\n", " ")).replace(DASH, "--").replace("±", r"$\pm$").replace("<", "$<$")


def _latex_line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _full(value: Any) -> str:
    return "" if value is None else str(value)


def _text(cell: Entry) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def _markdown_text(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

"""What a benchmark reports: figures with their goals, tables and notes. Without torch, so that rendering is fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Unit = Literal["x", "share", "%", "count"]


@dataclass(frozen=True)
class Figure:
    """A ratio of two measurements of one run (or a count), and its goal, if it has one.

    ``unit`` says how it is written: ``x`` is times, ``share`` a plain number around one, ``%`` a share in per cent.
    """

    name: str
    value: float
    unit: Unit = "x"
    goal: float | None = None
    direction: Literal["at least", "at most"] = "at least"

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value >= self.goal if self.direction == "at least" else self.value <= self.goal

    def written(self) -> str:
        return write_number(self.value, self.unit)

    def goal_written(self) -> str:
        return "" if self.goal is None else f"{self.direction} {write_number(self.goal, self.unit, exact=True)}"


@dataclass(frozen=True)
class Table:
    """Cells as they are to be read; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Findings:
    """The results of one benchmark; ``notes`` are sentences that depend on the run."""

    figures: Sequence[Figure]
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Findings:
        return cls(
            [Figure(**figure) for figure in data["figures"]],
            [Table(**table) for table in data.get("tables", ())],
            list(data.get("notes", ())),
        )


def overhead(results: Mapping[str, Mapping[str, Any]], column: str) -> Findings:
    """Of whole steps against their bare networks, by what is in ``column``; a result may have a ``goal``."""
    figures = [
        Figure(f"whole step / bare networks, {name}", one["ratio"], "share", one.get("goal"), "at most")
        for name, one in results.items()
    ]
    rows = [
        [name, digits(one["whole_seconds"]), digits(one["bare_seconds"]), digits(one["ratio"])]
        for name, one in results.items()
    ]
    return Findings(figures, [Table("Medians", [column, "whole, s", "bare, s", "ratio"], rows)])


def write_number(value: float, unit: Unit, exact: bool = False) -> str:
    """``37.5 ×``, ``0.83``, ``0.45 %`` or ``3``; ``exact`` leaves a goal as it was set."""
    if unit == "count":
        return f"{value:g}"
    if unit == "%":
        value *= 100
    text = f"{value:g}" if exact else digits(value)
    return text + {"x": " ×", "share": "", "%": " %"}[unit]


def digits(value: float) -> str:
    """About three digits, never more than are meant: 0.834, 2.91, 37.5, 1,240."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"

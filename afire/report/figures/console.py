"""The numbers of a figure on the terminal, taken from its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from afire.report.figures.files import FigureFiles
from afire.report.words import number

_SHORT = {"hit": "pointing game", "iou_half": "IoU, half", "iou_share": "IoU, highest"}


def number_table(files: FigureFiles) -> Table:
    """One table for each kind of figure: a row for each weights, input or result."""
    kind = str(files.record["figure"])
    header, rows = _ROWS[kind](files.numbers)
    table = Table(title=None)
    table.add_column(header[0])
    for name in header[1:]:
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _maps(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    first = next(iter(numbers.values()))
    moved = "moved_films" in first
    header = ["weights", "silhouette", *(f"{k}-NN purity" for k in first["purity"]), "chance"]
    header += ["anatomy", "place"] if moved else []
    rows = []
    for label, one in numbers.items():
        purity = [f"{one['purity'][k]['mean']:.3f}" for k in one["purity"]]
        row = [label, f"{one['silhouette']:.3f}", *purity, f"{one['purity_by_chance']:.3f}"]
        rows.append(row + ([_percent(one["moved_films"][k]) for k in ("anatomy", "place")] if moved else []))
    return header, rows


def _cam(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for label, one in numbers.items():
        for name, words in _SHORT.items():
            found = one[name]
            interval = f"{_text(found['low'])} to {_text(found['high'])}"
            cells = [_text(found["mean"]), interval, _text(found["chance"]), _text(found["maps_of_other_films"])]
            rows.append([label, words, *cells])
    return ["classifier", "", "mean", "95 %", "chance", "other films"], rows


def _restorations(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    words = {"z_mask": "with z_mask", "all_seen": "all tokens seen", "untouched": "not restored"}
    rows = [
        [
            f"{name} input, {words[way]}",
            *(_text(_thousand(one[where]["mean"]), 2) for where in ("hidden_tokens", "elsewhere")),
        ]
        for name, ways in numbers.items()
        for way, one in ways.items()
    ]
    return ["mean squared error x 1000", "hidden tokens", "elsewhere"], rows


def _atlas(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [
        ["mean entropy of a prototype (1 = uniform)", f"{numbers['mean_entropy']:.3f}"],
        ["clusters that are likeliest somewhere", f"{numbers['likeliest_clusters']} of {numbers['clusters']}"],
        ["closest patch at home", f"{_percent(numbers['at_home'])} (chance {_percent(numbers['at_home_by_chance'])})"],
        ["closest patch at home or beside", _percent(numbers["at_home_or_beside"])],
        ["Hellinger distance of the nearest patches", f"{numbers['nearest_distance']:.3f}"],
    ]
    return ["prototypes", "value"], rows


def _auc(numbers: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    labels = list(next(iter(numbers.values())))
    rows = [[label.replace("_", " "), *(_text(one[label]["mean"]) for one in numbers.values())] for label in labels]
    return ["finding", *numbers], rows


_ROWS = {
    "tsne": _maps,
    "landmarks": _maps,
    "gradcam": _cam,
    "restorations": _restorations,
    "atlas": _atlas,
    "auc": _auc,
}


def _text(value: float | None, digits: int = 3) -> str:
    return number(float("nan") if value is None else value, digits)


def _thousand(value: float | None) -> float | None:
    return None if value is None else 1000 * value


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"

"""``afire data stats``: the contents of a manifest as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afire.cli.options import Quiet, Root, Verbose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from afire.data.stats import Combination, Statistics

# As in the paper's tables; other labels are cut to six letters.
_SHORT = {
    "Atelectasis": "Atel.", "Cardiomegaly": "Card.", "Consolidation": "Cons.", "Edema": "Edema",
    "Enlarged Cardiomediastinum": "E.C.", "Fracture": "Frac.", "Lung Lesion": "LungL.", "Lung Opacity": "LungO.",
    "No Finding": "N.F.", "Pleural Effusion": "P.E.", "Pleural Other": "P.O.", "Pneumonia": "Pneu.",
    "Pneumothorax": "PneuX.", "Support Devices": "S.D.", "Effusion": "Effu.", "Infiltration": "Infi.",
    "Nodule": "Nodu.", "Emphysema": "Emph.", "Fibrosis": "Fibr.", "Pleural_Thickening": "P.T.", "Hernia": "Hern.",
}  # fmt: skip
_PIPED_WIDTH = 140  # a log file cannot be resized


def stats(
    data: Annotated[Path, typer.Option("--data", help="A manifest (.parquet or .csv), a pack or a folder of films.")],
    root: Root = None,
    combinations: Annotated[
        bool | None,
        typer.Option(help="Show the most frequent combinations of labels.", show_default="with 5 labels or more"),
    ] = None,
    top: Annotated[int, typer.Option(help="How many combinations to show.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Count films, patients and labels per split, views, and combinations of labels.

    Example: [cyan]afire data stats --data nih.parquet --top 10[/cyan]
    """
    from rich.console import Console

    from afire.data.manifest import read_manifest
    from afire.data.stats import describe

    if data.is_dir():  # a pack or a folder of films; needs torch, which takes seconds to load
        from afire.data.pack import open_manifest

        manifest = open_manifest(data, root)
    else:
        manifest = read_manifest(data, root)
    statistics = describe(manifest, top, combinations)
    if as_json:
        typer.echo(json.dumps({"info": dict(manifest.info), **statistics.as_dict()}, indent=2, allow_nan=False))
        return
    screen = Console()
    if not screen.is_terminal:
        screen = Console(width=_PIPED_WIDTH)
    show(screen, "films per split", split_table(statistics))
    if statistics.labels:
        show(screen, "films with each label (share of those where it is known)", label_table(statistics))
    screen.print(_facts(statistics, manifest.info.get("normal")), highlight=False, markup=False)
    if statistics.combinations:
        for title, table in combination_tables(statistics, screen):
            screen.print()
            show(screen, title, table)


def show(screen: Console, title: str, table: Table) -> None:
    """A table under its title; rich's own titles are broken to the width of a narrow table."""
    screen.print(title, style="italic", highlight=False, markup=False)
    screen.print(table)


def split_table(statistics: Statistics) -> Table:
    """Films, patients, normal, abnormal and unknown of each split."""
    from rich.table import Table

    table = Table("split")
    for name in ("films", "patients", "normal", "abnormal", "unknown"):
        table.add_column(name, justify="right")
    for split, of in statistics.splits.items():
        counts = (of.films, of.patients, of.normal, of.abnormal, of.unknown)
        if split == "all" and len(statistics.splits) > 1:
            table.add_section()
        table.add_row(split, *map(_number, counts))
    return table


def label_table(statistics: Statistics) -> Table:
    """Positive films of each label in each split, with the share of those known, and patients who have it."""
    from rich.markup import escape
    from rich.table import Table

    splits = list(statistics.splits)
    table = Table("label")
    for split in splits:
        table.add_column(split, justify="right")
    table.add_column("unknown", justify="right")
    table.add_column("patients", justify="right")
    for label, per_split in statistics.labels.items():
        shares = []
        for split in splits:
            counts = per_split[split]
            known_films = counts.positive + counts.negative
            share = f" ({counts.positive / known_films:.1%})" if known_films else ""
            shares.append(_number(counts.positive) + share)
        total = per_split[splits[-1]]
        table.add_row(escape(label), *shares, _number(total.unknown), _number(total.patients))
    return table


def _facts(statistics: Statistics, rule: str | None) -> str:
    views = ", ".join(f"{view} {count:,}" for view, count in statistics.views.items())
    per_patient = ", ".join(f"{name} {value:.4g}" for name, value in statistics.films_per_patient.items())
    lines = [
        f"views: {views}",
        f"films per patient: {per_patient}",
        f"boxes: {statistics.boxes:,}; films with a mask: {statistics.masks:,}",
    ]
    if statistics.films_without_patient:
        lines.append(f"films without a patient id: {statistics.films_without_patient:,}, each counted as a patient")
    if rule:
        lines.append(f"the column normal: {rule}")
    if statistics.crossing_patients:
        lines.append(f"WARNING: {statistics.crossing_patients:,} patients have films in more than one split")
    return "\n".join(lines)


def combination_tables(statistics: Statistics, screen: Console) -> list[tuple[str, Table]]:
    """The paper's table of the most frequent combinations, and the same merged without Support Devices; with titles."""
    labels = list(statistics.labels)
    title = f"most frequent of {statistics.distinct_combinations:,} combinations of labels (unknown counts as 0)"
    tables = [(title, _combinations(statistics.combinations, labels, screen))]
    if statistics.merged:
        other_labels = [label for label in labels if label not in statistics.merged_without]
        rows, merged = len(statistics.combinations), len(statistics.merged)
        title = f"the same {rows} rows merged without {', '.join(statistics.merged_without)}: {merged} categories"
        tables.append((title, _combinations(statistics.merged, other_labels, screen)))
    return tables


def _combinations(rows: Sequence[Combination], labels: Sequence[str], screen: Console) -> Table:
    """Ones and zeros as in the paper where the terminal is wide enough, else the names of the labels."""
    from rich.markup import escape

    matrix = _combination_table([escape(_SHORT.get(label, label[:6])) for label in labels], centred=True)
    names = _combination_table(["labels"], centred=False)
    for number, row in enumerate(rows, 1):
        cells = ["1" if label in row.labels else "[dim]0[/dim]" for label in labels]
        matrix.add_row(str(number), *cells, _number(row.films))
        names.add_row(str(number), escape(" + ".join(row.labels) or "(none)"), _number(row.films))
    unlimited = screen.options.update_width(10_000)  # measured in the terminal's own width, everything would fit
    return matrix if screen.measure(matrix, options=unlimited).maximum <= screen.width else names


def _combination_table(columns: Sequence[str], centred: bool) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("#", justify="right")
    for name in columns:
        table.add_column(name, justify="center" if centred else "left", no_wrap=centred)
    table.add_column("films", justify="right", no_wrap=True)
    return table


def _number(value: int) -> str:
    return f"{value:,}"

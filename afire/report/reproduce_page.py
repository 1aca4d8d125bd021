"""``reproduce.md`` and its LaTeX tables: the paper, ours, and where the protocols differ."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from afire._version import __version__
from afire.files import read_json, write_json, write_text
from afire.report.figures.files import FigureFiles, number_table
from afire.report.style import DISCLAIMER
from afire.report.task_tables import latex_text, markdown_table
from afire.studies.reproduce.collect import Block, Row, TargetReport
from afire.studies.reproduce.protocol import Difference
from afire.tasks.results import Estimate, to_json

PAGE, NUMBERS = "reproduce.md", "reproduce.json"


def write_reproduction(
    out: Path, reports: Sequence[TargetReport], facts: Mapping[str, str], commands: Sequence[str]
) -> Path:
    """Write the page, a LaTeX file for each table and every number as JSON; the page's path."""
    for report in reports:
        for number, block in enumerate(report.blocks):
            name = report.target if len(report.blocks) == 1 else f"{report.target}-{number + 1}"
            write_text(out / "tables" / f"{name}.tex", block_latex(block, report.title))
    write_json(out / NUMBERS, to_json({"facts": dict(facts), "targets": [_record(one) for one in reports]}))
    write_text(out / PAGE, reproduction_page(out, reports, facts, commands))
    return out / PAGE


def reproduction_page(
    out: Path, reports: Sequence[TargetReport], facts: Mapping[str, str], commands: Sequence[str]
) -> str:
    """The page as Markdown; paths in it are relative to ``out``."""
    parts = ["# Reproduction"]
    parts.append("\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in facts.items())]))
    parts.append(
        "Numbers are percentages, as in the paper: *paper* as published, *ours* mean ± sd over runs, with the protocol "
        "differences below each table. A number beside one of the paper's is comparable only as far as that list "
        "is short."
    )
    shared, names = shared_pretraining(reports)
    if names:
        parts += ["## The pre-training", f"Behind {', '.join(names)}:", differences_markdown(shared)]
    for report in reports:
        parts += _target_parts(out, report)
    parts += ["## Commands", "```\n" + "\n".join(commands) + "\n```"]
    return "\n\n".join([*parts, f"afire {__version__}. {DISCLAIMER}"]) + "\n"


def shared_pretraining(reports: Sequence[TargetReport]) -> tuple[list[Difference], list[str]]:
    """Differences of the one pre-training behind several targets, and those targets' names."""
    behind = [report for report in reports if report.pretraining]
    return (behind[0].pretraining, [report.target for report in behind]) if behind else ([], [])


def _target_parts(out: Path, report: TargetReport) -> list[str]:
    parts = [f"## {report.title}"]
    if report.unfinished:
        return [*parts, f"**Nothing here yet.** {report.unfinished[:1].upper()}{report.unfinished[1:]}."]
    for block in report.blocks:
        parts += [f"{block.title} ({block.source}):", block_markdown(block)]
    for stem in report.figures:
        parts.append(f"![{stem.name}]({_relative(stem, out)}.png)")
        parts += [figure_numbers(stem)] if stem.with_name(f"{stem.name}.json").exists() else []
    parts += ["Protocol differences:", differences_markdown(report.differences)]
    if report.notes:
        parts.append("\n".join(f"- {note}" for note in report.notes))
    return parts


def block_markdown(block: Block) -> str:
    """Two columns for each of the paper's: its number and ours."""
    header = [""]
    for words in block.columns.values():
        header += [f"{words}, paper", f"{words}, ours"]
    return markdown_table(header, [[_name(row), *_cells(row, block)] for row in block.rows])


def _name(row: Row) -> str:
    return f"**{row.name}**" if row.ours and row.paper else row.name


def _cells(row: Row, block: Block) -> list[str]:
    cells = []
    for key in block.columns:
        cells += [percent(row.paper.get(key)), percent_sd(row.ours.get(key))]
    return cells


def percent(share: float | None) -> str:
    """``89.4``, or a dash."""
    return "–" if share is None or math.isnan(share) else f"{100 * share:.1f}"


def percent_sd(one: Estimate | None) -> str:
    """``89.4 ± 0.3``; one run has no sd."""
    if one is None or math.isnan(one.mean):
        return "–"
    return percent(one.mean) if math.isnan(one.sd) else f"{percent(one.mean)} ± {100 * one.sd:.1f}"


def differences_markdown(differences: Sequence[Difference]) -> str:
    """What the paper did and what was done here."""
    lines = [f"| {_cell(one.setting)} | {_cell(one.paper)} | {_cell(one.ours)} |" for one in differences]
    return "\n".join(["| | paper | ours |", "|---|---|---|", *lines]) if lines else "None that afire knows of."


def figure_numbers(stem: Path) -> str:
    """The numbers of a figure, as ``afire figure`` shows them."""
    png, pdf, record = (stem.with_name(stem.name + ending) for ending in (".png", ".pdf", ".json"))
    table = number_table(FigureFiles(png, pdf, record, read_json(record)))
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    header, *rows = [list(row) for row in zip(*columns, strict=True)]
    return markdown_table(header, rows)


def block_latex(block: Block, title: str) -> str:
    """A booktabs table; the better of the paper's number and ours is not marked: protocols differ."""
    header = ["", *(f"\\multicolumn{{2}}{{c}}{{{latex_text(words)}}}" for words in block.columns.values())]
    below = ["", *["paper", "ours"] * len(block.columns)]
    lines = [
        " & ".join([latex_text(row.name), *(_latex(cell) for cell in _cells(row, block))]) + r" \\"
        for row in block.rows
    ]
    caption = f"{latex_text(title)}. {latex_text(block.title)} ({latex_text(block.source)}), percent."
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering\small",
            f"  \\caption{{{caption} {latex_text(DISCLAIMER)}}}",
            f"  \\begin{{tabular}}{{l{'rr' * len(block.columns)}}}",
            r"  \toprule",
            "  " + " & ".join(header) + r" \\",
            "  " + " & ".join(below) + r" \\",
            r"  \midrule",
            *(f"  {line}" for line in lines),
            r"  \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _latex(cell: str) -> str:
    return cell.replace("–", "--").replace("±", r"$\pm$")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _relative(path: Path, start: Path) -> str:
    return os.path.relpath(path, start).replace(os.sep, "/")


def _record(report: TargetReport) -> dict[str, object]:
    return {
        "target": report.target,
        "unfinished": report.unfinished or None,
        "tables": [
            {
                "title": block.title,
                "source": block.source,
                "rows": [
                    {
                        "name": row.name,
                        "paper": dict(row.paper),
                        "ours": {key: vars(one) for key, one in row.ours.items()},
                    }
                    for row in block.rows
                ],
            }
            for block in report.blocks
        ],
        "differences": [vars(one) for one in (*report.pretraining, *report.differences)],
        "figures": [f"{stem.name}.png" for stem in report.figures],
        "notes": report.notes,
    }

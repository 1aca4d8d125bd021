"""``reproduce.md``, its LaTeX tables and the terminal: the paper, ours, and where the protocols differ."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from afire._version import __version__
from afire.files import read_json, write_json, write_text
from afire.report.figures.files import FigureFiles, number_table
from afire.report.table import DASH, DISCLAIMER, Column, Table, bullets, facts_table, latex_text, table_of
from afire.report.table import Row as Line
from afire.studies.reproduce_collect import Block, Difference, Row, TargetReport
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
    write_json(out / NUMBERS, to_json({"facts": dict(facts), "targets": [_record(report) for report in reports]}))
    write_text(out / PAGE, reproduction_page(out, reports, facts, commands))
    return out / PAGE


def reproduction_page(
    out: Path, reports: Sequence[TargetReport], facts: Mapping[str, str], commands: Sequence[str]
) -> str:
    """The page as Markdown; paths in it are relative to ``out``."""
    sections = ["# Reproduction", facts_table(facts).markdown()]
    sections.append(
        "Numbers are percentages, as in the paper: *paper* as published, *ours* mean ± sd over runs, with the protocol "
        "differences below each table. A number beside one of the paper's is comparable only as far as that list "
        "is short."
    )
    shared, names = shared_pretraining(reports)
    if names:
        sections += ["## The pre-training", f"Behind {', '.join(names)}:", differences_markdown(shared)]
    for report in reports:
        sections += _target_sections(out, report)
    sections += ["## Commands", "```\n" + "\n".join(commands) + "\n```"]
    return "\n\n".join([*sections, f"afire {__version__}. {DISCLAIMER}"]) + "\n"


def shared_pretraining(reports: Sequence[TargetReport]) -> tuple[list[Difference], list[str]]:
    """Differences of the one pre-training behind several targets, and those targets' names."""
    behind = [report for report in reports if report.pretraining]
    return (behind[0].pretraining, [report.target for report in behind]) if behind else ([], [])


def _target_sections(out: Path, report: TargetReport) -> list[str]:
    sections = [f"## {report.title}"]
    if report.unfinished:
        return [*sections, f"**Nothing here yet.** {report.unfinished[:1].upper()}{report.unfinished[1:]}."]
    for block in report.blocks:
        sections += [f"{block.title} ({block.source}):", block_table(block).markdown()]
    for stem in report.figures:
        sections.append(f"![{stem.name}]({_relative(stem, out)}.png)")
        sections += [figure_numbers(stem).markdown()] if stem.with_name(f"{stem.name}.json").exists() else []
    sections += ["Protocol differences:", differences_markdown(report.differences)]
    if report.notes:
        sections.append(bullets(report.notes))
    return sections


def show_targets(screen: Console, reports: Sequence[TargetReport]) -> None:
    """The same on the terminal: rows that have numbers of ours, figures, differences and notes."""
    shared, names = shared_pretraining(reports)
    if names:
        title = f"protocol differences of the pre-training behind {', '.join(names)}"
        screen.print(difference_table(shared, title).console())
    for report in reports:
        _show(screen, report)


def _show(screen: Console, report: TargetReport) -> None:
    screen.print(Text(f"\n{report.title}", style="bold"))
    if report.unfinished:
        screen.print(Text(f"nothing yet: {report.unfinished}", style="yellow"), soft_wrap=True)
        return
    for block in report.blocks:
        ours = replace(block, rows=[row for row in block.rows if row.ours])
        screen.print(block_table(ours, f"{block.title} ({block.source})").console())
    for stem in report.figures:
        screen.print(f"{stem}.png", soft_wrap=True, markup=False, highlight=False)
    screen.print(difference_table(report.differences, "protocol differences").console())
    for note in report.notes:
        screen.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def block_table(block: Block, title: str = "") -> Table:
    """Two columns for each of the paper's: its number and ours, in percent."""
    columns = [Column("", text=True, short="percent", latex="")]
    columns += [Column(side, group=title) for title in block.columns.values() for side in ("paper", "ours")]
    return table_of(columns, [_line(row, block) for row in block.rows], title)


def _line(row: Row, block: Block) -> Line:
    pairs = [(percent(row.paper.get(key)), percent_sd(row.ours.get(key))) for key in block.columns]
    return Line([row.name, *(text for pair in pairs for text in pair)], "bold" if row.ours and row.paper else "")


def block_latex(block: Block, title: str) -> str:
    """A booktabs table; the better of the paper's number and ours is not marked: protocols differ."""
    caption = f"{title}. {block.title} ({block.source}), percent. {DISCLAIMER}"
    return block_table(block).latex(latex_text(caption))


def percent(share: float | None) -> str:
    """``89.4``, or a dash."""
    return DASH if share is None or math.isnan(share) else f"{100 * share:.1f}"


def percent_sd(estimate: Estimate | None) -> str:
    """``89.4 ± 0.3``; one run has no sd."""
    if estimate is None or math.isnan(estimate.mean):
        return DASH
    mean = percent(estimate.mean)
    return mean if math.isnan(estimate.sd) else f"{mean} ± {100 * estimate.sd:.1f}"


def differences_markdown(differences: Sequence[Difference]) -> str:
    """What the paper did and what was done here."""
    return difference_table(differences).markdown() if differences else "None that afire knows of."


def difference_table(differences: Sequence[Difference], title: str = "") -> Table:
    columns = [Column(name, text=True) for name in ("", "paper", "ours")]
    return table_of(columns, [[row.setting, row.paper, row.ours] for row in differences], title)


def figure_numbers(stem: Path) -> Table:
    """The numbers of a figure, as ``afire figure`` shows them."""
    png, pdf, record = (stem.with_name(stem.name + ending) for ending in (".png", ".pdf", ".json"))
    return number_table(FigureFiles(png, pdf, record, read_json(record)))


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
                        "ours": {key: vars(value) for key, value in row.ours.items()},
                    }
                    for row in block.rows
                ],
            }
            for block in report.blocks
        ],
        "differences": [vars(row) for row in (*report.pretraining, *report.differences)],
        "figures": [f"{stem.name}.png" for stem in report.figures],
        "notes": report.notes,
    }

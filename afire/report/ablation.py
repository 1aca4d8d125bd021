"""An ablation for people: the table as Markdown, LaTeX, CSV, JSON and on the terminal, and as a picture.

The picture has a line for each row: a dot for its mean, the sd, each seed, and the paper's value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.text import Text

from afire._version import __version__
from afire.detect.maps import SCORES as DETECTOR_SCORES
from afire.files import write_json, write_text
from afire.report.style import COLOURS, FAINT, INK, save_figure, style
from afire.report.table import (
    DASH,
    DISCLAIMER,
    Block,
    Cell,
    Column,
    Entry,
    Row,
    Table,
    best_mean,
    bullets,
    estimate_cell,
    facts_table,
    latex_text,
    mean_sd,
    number,
    p_text,
    picture_names,
    records_table,
    signed,
    table_of,
)
from afire.studies.ablation_grid import FULL, MAIN_SCORE, SCORES, TABLES
from afire.studies.ablation_table import MEASURES, PROBE_METRICS, AblationTable, Ordering, TableRow

_OTHER = "Other rows"
CAUTION = "caution"
_COLUMNS = [
    Column("row", text=True, latex="Row"),
    Column("AUC", key="auc"),
    Column("ACC", key="accuracy"),
    Column("F1", key="f1"),
    Column("paper AUC / ACC / F1", latex="Paper", key="paper"),
    Column("paper", key="paper_auc"),
    Column("Δ AUC", latex=r"$\Delta$AUC", key="auc_difference"),
    Column("p seeds", latex="$p$ seeds", key="auc_p_seeds"),
    Column("p paired", latex="$p$ paired", key="auc_p_paired"),
    Column("detection AUC", short="detection", latex="Detection", key="detection"),
    Column("Δ", key="detection_difference"),
    Column("p seeds", key="detection_p_seeds"),
    Column("p paired", latex="$p$ paired", key="detection_p_paired"),
    Column("seeds"),
    Column("min a trial", key="minutes"),
]
_TESTS = ("difference", "p_seeds", "p_paired")
_AUC_TESTS, _DETECTION_TESTS = ([f"{name}_{test}" for test in _TESTS] for name in ("auc", "detection"))
_PAGE = ("row", *PROBE_METRICS, "paper", *_AUC_TESTS, "detection", *_DETECTION_TESTS, "seeds", "minutes")
_LATEX = ("row", *PROBE_METRICS, "paper", *_AUC_TESTS, "detection", "detection_p_paired")
_TERMINAL = ("row", "auc", "paper_auc", "auc_p_paired", "detection", "detection_p_paired")


def write_ablation(out: Path, table: AblationTable) -> Path:
    """Write the table in every form and the picture; the page's path."""
    with style():
        pictures = save_figure(ablation_figure(table), out / "ablation")
    write_text(out / "table.md", ablation_markdown(table, picture_names(pictures)))
    write_text(out / "table.tex", ablation_latex(table))
    write_text(out / "table.csv", ablation_csv(table))
    write_json(out / "table.json", ablation_json(table))
    return out / "table.md"


def sections(table: AblationTable) -> list[tuple[str, list[TableRow]]]:
    """The rows by table of the paper, in its order; the full method opens each. A user's own rows come last."""
    full = [row for row in table.rows if row.row.name == FULL]
    groups = []
    for name, title in TABLES.items():
        members = [row for row in table.rows if name in row.row.tables and row.row.name != FULL]
        if members:
            groups.append((title, full + sorted(members, key=lambda row: row.row.tables[name])))
    own_rows = [row for row in table.rows if not row.row.tables]
    return [*groups, *([(_OTHER, full + own_rows)] if own_rows else [])] or [(TABLES["table1"], full)]


def ablation_markdown(table: AblationTable, pictures: Sequence[str] = ()) -> str:
    """The page of an ablation."""
    paragraphs = ["# Ablation", facts_table({k: v for k, v in table.facts.items() if k != CAUTION}).markdown()]
    paragraphs += [f"**Caution.** {table.facts[CAUTION]}"] if CAUTION in table.facts else []
    for title, rows in sections(table):
        paragraphs += [f"## {title}", _shown([(title, rows)]).only(*_PAGE).markdown()]
    paragraphs += ["## Detection without adaptation", _detector_text(), _detector_table(table.rows).markdown()]
    if table.ordering is not None:
        paragraphs += ["## Our order and the paper's", ordering_text(table.ordering)]
    paragraphs += ["## How to read it", _reading(table)]
    if table.notes:
        paragraphs.append(bullets(table.notes))
    paragraphs += [f"![{name}]({name})" for name in pictures]
    return "\n\n".join([*paragraphs, f"afire {__version__}. {DISCLAIMER}"]) + "\n"


def show_ablation(screen: Console, table: AblationTable) -> None:
    """The table on the terminal, and what must be known to read it."""
    screen.print(_shown([("", table.rows)]).only(*_TERMINAL).console())
    if table.ordering is not None:
        screen.print(Text(ordering_text(table.ordering)), soft_wrap=True)
    if CAUTION in table.facts:
        screen.print(Text(f"caution: {table.facts[CAUTION]}", style="yellow"), soft_wrap=True)
    for note in table.notes:
        screen.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def ablation_latex(table: AblationTable) -> str:
    """One booktabs table, its groups apart by rules; the best mean of each column in bold."""
    seeds = max(len(row.seeds) for row in table.rows)
    caption = (
        f"Ablation: linear probe and detection AUC, mean $\\pm$ sd over {seeds} seed{'s' if seeds > 1 else ''}. "
        f"Paper: its AUC / ACC / F1. Data: {_plain(table.facts['data'])}; {_plain(table.facts['budget'])}."
        + (f" Caution: {_plain(table.facts[CAUTION])}" if CAUTION in table.facts else "")
    )
    best = {name: best_mean(row.measures[name] for row in table.rows) for name in MEASURES}
    return _shown(sections(table), best).only(*_LATEX).latex(caption)


def ordering_text(ordering: Ordering) -> str:
    """Whether the rows come in the paper's order, in words."""
    start = (
        f"Spearman's rank correlation between our probe AUC and the paper's over {ordering.rows} rows is "
        f"{number(ordering.spearman, 2)}."
    )
    if not ordering.disagree:
        return f"{start} Every row lies on the same side of the full method as in the paper."
    return f"{start} Not on the side of the full method where the paper has them: {', '.join(ordering.disagree)}."


def _shown(groups: Sequence[tuple[str, Sequence[TableRow]]], best: Mapping[str, float] | None = None) -> Table:
    """Every column of every row; ``best`` are the means to set in bold in LaTeX."""
    marked = best or dict.fromkeys(MEASURES, math.nan)
    return Table(_COLUMNS, [Block([_shown_row(row, marked) for row in rows], title) for title, rows in groups])


def _shown_row(row: TableRow, best: Mapping[str, float]) -> Row:
    estimates = {name: estimate_cell(row.measures[name], best[name]) for name in MEASURES}
    cells: list[Entry] = [Cell(row.row.title, latex_text(row.row.title)), *(estimates[name] for name in PROBE_METRICS)]
    cells += [" / ".join(f"{100 * value:.1f}" for value in row.paper.values()) or DASH]
    cells += [number(row.paper["auc"]) if row.paper else DASH, *_against(row, "auc")]
    cells += [estimates["detection"], *_against(row, "detection"), str(len(row.seeds)), f"{row.minutes:.1f}"]
    return Row(cells, "bold" if row.row.name == FULL else "")


def _against(row: TableRow, measure: str) -> list[str]:
    if measure not in row.against:
        return ["= full" if row.same_as_full else DASH, DASH, DASH]
    against = row.against[measure]
    return [signed(against.difference), p_text(against.p_seeds), p_text(against.paired.p)]


def _detector_text() -> str:
    meanings = "; ".join(f"*{name}*: {DETECTOR_SCORES[name].meaning}" for name in SCORES)
    return (
        "AUC on the test films of scores of `afire detect`, fitted on normal training films without adaptation; "
        f"directions fixed beforehand. {meanings}. *{MAIN_SCORE}* is the detection column above, because every row has "
        "it; a dash: the row lacks what it needs."
    )


def _detector_table(rows: Sequence[TableRow]) -> Table:
    lines = [
        [row.row.title, *(mean_sd(row.scores[name]) if name in row.scores else DASH for name in SCORES)] for row in rows
    ]
    return table_of(["row", *SCORES], lines)


def _reading(table: AblationTable) -> str:
    return (
        "Mean ± sd over seeds; AUC, ACC and F1 are of the linear probe on the mean teacher token. *p seeds*: Welch's "
        f"independent two-sample t-test over the seeds. *p paired*: bootstrap over {table.drawn_over}, of the mean "
        "over seeds, both rows on the same draws. The first asks whether a difference would hold with other seeds, the "
        "second whether it would with other patients; a difference worth claiming passes both. The paper's column is "
        "the paper's own network, films and schedule (ViT-B, 81,117 films, 800 epochs), not this one."
    )


def _plain(text: str) -> str:
    return latex_text(text.replace("`", ""))


def ablation_csv(table: AblationTable) -> str:
    """A line for each row, every number in full."""
    return records_table([_record(row) for row in table.rows]).csv()


def ablation_json(table: AblationTable) -> dict[str, Any]:
    """The same numbers for programs, with each seed's value; a number that does not exist is null."""
    rows = [
        {
            **{name: _or_none(value) for name, value in _record(row).items()},
            "seeds": row.seeds,
            "values": {name: [_or_none(value) for value in row.measures[name].values] for name in MEASURES},
            "tables": dict(row.row.tables),
            "settings": row.row.settings,
        }
        for row in table.rows
    ]
    ordering = table.ordering
    return {
        "facts": table.facts,
        "rows": rows,
        "ordering": ordering
        and {"rows": ordering.rows, "spearman": _or_none(ordering.spearman), "disagree": ordering.disagree},
        "notes": table.notes,
        "afire": __version__,
    }


def _record(row: TableRow) -> dict[str, Any]:
    record: dict[str, Any] = {"row": row.row.name, "title": row.row.title, "seeds": len(row.seeds)}
    for name in MEASURES:
        value = row.measures[name]
        record |= {f"{name}_{key}": getattr(value, key) for key in ("mean", "sd", "low", "high")}
        if name in row.against:
            against = row.against[name]
            record |= {
                f"{name}_difference": against.difference,
                f"{name}_difference_low": against.paired.low,
                f"{name}_difference_high": against.paired.high,
                f"{name}_p_seeds": against.p_seeds,
                f"{name}_p_paired": against.paired.p,
            }
    record |= {f"paper_{name}": value for name, value in row.paper.items()}
    record |= {f"detector_{name}_mean": value.mean for name, value in row.scores.items()}
    record |= {f"detector_{name}_sd": value.sd for name, value in row.scores.items()}
    return record | {"minutes": row.minutes}


def _or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_LINE_HEIGHT = 0.27
_OURS, _PAPER = COLOURS[0], COLOURS[1]


def ablation_figure(table: AblationTable) -> Figure:
    """Two panels on one list of rows: probe AUC (with the paper's) and detection AUC."""
    lines = _lines(table)
    figure: Figure
    figure, (probe, detection) = plt.subplots(
        1, 2, figsize=(8.2, 1.5 + _LINE_HEIGHT * len(lines)), sharey=True, width_ratios=[1.35, 1]
    )
    for axis, measure, title in (
        (probe, "auc", "linear probe, AUC"),
        (detection, "detection", "detection without adaptation, AUC"),
    ):
        _panel(axis, lines, measure)
        axis.set_title(title)
    probe.set_yticks(range(len(lines)), [line if isinstance(line, str) else line.row.title for line in lines])
    for label, line in zip(probe.get_yticklabels(), lines, strict=True):
        bold = isinstance(line, str) or line.row.name == FULL
        label.set_fontweight("bold" if bold else "normal")
    probe.set_ylim(len(lines) - 0.5, -0.7)
    figure.legend(handles=_legend(lines), loc="outside upper right", ncols=4)
    figure.supxlabel(DISCLAIMER, fontsize=6.5, color=FAINT, x=0.01, ha="left")
    return figure


def _lines(table: AblationTable) -> list[str | TableRow]:
    """Titles of the groups, each followed by its rows."""
    lines: list[str | TableRow] = []
    for title, rows in sections(table):
        lines += [title, *rows]
    return lines


def _panel(axis: Axes, lines: Sequence[str | TableRow], measure: str) -> None:
    full = next(line for line in lines if not isinstance(line, str) and line.row.name == FULL)
    axis.axvline(full.measures[measure].mean, color=FAINT, linewidth=1, zorder=0)
    for height, line in enumerate(lines):
        if isinstance(line, str):
            continue
        axis.axhline(height, color=FAINT, linewidth=0.4, alpha=0.6, zorder=0)
        value = line.measures[measure]
        spread = 0.0 if math.isnan(value.sd) else value.sd
        axis.errorbar(value.mean, height, xerr=spread, color=_OURS, marker="o", markersize=5, linewidth=1.4, zorder=3)
        axis.plot(value.values, [height] * len(value.values), "|", color=INK, markersize=6, alpha=0.8, zorder=4)
        if measure in line.paper:
            axis.plot(
                line.paper[measure], height, "D", markersize=5.5, fillstyle="none", color=_PAPER, markeredgewidth=1.3
            )
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)


def _legend(lines: Sequence[str | TableRow]) -> list[Line2D]:
    handles = [
        Line2D([], [], color=_OURS, marker="o", markersize=5, linewidth=1.4, label="mean ± sd over seeds"),
        Line2D([], [], color=INK, marker="|", linestyle="none", label="one seed"),
    ]
    if any(not isinstance(line, str) and line.paper for line in lines):
        paper = {"marker": "D", "fillstyle": "none", "markersize": 5.5, "linestyle": "none"}
        handles.append(Line2D([], [], color=_PAPER, label="paper (other network and data)", **paper))  # type: ignore[arg-type]
    handles.append(Line2D([], [], color=FAINT, linewidth=1, label="full method"))
    return handles

"""The table of an ablation as Markdown, LaTeX (booktabs), CSV and JSON.

The ablation as a picture: a line for each row, a dot for its mean, the sd, each seed, and the paper's value.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from afire._version import __version__
from afire.report.style import COLOURS, DISCLAIMER, FAINT, INK, mean_sd, number, p_text
from afire.report.task_tables import latex_text, markdown_table, signed
from afire.studies.ablate_detect import DETECTION, DETECTORS
from afire.studies.ablation_grid import FULL, TABLES
from afire.studies.ablation_table import MEASURES, PROBE_METRICS, AblationTable, Ordering, TableRow
from afire.tasks.results import Estimate

_WORDS = {"auc": "AUC", "accuracy": "ACC", "f1": "F1", "detection": "detection AUC"}
_OTHER = "Other rows"
CAUTION = "caution"


def sections(table: AblationTable) -> list[tuple[str, list[TableRow]]]:
    """The rows by table of the paper, in its order; the full method opens each. A user's own rows come last."""
    full = [row for row in table.rows if row.row.name == FULL]
    found = []
    for name, title in TABLES.items():
        members = [row for row in table.rows if name in row.row.tables and row.row.name != FULL]
        if members:
            found.append((title, full + sorted(members, key=lambda row: row.row.tables[name])))
    own = [row for row in table.rows if not row.row.tables]
    return [*found, *([(_OTHER, full + own)] if own else [])] or [(TABLES["table1"], full)]


def ablation_markdown(table: AblationTable, pictures: Sequence[str] = ()) -> str:
    """The page of an ablation."""
    parts = ["# Ablation", _facts(table.facts)]
    for title, rows in sections(table):
        parts += [f"## {title}", _main_table(rows)]
    parts += ["## Detection without adaptation", _detector_text(), _detector_table(table.rows)]
    if table.ordering is not None:
        parts += ["## Our order and the paper's", ordering_sentence(table.ordering)]
    parts += ["## How to read it", _reading()]
    if table.notes:
        parts.append("\n".join(f"- {note}" for note in table.notes))
    parts += [f"![{name}]({name})" for name in pictures]
    return "\n\n".join([*parts, f"afire {__version__}. {DISCLAIMER}"]) + "\n"


def ordering_sentence(ordering: Ordering) -> str:
    """One or two sentences on whether the rows come in the paper's order."""
    start = (
        f"Spearman's rank correlation between our probe AUC and the paper's over {ordering.rows} rows is "
        f"{number(ordering.spearman, 2)}."
    )
    if not ordering.disagree:
        return f"{start} Every row lies on the same side of the full method as in the paper."
    return f"{start} Not on the side of the full method where the paper has them: {', '.join(ordering.disagree)}."


def _facts(facts: Mapping[str, str]) -> str:
    lines = [f"| {name} | {text} |" for name, text in facts.items() if name != CAUTION]
    page = "\n".join(["| | |", "|---|---|", *lines])
    return f"{page}\n\n**Caution.** {facts[CAUTION]}" if CAUTION in facts else page


def _main_table(rows: Sequence[TableRow]) -> str:
    header = ["row", "AUC", "ACC", "F1", "paper AUC / ACC / F1", "Δ AUC", "p seeds", "p paired"]
    header += ["detection AUC", "Δ", "p seeds", "p paired", "seeds", "min a trial"]
    return markdown_table(header, [_main_cells(row) for row in rows])


def _main_cells(row: TableRow) -> list[str]:
    paper = " / ".join(f"{100 * value:.1f}" for value in row.paper.values()) or "–"
    name = f"**{row.row.title}**" if row.row.name == FULL else row.row.title
    cells = [name, *(mean_sd(row.measures[metric]) for metric in PROBE_METRICS), paper, *_against(row, "auc")]
    cells += [mean_sd(row.measures["detection"]), *_against(row, "detection")]
    return [*cells, str(len(row.seeds)), f"{row.minutes:.1f}"]


def _against(row: TableRow, measure: str) -> list[str]:
    if measure not in row.against:
        return ["= full" if row.same_as_full else "–", "–", "–"]
    one = row.against[measure]
    return [signed(one.difference), p_text(one.p_seeds), p_text(one.paired.p)]


def _detector_text() -> str:
    words = "; ".join(f"*{name}*: {meaning}" for name, meaning in DETECTORS.items())
    return (
        f"AUC on the test films of scores that saw normal training films only, directions fixed beforehand. {words}. "
        f"*{DETECTION}* is the detection column above, because every row has it; a dash: the row lacks what it needs."
    )


def _detector_table(rows: Sequence[TableRow]) -> str:
    lines = [
        [row.row.title, *(mean_sd(row.detectors[name]) if name in row.detectors else "–" for name in DETECTORS)]
        for row in rows
    ]
    return markdown_table(["row", *DETECTORS], lines)


def _reading() -> str:
    return (
        "Mean ± sd over seeds; AUC, ACC and F1 are of the linear probe on the mean teacher token. *p seeds*: Welch's "
        "independent two-sample t-test over the seeds. *p paired*: bootstrap over test patients of the mean over "
        "seeds, both rows on the same draws. The first asks whether a difference would hold with other seeds, the "
        "second whether it would with other patients; a difference worth claiming passes both. The paper's column is "
        "the paper's own network, films and schedule (ViT-B, 81,117 films, 800 epochs), not this one."
    )


def ablation_latex(table: AblationTable) -> str:
    """One booktabs table, its groups apart by rules; the best mean of each column in bold."""
    groups = sections(table)
    best = {name: max(_mean(row.measures[name]) for row in table.rows) for name in MEASURES}
    lines: list[str] = []
    for number_, (title, rows) in enumerate(groups):
        lines += [r"  \midrule"] if number_ else []
        lines.append(f"  \\multicolumn{{10}}{{l}}{{\\emph{{{latex_text(title)}}}}} \\\\")
        lines += ["  " + " & ".join(_latex_cells(row, best)) + r" \\" for row in rows]
    header = ["Row", "AUC", "ACC", "F1", "Paper", r"$\Delta$AUC", "$p$ seeds", "$p$ paired", "Detection", "$p$ paired"]
    seeds = max(len(row.seeds) for row in table.rows)
    caption = (
        f"Ablation: linear probe and detection AUC, mean $\\pm$ sd over {seeds} seed{'s' if seeds > 1 else ''}. "
        f"Paper: its AUC / ACC / F1. Data: {_plain(table.facts['data'])}; {_plain(table.facts['budget'])}."
        + (f" Caution: {_plain(table.facts[CAUTION])}" if CAUTION in table.facts else "")
    )
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering\small",
            f"  \\caption{{{caption}}}",
            f"  \\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"  \toprule",
            "  " + " & ".join(header) + r" \\",
            r"  \midrule",
            *lines,
            r"  \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _latex_cells(row: TableRow, best: Mapping[str, float]) -> list[str]:
    paper = " / ".join(f"{100 * value:.1f}" for value in row.paper.values()) or "--"
    delta, p_seeds, p_paired = map(_latex_signs, _against(row, "auc"))
    cells = [latex_text(row.row.title), *(_latex_estimate(row.measures[name], best[name]) for name in PROBE_METRICS)]
    cells += [paper, delta, p_seeds, p_paired, _latex_estimate(row.measures["detection"], best["detection"])]
    return [*cells, _latex_signs(_against(row, "detection")[2])]


def _latex_estimate(one: Estimate, best: float) -> str:
    if math.isnan(one.mean):
        return "--"
    mean = rf"\mathbf{{{number(one.mean)}}}" if one.mean == best else number(one.mean)
    return f"${mean}$" if math.isnan(one.sd) else rf"${mean} \pm {number(one.sd)}$"


def _latex_signs(text: str) -> str:
    if text[:1] in "+−":
        return f"${text.replace('−', '-')}$"
    return text.replace("<", "$<$").replace("–", "--")


def _plain(text: str) -> str:
    return latex_text(text.replace("`", ""))


def ablation_csv(table: AblationTable) -> str:
    """A line for each row, every number in full."""
    stream = io.StringIO()
    records = [_record(row) for row in table.rows]
    names = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


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
        one = row.measures[name]
        record |= {f"{name}_mean": one.mean, f"{name}_sd": one.sd, f"{name}_low": one.low, f"{name}_high": one.high}
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
    record |= {f"detector_{name}_mean": one.mean for name, one in row.detectors.items()}
    record |= {f"detector_{name}_sd": one.sd for name, one in row.detectors.items()}
    return record | {"minutes": row.minutes}


def _or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(one: Estimate) -> float:
    return -math.inf if math.isnan(one.mean) else one.mean


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
        one = line.measures[measure]
        spread = 0.0 if math.isnan(one.sd) else one.sd
        axis.errorbar(one.mean, height, xerr=spread, color=_OURS, marker="o", markersize=5, linewidth=1.4, zorder=3)
        axis.plot(one.values, [height] * len(one.values), "|", color=INK, markersize=6, alpha=0.8, zorder=4)
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

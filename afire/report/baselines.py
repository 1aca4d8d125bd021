"""Pre-training methods side by side, for people: a table and a summary for each length, and two pictures.

One picture has a panel for each length and a line for each row, in the main measure: mean, interval, a tick for each
seed. The other shows the p-values between all pairs of methods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from afire._version import __version__
from afire.files import write_json, write_text
from afire.report.style import COLOURS, FAINT, draw_estimate, row_panels, save_figure, style
from afire.report.table import (
    DASH,
    DISCLAIMER,
    Block,
    Column,
    Row,
    Table,
    bullets,
    facts_table,
    interval_text,
    latex_text,
    mean_sd,
    number,
    p_text,
    picture_names,
    show_summary,
    signed,
    table_of,
)
from afire.report.task_figures import p_value_figure
from afire.studies.baselines_search import Choice
from afire.studies.baselines_table import BACKBONES, IN_PAPER, BaselineRow, BaselineTable
from afire.tasks.results import to_json

PAGE = "baselines.md"
_COST = ("epochs", "tera_flops", "core_minutes")


def write_baselines(
    out: Path,
    tables: Sequence[BaselineTable],
    facts: Mapping[str, str],
    traps: Sequence[str],
    trials: Sequence[Choice] = (),
) -> Path:
    """Write the page, LaTeX, CSV, JSON and the pictures; the page's path."""
    with style():
        pictures = save_figure(baselines_figure(tables), out / "baselines")
        for table in tables:
            if table.pairs is not None:
                pictures += save_figure(p_value_figure(table.pairs), out / f"p-values-{table.name}")
    names = picture_names(pictures)
    write_text(out / PAGE, baselines_page(tables, facts, traps, trials, names))
    write_text(out / "baselines.tex", "\n".join(_as_latex(table) for table in tables))
    for table in tables:
        write_text(out / f"baselines-{table.name}.csv", rows_table(table).csv())
    record = {"facts": dict(facts), "traps": list(traps), "tables": [_record(table) for table in tables]}
    write_json(out / "baselines.json", to_json(record))
    return out / PAGE


def _record(table: BaselineTable) -> dict[str, Any]:
    record = asdict(table)
    if table.pairs is not None:
        matrices = {name: getattr(table.pairs, name).tolist() for name in ("difference", "p_patients", "p_runs")}
        record["pairs"] = {**record["pairs"], **matrices}
    return record


def baselines_page(
    tables: Sequence[BaselineTable],
    facts: Mapping[str, str],
    traps: Sequence[str],
    trials: Sequence[Choice] = (),
    pictures: Sequence[str] = (),
) -> str:
    """The page as Markdown."""
    sections = ["# Pre-training methods side by side", facts_table(facts).markdown()]
    sections += [f"![{name.removesuffix('.png')}]({name})" for name in pictures]
    for table in tables:
        sections += [f"## {title(table)}", rows_table(table).markdown()]
        sections.append(bullets(messages(table)))
        differences = differences_table(table)
        if differences is not None:
            sections += [f"Minus {table.reference}: difference (95 % interval), p over patients / over seeds:"]
            sections += [differences.markdown()]
    if traps:
        sections += ["## Traps", bullets(traps)]
    beside_paper = paper_table(tables)
    if beside_paper is not None:
        sections += ["## The paper's numbers", beside_paper.markdown()]
    if trials:
        sections += ["## The search", search_table(trials).markdown()]
    sections += [_READING, f"afire {__version__}. {DISCLAIMER}"]
    return "\n\n".join(sections) + "\n"


_READING = (
    "Mean and sd over seeds, each with a pre-training of its own; intervals are bootstraps over test patients of the "
    "mean over seeds. Probe, k-NN and fine-tuning are AUC, segmentation is Dice over all films, PatchCore and Gaussian "
    "are AUC of detectors that were fitted on normal films to the exported tokens. Two p-values stand behind a "
    "difference, over test patients (paired bootstrap) and over seeds (Welch), neither corrected for the number of "
    "rows. Rows in italics have no pre-training. TFLOP are counted operations of one pre-training, core-min its "
    "processor time. Probe and k-NN read the mean token, or the class token where that is what a method's own loss "
    "reads (dino)."
)


def title(table: BaselineTable) -> str:
    kind = "Equal compute" if table.by == "flops" else "Equal epochs"
    return f"{kind}: {table.text}"


def rows_table(table: BaselineTable) -> Table:
    """All rows, the best first, then those without a pre-training."""
    main = table.measures[table.main]
    columns = [
        Column("method", text=True, latex="Method", wrap=False),
        *(Column(text, key=name) for name, text in table.measures.items()),
        Column(f"{main}, 95 % interval", short="95 % interval", key="interval"),
        Column(
            f"{main} − {table.reference}", short=f"− {table.reference}", key="against", latex=f"$-$ {table.reference}"
        ),
        Column("p patients", short="p pat.", key="p_patients"),
        Column("p seeds", key="p_seeds"),
        Column("epochs", key="epochs"),
        Column("films", key="films"),
        Column("TFLOP", key="tera_flops"),
        Column("core-min", key="core_minutes"),
        Column("M parameters", short="M par.", key="parameters"),
    ]
    rows = [Row([row.name, *_cells(row, table)], "" if row.training is not None else "italic") for row in table.rows]
    return Table(columns, [Block(rows)], title(table))


def differences_table(table: BaselineTable) -> Table | None:
    """Every row minus the reference in every measure, where there is more than the main one."""
    rows = [row for row in table.rows if row.against]
    if not rows or len(table.measures) < 2:
        return None
    cells = [
        Row([row.name, *(_difference(row, name) for name in table.measures)], "" if row.training else "italic")
        for row in rows
    ]
    header = [Column("method", text=True, wrap=False), *(Column(text) for text in table.measures.values())]
    return table_of(header, cells)


def _difference(row: BaselineRow, measure: str) -> str:
    against = row.against.get(measure)
    if against is None:
        return DASH
    limits = "" if math.isnan(against.low) else f" ({signed(against.low)} to {signed(against.high)})"
    return f"{signed(against.value)}{limits}, {p_text(against.p_patients)} / {p_text(against.p_seeds)}"


def _cells(row: BaselineRow, table: BaselineTable) -> list[str]:
    main, training = row.measures.get(table.main), row.training
    against = row.against.get(table.main)
    return [
        *(mean_sd(row.measures[name]) if name in row.measures else DASH for name in table.measures),
        interval_text(main) if main is not None else DASH,
        *(
            [f"{signed(against.value)} ({signed(against.low)} to {signed(against.high)})"]
            if against is not None
            else [DASH]
        ),
        *([p_text(against.p_patients), p_text(against.p_seeds)] if against is not None else [DASH, DASH]),
        *(
            [f"{training.epochs:,}", f"{training.films:,}", f"{training.tera_flops:.3g}"]
            if training is not None
            else [DASH] * 3
        ),
        DASH if math.isnan(row.core_minutes) else f"{row.core_minutes:.2f}",
        DASH if training is None else f"{training.parameters / 1e6:.2f}",
    ]


def messages(table: BaselineTable) -> list[str]:
    """The order in the main measure, which methods are above the reference by both tests, and which by one."""
    rows = [row for row in table.rows if row.training is not None and table.main in row.measures]
    order = ", ".join(f"{row.name} {number(row.measures[table.main].mean)}" for row in rows)
    texts = [f"by {table.measures[table.main]}: {order}"]
    for position, sign in (("above", 1), ("below", -1)):
        by_both: list[str] = []
        by_one: list[str] = []
        for row in rows:
            against = row.against.get(table.main)
            if against is None or sign * against.value <= 0:
                continue
            tests = [against.p_patients < 0.05, against.p_seeds < 0.05]  # NaN is not below
            (by_both if all(tests) else by_one if any(tests) else []).append(row.name)
        if by_both:
            texts.append(f"{position} {table.reference} over patients and over seeds (p < 0.05): {', '.join(by_both)}")
        if by_one:
            texts.append(f"{position} {table.reference} by one of the two tests only: {', '.join(by_one)}")
    for name in [measure for measure in table.measures if measure != table.main]:
        best = max((row for row in rows if name in row.measures), key=lambda row: row.measures[name].mean, default=None)
        if best is not None:
            texts.append(f"best by {table.measures[name]}: {best.name} {number(best.measures[name].mean)}")
    return texts


def paper_table(tables: Sequence[BaselineTable]) -> Table | None:
    """The paper's number beside ours, and the network and data behind it."""
    rows = []
    for table in tables:
        for row in table.rows:
            for measure, value in row.paper.items():
                if measure not in table.measures:
                    continue
                ours = row.measures.get(measure)
                rows.append(
                    [
                        f"{row.name} ({IN_PAPER[row.name]})",
                        table.measures[measure],
                        table.text,
                        number(value),
                        DASH if ours is None else mean_sd(ours),
                        BACKBONES.get(row.name, ""),
                        table.protocol,
                    ]
                )
    if not rows:
        return None
    header: list[str | Column] = [
        "method",
        Column("measure", text=True),
        Column("ours: length", text=True),
        "paper",
        "ours",
        Column("its network and pre-training", text=True),
        Column("its films", text=True),
    ]
    return table_of(header, rows)


def search_table(trials: Sequence[Choice]) -> Table:
    """Every trial of the search; the chosen one of each method is marked."""
    best = {
        method: max((trial.auc or -1.0) for trial in trials if trial.method == method)
        for method in dict.fromkeys(trial.method for trial in trials)
    }
    rows = []
    for trial in trials:
        is_best = trial.auc is not None and trial.auc == best[trial.method]
        auc = DASH if trial.auc is None else number(trial.auc)
        rows.append([trial.method, ", ".join(trial.words), auc, "chosen" if is_best else ""])
        if is_best:
            best[trial.method] = math.inf  # of equals the first
    return table_of(["method", Column("settings", text=True), "development AUC", Column("", text=True)], rows)


def _as_latex(table: BaselineTable) -> str:
    keys = ["method", *table.measures, "against", *_COST]
    return rows_table(table).only(*keys).latex(latex_text(title(table)) + ".")


def baselines_figure(tables: Sequence[BaselineTable]) -> Figure:
    """A panel for each length, in the main measure."""
    figure, panels = row_panels([len(table.rows) for table in tables], width=4.6, height=1.1, line=0.28)
    for panel, table in zip(panels, tables, strict=True):
        _draw(panel, table)
    return figure


def _draw(axes: Axes, table: BaselineTable) -> None:
    rows = [row for row in table.rows if table.main in row.measures]
    for place, row in enumerate(reversed(rows)):
        estimate, learned = row.measures[table.main], row.training is not None
        colour = (COLOURS[1] if row.name == table.reference else COLOURS[0]) if learned else FAINT
        limits = (estimate.low, estimate.high)
        draw_estimate(axes, place, estimate.mean, limits, estimate.values if learned else (), colour)
    axes.set_yticks(range(len(rows)), [row.name for row in reversed(rows)])
    axes.set_xlabel(f"{table.measures[table.main]}; 95 % interval, ticks: seeds")
    axes.set_title(title(table))


def show_baselines(screen: Console, tables: Sequence[BaselineTable], traps: Sequence[str]) -> None:
    """On the terminal."""
    for table in tables:
        keys = ["method", *list(table.measures)[:2], "against", "core_minutes"]
        show_summary(screen, rows_table(table).only(*keys), messages(table))
    for trap in traps:
        screen.print(Text(f"! {trap}"))

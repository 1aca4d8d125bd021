"""Results as tables on the terminal, narrow enough for 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from afire.report.compare_tables import paired_interval, signed
from afire.report.words import interval_text, mean_sd, metric_word, number, p_text, short_word
from afire.tasks.compare import Comparison
from afire.tasks.results import Result


def show_results(screen: Console, results: Sequence[Result]) -> None:
    """One result in full; several (label fractions) as a row each. Then the notes."""
    if len(results) == 1:
        if len(results[0].labels) > 1:
            screen.print(labels_table(results[0]))
        screen.print(metrics_table(results[0]))
    else:
        screen.print(fractions_table(results))
    for note in dict.fromkeys(note for result in results for note in result.notes):
        screen.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def metrics_table(result: Result) -> Table:
    """A row for each metric of one result: mean, sd over runs, interval."""
    runs = f"{len(result.runs)} runs" if len(result.runs) > 1 else "1 run"
    table = _table(f"{result.name} ({runs})", "metric", "mean", "sd", "95 % interval")
    for name, one in result.metrics.items():
        table.add_row(metric_word(name), number(one.mean), number(one.sd), interval_text(one) or "–")
    return table


def labels_table(result: Result) -> Table:
    """A row for each label of one result."""
    metrics = list(result.metrics)
    table = _table(result.name, "label", *map(short_word, metrics), f"95 % of {short_word(metrics[0])}")
    for label, values in result.per_label.items():
        means = (number(values[name].mean) for name in metrics)
        table.add_row(Text(label), *means, interval_text(values[metrics[0]]) or "–")
    return table


def fractions_table(results: Sequence[Result]) -> Table:
    """A row for each label fraction of one method."""
    metrics = list(results[0].metrics)
    table = _table(results[0].name, "labels used", *map(short_word, metrics))
    for result in results:
        table.add_row(f"{100 * result.fraction:g} %", *(mean_sd(result.metrics[name]) for name in metrics))
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=Text(title), title_justify="left")
    table.add_column(first, overflow="fold")  # a name cut short may be the name of another result
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def comparison_tables(one: Comparison, metrics: Sequence[str]) -> list[Table]:
    """Means of all results, and the differences to the first in ``metrics``."""
    means = _table("", "result", *map(short_word, one.metrics))
    for entry in one.entries:
        means.add_row(Text(entry.name), *(mean_sd(entry.result.metrics[name]) for name in one.metrics))
    return [means, *(_differences(one, metric) for metric in metrics)]


def _differences(one: Comparison, metric: str) -> Table:
    title = f"{metric_word(metric)}: difference to {one.entries[0].name}"
    table = _table(title, "result", "difference", "95 % interval", "p paired", "p t-test")
    for pair in (pair for pair in one.pairs if pair.metric == metric):
        paired = p_text(pair.paired.p) if pair.paired else "–"
        cells = (signed(pair.difference), paired_interval(pair) or "–", paired, p_text(pair.t.p))
        table.add_row(Text(pair.name), *cells)
    return table

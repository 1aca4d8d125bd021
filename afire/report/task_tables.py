"""Results of tasks, and results side by side: ``result.md``, ``comparison.md`` and ``.tex``, and the terminal.

Tables on the terminal fit into 80 columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from afire._version import __version__
from afire.files import write_text
from afire.report.table import (
    DASH,
    DISCLAIMER,
    Column,
    Entry,
    Row,
    Table,
    best_mean,
    bullets,
    estimate_cell,
    facts_table,
    interval_text,
    latex_text,
    mean_sd,
    metric_word,
    number,
    p_text,
    picture_names,
    short_word,
    show_table,
    signed,
    table_of,
)
from afire.tasks.compare import Comparison, Pair
from afire.tasks.results import PAGE, PREDICTIONS, RESULT, Estimate, Result

_TITLES = {"probe": "Probe", "finetune": "Fine-tuning", "segment": "Segmentation"}


def write_page(out: Path, result: Result, figures: Sequence[Path] = ()) -> None:
    """Write ``result.md`` into the result's folder; ``figures`` are shown where they are PNGs."""
    write_text(out / PAGE, result_page(result, picture_names(figures)))


def result_page(result: Result, pictures: Sequence[str] = ()) -> str:
    """What was measured, on what, with what, as Markdown."""
    title = f"# {_TITLES.get(result.task, result.task.title())}: {result.name}"
    sections = [title, facts_table(_facts(result)).markdown(), "## Test films"]
    sections += [metric_table(result.metrics).markdown(), _reading(result)]
    if len(result.per_label) > 1:
        sections += ["## Labels", _label_table(result).markdown()]
    sections += ["## Runs", _run_table(result).markdown()]
    if result.notes:
        sections += ["## Notes", bullets(result.notes)]
    sections += [f"![{Path(name).stem}]({name})" for name in pictures]
    sections += [f"`{RESULT}` has every number, `{PREDICTIONS}` every film. afire {__version__}.", DISCLAIMER]
    return "\n\n".join(sections) + "\n"


def show_results(screen: Console, results: Sequence[Result]) -> None:
    """One result in full; several (label fractions) as a row each. Then the notes."""
    if len(results) == 1:
        result = results[0]
        if len(result.labels) > 1:
            screen.print(_narrow_label_table(result).console())
        runs = f"{len(result.runs)} runs" if len(result.runs) > 1 else "1 run"
        screen.print(metric_table(result.metrics, f"{result.name} ({runs})").console())
    else:
        screen.print(_fraction_table(results).console())
    for note in dict.fromkeys(note for result in results for note in result.notes):
        screen.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def metric_table(metrics: Mapping[str, Estimate], title: str = "") -> Table:
    """Mean, sd over runs and interval of each metric."""
    rows = [
        [metric_word(name), number(value.mean), number(value.sd), interval_text(value) or DASH]
        for name, value in metrics.items()
    ]
    return table_of(["metric", "mean", "sd", "95 % interval"], rows, title)


def _label_table(result: Result) -> Table:
    """A row for each label, and the mean of the labels."""
    names = list(result.metrics)

    def cells(label: str, values: Mapping[str, Estimate]) -> list[str]:
        return [label, *(mean_sd(values[name]) for name in names), interval_text(values[names[0]]) or DASH]

    rows = [Row(cells(label, values)) for label, values in result.per_label.items()]
    rows.append(Row(cells("mean of labels", result.metrics), "bold"))
    return table_of(["label", *map(metric_word, names), f"95 % of {metric_word(names[0])}"], rows)


def _narrow_label_table(result: Result) -> Table:
    """A row for each label, without the sds."""
    names = list(result.metrics)
    rows = [
        [label, *(number(values[name].mean) for name in names), interval_text(values[names[0]]) or DASH]
        for label, values in result.per_label.items()
    ]
    return table_of(["label", *map(short_word, names), f"95 % of {short_word(names[0])}"], rows, result.name)


def _fraction_table(results: Sequence[Result]) -> Table:
    """A row for each label fraction of one method."""
    names = list(results[0].metrics)
    rows = [[f"{100 * r.fraction:g} %", *(mean_sd(r.metrics[name]) for name in names)] for r in results]
    return table_of(["labels used", *map(short_word, names)], rows, results[0].name)


def _run_table(result: Result) -> Table:
    names = list(result.metrics)
    rows = []
    for run in result.runs:
        choices = ", ".join(
            f"{key.replace('_', ' ')} {_short(value)}"
            for key, value in run.chosen.items()
            if not isinstance(value, dict)
        )
        values = [number(run.metrics.get(name, math.nan)) for name in names]
        rows.append([run.name, *values, choices or DASH, f"`{run.split_hash[:8]}`"])
    return table_of(["run", *map(metric_word, names), "chosen on validation", "split"], rows)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _facts(result: Result) -> dict[str, str]:
    films = result.runs[0].films
    counts = ", ".join(f"{subset} {count:,}" for subset, count in films.items())
    facts = {
        "method": f"{result.method}, {100 * result.fraction:g} % of the training labels",
        "weights": f"{result.weights['name']} ({result.weights['report']}), hash `{result.weights['hash'][:12]}`",
        "data": f"{result.data['name']}, hash `{str(result.data['hash'])[:12]}`",
        "films": f"{counts} ({result.runs[0].name})",
        "labels": ", ".join(result.labels),
        "split": f"hash `{result.split_hash[:12]}`, test films `{result.test_hash[:12]}`",
    }
    facts |= {"pre-training": result.seen_text} if result.seen_text else {}
    return {**facts, "command": f"`{' '.join(result.command)}`"}


def _reading(result: Result) -> str:
    count, folds = len(result.runs), len({run.fold for run in result.runs if run.fold is not None})
    over = "one run, so there is no sd" if count == 1 else f"sd over {count} runs"
    if folds > 1:
        over += f" of {folds} folds, which share training films and are not independent"
    thresholds = " Thresholds come from validation films." if "f1" in result.metrics else ""
    return f"Mean and {over}; the interval is a bootstrap over {result.drawn_over}, of the mean over runs.{thresholds}"


def comparison_markdown(comparisons: Sequence[Comparison]) -> str:
    """All comparisons of one command as a page."""
    sections = ["# Comparison"]
    for comparison in comparisons:
        if len(comparisons) > 1:
            sections.append(f"## {100 * comparison.fraction:g} % of the training labels")
        means = mean_table(comparison).only("result", *comparison.metrics, "runs")
        sections += [means.markdown(), difference_table(comparison).markdown()]
        if len(comparison.labels) > 1 and comparison.entries[0].result.per_label:
            sections += [f"{metric_word(comparison.metrics[0])} of each label:", _labels(comparison).markdown()]
        sections += [bullets(comparison.notes)] if comparison.notes else []
    reference = comparisons[0].entries[0].name
    sections.append(
        f"Differences are to {reference}. Paired: bootstrap over {comparisons[0].entries[0].result.drawn_over}, of the "
        "mean over runs, both results on the same draw. t-test: Welch's, independent two-sample, over the values of "
        "the runs."
    )
    return "\n\n".join([*sections, DISCLAIMER]) + "\n"


def show_comparison(screen: Console, comparison: Comparison, metrics: Sequence[str]) -> None:
    """Means of all results, the differences to the first in ``metrics``, and the notes."""
    show_table(screen, mean_table(comparison).only("result", *comparison.metrics))
    for metric in metrics:
        title = f"{metric_word(metric)}: difference to {comparison.entries[0].name}"
        differences = difference_table(comparison, [metric], title)
        show_table(screen, differences.only(*(c.title for c in differences.columns if c.title != "metric")))
    for note in comparison.notes:
        screen.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def comparison_latex(comparisons: Sequence[Comparison]) -> str:
    """A booktabs table for each comparison; the best mean of each metric in bold."""
    tables = []
    for comparison in comparisons:
        metric = short_word(comparison.metrics[0])
        caption = (
            f"{100 * comparison.fraction:g}\\,\\% of the training labels; mean $\\pm$ sd over runs. "
            f"$p$ of {latex_text(metric)} against {latex_text(comparison.entries[0].name)}."
        )
        if comparison.over_folds:
            caption += " Folds are not independent: $p$ of the $t$-test is too small."
        table = mean_table(comparison).only("result", *comparison.metrics, "p paired", "p t-test")
        tables.append(table.latex(caption, small=False))
    return "\n".join(tables)


def mean_table(comparison: Comparison) -> Table:
    """Mean and sd of every result in every metric, and p-values of the first of them."""
    metrics = comparison.metrics
    best = {name: best_mean(entry.result.metrics[name] for entry in comparison.entries) for name in metrics}
    against = {pair.name: pair for pair in comparison.pairs if pair.metric == metrics[0]}
    rows: list[list[Entry]] = []
    for entry in comparison.entries:
        means = [estimate_cell(entry.result.metrics[name], best[name]) for name in metrics]
        pair = against.get(entry.name)
        p_values = [_paired_p(pair), p_text(pair.t.p)] if pair is not None else [DASH, DASH]
        rows.append([entry.name, *means, str(len(entry.result.runs)), *p_values])
    columns = [Column(metric_word(name), short=short_word(name), key=name) for name in metrics]
    first = Column("result", text=True, latex="Result")
    p_columns = [Column("p paired", latex="$p$ paired"), Column("p t-test", latex="$p$ $t$-test")]
    return table_of([first, *columns, "runs", *p_columns], rows)


def difference_table(comparison: Comparison, metrics: Sequence[str] = (), title: str = "") -> Table:
    """Every result against the first, in ``metrics`` or in all."""
    rows = [
        [
            pair.name,
            metric_word(pair.metric),
            signed(pair.difference),
            paired_interval(pair) or DASH,
            _paired_p(pair),
            p_text(pair.t.p),
        ]
        for pair in comparison.pairs
        if not metrics or pair.metric in metrics
    ]
    return table_of(["result", "metric", "difference", "95 % interval", "p paired", "p t-test"], rows, title)


def _labels(comparison: Comparison) -> Table:
    metric = comparison.metrics[0]
    rows = [
        [label, *(mean_sd(entry.result.per_label[label][metric]) for entry in comparison.entries)]
        for label in comparison.labels
    ]
    return table_of(["label", *(entry.name for entry in comparison.entries)], rows)


def _paired_p(pair: Pair) -> str:
    return p_text(pair.paired.p) if pair.paired is not None else DASH


def paired_interval(pair: Pair) -> str:
    """The interval of a paired difference, or nothing."""
    if pair.paired is None or math.isnan(pair.paired.low):
        return ""
    return f"{signed(pair.paired.low)} to {signed(pair.paired.high)}"

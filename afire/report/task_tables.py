"""``result.md`` of a task: what was measured, on what, with what, in one page.

Results as tables on the terminal, narrow enough for 80 columns.

A comparison as Markdown and as LaTeX (booktabs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from afire._version import __version__
from afire.files import write_text
from afire.report.style import DISCLAIMER, interval_text, mean_sd, metric_word, number, p_text, short_word
from afire.tasks.compare import Comparison, Pair
from afire.tasks.results import PAGE, PREDICTIONS, RESULT, Estimate, Result

_TITLES = {"probe": "Probe", "finetune": "Fine-tuning", "segment": "Segmentation"}


def write_page(out: Path, result: Result, figures: Sequence[Path] = ()) -> None:
    """Write ``result.md`` into the result's folder; ``figures`` are shown where they are PNGs."""
    write_text(out / PAGE, result_page(result, [path.name for path in figures if path.suffix == ".png"]))


def result_page(result: Result, pictures: Sequence[str] = ()) -> str:
    """The page of a result as Markdown."""
    title = f"# {_TITLES.get(result.task, result.task.title())}: {result.name}"
    sections = [title, _facts(result), "## Test films", metric_table(result.metrics), _reading(result)]
    if len(result.per_label) > 1:
        sections += ["## Labels", label_table(result)]
    sections += ["## Runs", _run_table(result)]
    if result.notes:
        sections += ["## Notes", "\n".join(f"- {note}" for note in result.notes)]
    sections += [f"![{Path(name).stem}]({name})" for name in pictures]
    sections += [f"`{RESULT}` has every number, `{PREDICTIONS}` every film. afire {__version__}.", DISCLAIMER]
    return "\n\n".join(sections) + "\n"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first column is text and the others numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def metric_table(metrics: Mapping[str, Estimate]) -> str:
    """Mean, sd over runs and interval of each metric."""
    rows = [
        [metric_word(name), number(one.mean), number(one.sd), interval_text(one) or "–"]
        for name, one in metrics.items()
    ]
    return markdown_table(["metric", "mean", "sd", "95 % interval"], rows)


def label_table(result: Result) -> str:
    """A row for each label, and the mean of the labels."""
    names = list(result.metrics)
    rows = [
        [label, *(mean_sd(values[name]) for name in names), interval_text(values[names[0]]) or "–"]
        for label, values in result.per_label.items()
    ]
    mean = [mean_sd(result.metrics[name]) for name in names]
    rows.append(["**mean of labels**", *mean, interval_text(result.metrics[names[0]]) or "–"])
    return markdown_table(["label", *map(metric_word, names), f"95 % of {metric_word(names[0])}"], rows)


def _facts(result: Result) -> str:
    films = result.runs[0].films
    counts = ", ".join(f"{part} {films[part]:,}" for part in films)
    rows = [
        ["method", f"{result.method}, {100 * result.fraction:g} % of the training labels"],
        ["weights", f"{result.weights['name']} ({result.weights['report']}), hash `{result.weights['hash'][:12]}`"],
        ["data", f"{result.data['name']}, hash `{str(result.data['hash'])[:12]}`"],
        ["films", f"{counts} ({result.runs[0].name})"],
        ["labels", ", ".join(result.labels)],
        ["split", f"hash `{result.split_hash[:12]}`, test films `{result.test_hash[:12]}`"],
        ["command", f"`{' '.join(result.command)}`"],
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in rows)])


def _reading(result: Result) -> str:
    count = len(result.runs)
    over = "one run, so there is no sd" if count == 1 else f"sd over {count} runs"
    thresholds = " Thresholds come from validation films." if "f1" in result.metrics else ""
    return f"Mean and {over}; the interval is a bootstrap over test patients of the mean over runs.{thresholds}"


def _run_table(result: Result) -> str:
    names = list(result.metrics)
    rows = []
    for run in result.runs:
        chosen = ", ".join(
            f"{key.replace('_', ' ')} {_short(value)}"
            for key, value in run.chosen.items()
            if not isinstance(value, dict)
        )
        values = [number(run.metrics.get(name, math.nan)) for name in names]
        rows.append([run.name, *values, chosen or "–", f"`{run.split_hash[:8]}`"])
    return markdown_table(["run", *map(metric_word, names), "chosen on validation", "split"], rows)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
    return [means, *(_console_differences(one, metric) for metric in metrics)]


def _console_differences(one: Comparison, metric: str) -> Table:
    title = f"{metric_word(metric)}: difference to {one.entries[0].name}"
    table = _table(title, "result", "difference", "95 % interval", "p paired", "p t-test")
    for pair in (pair for pair in one.pairs if pair.metric == metric):
        paired = p_text(pair.paired.p) if pair.paired else "–"
        cells = (signed(pair.difference), paired_interval(pair) or "–", paired, p_text(pair.t.p))
        table.add_row(Text(pair.name), *cells)
    return table


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def comparison_markdown(comparisons: Sequence[Comparison]) -> str:
    """All comparisons of one command as a page."""
    sections = ["# Comparison"]
    for one in comparisons:
        if len(comparisons) > 1:
            sections.append(f"## {100 * one.fraction:g} % of the training labels")
        sections += [_means(one), _differences(one)]
        if len(one.labels) > 1 and one.entries[0].result.per_label:
            sections += [f"{metric_word(one.metrics[0])} of each label:", _labels(one)]
        sections += ["\n".join(f"- {note}" for note in one.notes)] if one.notes else []
    reference = comparisons[0].entries[0].name
    sections.append(
        f"Differences are to {reference}. Paired: bootstrap over test patients of the mean over runs, both results on "
        "the same draw. t-test: Welch's, independent two-sample, over the values of the runs."
    )
    return "\n\n".join([*sections, DISCLAIMER]) + "\n"


def _means(one: Comparison) -> str:
    rows = [
        [entry.name, *(mean_sd(entry.result.metrics[name]) for name in one.metrics), str(len(entry.result.runs))]
        for entry in one.entries
    ]
    return markdown_table(["result", *map(metric_word, one.metrics), "runs"], rows)


def _differences(one: Comparison) -> str:
    rows = [
        [
            pair.name,
            metric_word(pair.metric),
            signed(pair.difference),
            paired_interval(pair) or "–",
            p_text(pair.paired.p) if pair.paired else "–",
            p_text(pair.t.p),
        ]
        for pair in one.pairs
    ]
    return markdown_table(["result", "metric", "difference", "95 % interval", "p paired", "p t-test"], rows)


def _labels(one: Comparison) -> str:
    metric = one.metrics[0]
    rows = [[label, *(mean_sd(entry.result.per_label[label][metric]) for entry in one.entries)] for label in one.labels]
    return markdown_table(["label", *(entry.name for entry in one.entries)], rows)


def comparison_latex(comparisons: Sequence[Comparison]) -> str:
    """A booktabs table for each comparison; the best mean of each metric in bold."""
    return "\n\n".join(_latex_table(one) for one in comparisons) + "\n"


def _latex_table(one: Comparison) -> str:
    best = {name: max(_mean(entry.result.metrics[name]) for entry in one.entries) for name in one.metrics}
    first = one.metrics[0]
    p_values = {pair.name: pair for pair in one.pairs if pair.metric == first}
    lines = []
    for entry in one.entries:
        cells = [_latex_cell(entry.result.metrics[name], best[name]) for name in one.metrics]
        pair = p_values.get(entry.name)
        p_paired = p_text(pair.paired.p) if pair and pair.paired else "–"
        p_t = p_text(pair.t.p) if pair else "–"
        p_cells = [text.replace("<", "$<$").replace("–", "--") for text in (p_paired, p_t)]
        lines.append("  " + " & ".join([latex_text(entry.name), *cells, *p_cells]) + r" \\")
    header = ["Result", *(latex_text(short_word(name)) for name in one.metrics), "$p$ paired", "$p$ $t$-test"]
    caption = (
        f"{100 * one.fraction:g}\\,\\% of the training labels; mean $\\pm$ sd over runs. "
        f"$p$ of {latex_text(short_word(first))} against {latex_text(one.entries[0].name)}."
    )
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering",
            f"  \\caption{{{caption}}}",
            f"  \\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"  \toprule",
            "  " + " & ".join(header) + r" \\",
            r"  \midrule",
            *lines,
            r"  \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
        ]
    )


def _latex_cell(estimate: Estimate, best: float) -> str:
    if math.isnan(estimate.mean):
        return "--"
    mean = number(estimate.mean)
    text = rf"\mathbf{{{mean}}}" if estimate.mean == best else mean
    return f"${text}$" if math.isnan(estimate.sd) else rf"${text} \pm {estimate.sd:.3f}$"


def latex_text(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return "".join(_LATEX.get(character, character) for character in text)


def signed(value: float) -> str:
    """``+0.034``, ``−0.012``."""
    return "–" if math.isnan(value) else f"{value:+.3f}".replace("-", "−")


def paired_interval(pair: Pair) -> str:
    """The interval of a paired difference, or nothing."""
    if pair.paired is None or math.isnan(pair.paired.low):
        return ""
    return f"{signed(pair.paired.low)} to {signed(pair.paired.high)}"


def _mean(estimate: Estimate) -> float:
    return -math.inf if math.isnan(estimate.mean) else estimate.mean

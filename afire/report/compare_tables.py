"""A comparison as Markdown and as LaTeX (booktabs)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from afire.report.task_tables import markdown_table
from afire.report.words import DISCLAIMER, mean_sd, metric_word, number, p_text, short_word
from afire.tasks.compare import Comparison, Pair
from afire.tasks.results import Estimate

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

"""``result.md`` of a task: what was measured, on what, with what, in one page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from afire._version import __version__
from afire.files import write_text
from afire.report.words import DISCLAIMER, interval_text, mean_sd, metric_word, number
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

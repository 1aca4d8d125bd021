"""The tables of a finished study (benchmarks/study.py), for docs/results.md, and every number of them as JSON.

    python benchmarks/study_tables.py --study study [--json benchmarks/study.json] [--figure docs/images/study.png]

Means and sds are over seeds, of pre-training and of the task together. Differences are to random weights, with the 95 %
interval of the paired bootstrap over test patients and the p of Welch's t-test over seeds. The interval of each mean
and the p of the bootstrap are in the JSON. The page groups the tables of a task and omits columns that show nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from study import SETS, TRIVIAL

from afire.report.style import COLOURS, FAINT, panels, style
from afire.report.table import Column, Table, mean_sd, number, p_text, signed, table_of
from afire.tasks.compare import Comparison, Entry, Pair, compare

NAMES = {"metadata": "*metadata only*", "area": "*original area only*", "sharpness": "*sharpness only*"}
METRICS = {
    "probe": ("auc", "accuracy", "f1"),
    "finetune-few": ("auc", "average_precision"),
    "finetune": ("auc", "average_precision"),
    **{f"detect-{place}": ("auc", "accuracy", "f1") for place in SETS},
    "segment": ("dice", "iou"),
}
TITLES = {"auc": "AUC", "average_precision": "average precision", "accuracy": "ACC", "f1": "F1"} | {
    "dice": "Dice",
    "iou": "IoU",
}
NIH = "NIH fine-tuned"
HEADS = {"probe": "ChildCXR probe", "finetune": NIH, "finetune-few": NIH, "segment": "Shenzhen, lung fields"} | {
    f"detect-{place}": f"Detection, {name}" for place, name in zip(SETS, ("ChildCXR", "NIH", "Shenzhen"), strict=True)
}


def rows_of(study: Path, task: str, starts: Sequence[str]) -> list[Comparison]:
    """A comparison for each fraction of labels, from the results so far: the study may still be running."""
    folders = [study / "results" / f"{task}-{name}" for name in (*starts, *(TRIVIAL if task == "probe" else ()))]
    return compare([folder for folder in folders if folder.exists()], metrics=list(METRICS[task]))


def table(comparison: Comparison, metrics: Sequence[str]) -> Table:
    """One row for each result: metrics with sd, and the difference of the first to random weights."""
    pairs = {pair.name: pair for pair in comparison.pairs if pair.metric == metrics[0]}
    rows = [
        [_name(entry), *(mean_sd(entry.result.metrics[name]) for name in metrics), *_against(pairs.get(entry.name))]
        for entry in comparison.entries
    ]
    heads = [TITLES[name] for name in metrics]
    return table_of(["", *heads, f"Δ {heads[0]}", "p seeds"], rows)


def _name(entry: Entry) -> str:
    folder = next((part for part in entry.path.parts if part.startswith("probe-")), "")
    return NAMES.get(folder.removeprefix("probe-"), entry.result.name)


def _against(pair: Pair | None) -> tuple[str, str]:
    if pair is None or pair.paired is None:
        return "", ""
    interval = f"{signed(pair.paired.low)} to {signed(pair.paired.high)}"
    return f"{signed(pair.difference)} ({interval})", p_text(pair.t.p)


def pretraining(study: Path, plan: dict[str, Any]) -> Table:
    """One row for each run: what it took, its last losses and its health."""
    times = _times(study)
    rows = []
    for name, method in plan["methods"].items():
        for seed in plan["seeds"]:
            summary = json.loads((study / "runs" / f"{name}-{seed}" / "summary.json").read_text(encoding="utf-8"))
            terms = [summary["losses"][term] for term in ("structure", "category", "restoration")]
            losses = [number(value) if value else "" for value in terms]  # exactly 0: switched off
            colour, message = summary["health"]
            health = "not measured: no prototypes" if colour == "-" else f"{colour}: {message}"
            minutes = number(times.get(f"pretrain-{name}-{seed}", math.nan), 1)
            rows.append([f"{method['title']}, seed {seed}", str(summary["epoch"]), minutes, *losses, health])
    header = ["run", "epochs", "core-minutes", "structure", "category", "restoration"]
    return table_of([*header, Column("health at the end", text=True)], rows)


def _times(study: Path) -> dict[str, float]:
    """Core-minutes of every step, all its starts together."""
    times: dict[str, float] = {}
    for line in (study / "times.jsonl").read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        times[step["step"]] = times.get(step["step"], 0.0) + step["core_minutes"]
    return times


def scores(study: Path, starts: Sequence[str], place: str) -> Table:
    """AUC of every score of a set's detectors and of the trivial ones, one column for each start."""
    evaluations = {
        name: json.loads((study / "results" / f"detect-{place}-{name}" / "detect.json").read_text(encoding="utf-8"))
        for name in starts
    }
    rows: dict[str, dict[str, float]] = {}
    for name, numbers in evaluations.items():
        for row in numbers["rows"]:
            label = f"*{row['name']}*" if row["kind"] == "trivial" else row["name"]
            rows.setdefault(label, {})[name] = row["metrics"]["auc"]["mean"]
    cells = [
        [label, *(number(values[name]) if name in values else "" for name in starts)] for label, values in rows.items()
    ]
    return table_of([place, *starts], cells)


def numbers_of(comparisons: dict[str, list[Comparison]]) -> dict[str, Any]:
    """Every estimate and difference, as JSON."""
    return {
        f"{task} {100 * found.fraction:g} %": {
            "results": {
                _name(entry): {name: vars(entry.result.metrics[name]) for name in found.metrics}
                for entry in found.entries
            },
            "test films": next(iter(found.entries)).result.runs[0].films["test"],
            "test hash": next(iter(found.entries)).result.test_hash,
            "to random weights": [
                {
                    "name": pair.name,
                    "metric": pair.metric,
                    "difference": pair.difference,
                    "paired": vars(pair.paired) if pair.paired else None,
                    "p seeds": None if math.isnan(pair.t.p) else pair.t.p,
                }
                for pair in found.pairs
            ],
        }
        for task, several in comparisons.items()
        for found in several
    }


def draw(comparisons: dict[str, list[Comparison]], file: Path) -> None:
    """The first metric of every task: each seed a dot, the interval of the mean a line."""
    shown = [(task, found) for task, several in comparisons.items() for found in several]
    with style(print_size=True):
        most = max(len(found.entries) for _, found in shown)
        figure, axes = panels(len(shown), side=2.9, share=False, most_columns=3, height=0.24 * most + 0.6)
        for axis, (task, found) in zip(axes, shown, strict=True):
            entries = found.entries[::-1]
            for height, entry in enumerate(entries):
                one = entry.result.metrics[METRICS[task][0]]
                trivial, ours = _name(entry).startswith("*"), entry.result.name.startswith("AFiRe")
                colour = FAINT if trivial else COLOURS[1] if ours else COLOURS[0]
                axis.plot([one.low, one.high], [height, height], color=colour, linewidth=1.2)
                axis.plot(one.values, [height] * len(one.values), "o", color=colour, markersize=3.5, alpha=0.8)
            axis.set_yticks(range(len(entries)), [_short(_name(entry)) for entry in entries])
            axis.margins(y=0.15)
            axis.locator_params(axis="x", nbins=5)
            axis.set_title(_title(task, found), loc="left")
            axis.set_xlabel(TITLES[METRICS[task][0]])
        figure.savefig(file, dpi=130)


def _title(task: str, found: Comparison) -> str:
    return HEADS[task] + (f", {100 * found.fraction:g} % of labels" if task.startswith(("probe", "finetune")) else "")


def _short(name: str) -> str:
    return name.strip("*").split(" (")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "study.yaml")
    parser.add_argument("--tasks", default=",".join(METRICS), help="of these, by commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    plan = yaml.safe_load(given.config.read_text(encoding="utf-8"))
    starts = ["random", *plan["methods"]]
    print(pretraining(given.study, plan).markdown())
    comparisons = {task: rows_of(given.study, task, starts) for task in given.tasks.split(",")}
    for task, several in comparisons.items():
        for found in several:
            print(f"\n{_title(task, found)}:\n")
            print(table(found, METRICS[task]).markdown())
        if task.startswith("detect-"):
            print(f"\n{scores(given.study, starts, task.removeprefix('detect-')).markdown()}")
    if given.json:
        numbers = {"core-minutes": _times(given.study), **numbers_of(comparisons)}
        given.json.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if given.figure:
        draw(comparisons, given.figure)


if __name__ == "__main__":
    main()

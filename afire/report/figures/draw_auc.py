"""From results to ``draw_auc``: each finding's AUC with its interval, several results side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from afire.errors import UserError
from afire.report.figures.files import FigureFiles, claim, save
from afire.report.style import DOUBLE, style
from afire.report.task_figures import label_figure
from afire.report.words import metric_word
from afire.tasks.results import Result, find_results, read_result


def draw_auc(
    out: Path,
    results: Mapping[str, Path],
    *,
    metric: str = "auc",
    allow_different_films: bool = False,
    force: bool = False,
) -> FigureFiles:
    """Bars of each finding's metric (AUC), sorted by the first result, with 95 % intervals over test patients."""
    stem = claim(out, "auc", force)
    found = {label: _read(path) for label, path in results.items()}
    _check(found, metric, allow_different_films)
    record: dict[str, Any] = {
        "figure": "auc",
        "weights": {label: {**one.weights, "result": one.name} for label, one in found.items()},
        "data": {
            label: {**one.data, "split_hash": one.split_hash, "test_hash": one.test_hash}
            for label, one in found.items()
        },
        "settings": {"metric": metric, "runs": {label: [run.name for run in one.runs] for label, one in found.items()}},
        "numbers": {
            label: {
                "mean_of_labels": asdict(one.metrics[metric]),
                **{name: asdict(row[metric]) for name, row in one.per_label.items()},
            }
            for label, one in found.items()
        },
    }
    with style(print_size=True):
        figure = label_figure(list(found.values()), metric, list(found))
        figure.set_size_inches(DOUBLE, min(figure.get_size_inches()[1], 9.0))
        return save(stem, figure, record)


def _read(path: Path) -> Result:
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of a result of `afire finetune` or `afire probe`.")
    folders = find_results(path)
    if len(folders) > 1:
        raise UserError(
            f"{path} holds {len(folders)} results ({folders[0].name}, {folders[1].name}, ...); give one of them."
        )
    return read_result(folders[0])


def _check(found: Mapping[str, Result], metric: str, allow_different_films: bool) -> None:
    first_label, first = next(iter(found.items()))
    for label, one in found.items():
        if metric not in one.metrics or not one.per_label:
            known = [name for name in one.metrics if one.per_label]
            raise UserError(
                f"the result {label} has no {metric_word(metric)} of single findings"
                + (f"; it has {', '.join(known)}." if known else ".")
            )
        if set(one.labels) != set(first.labels):
            raise UserError(
                f"{first_label} and {label} are about different findings; give results about the same ones."
            )
        if one.test_hash != first.test_hash and not allow_different_films:
            raise UserError(
                f"{first_label} and {label} were tested on different films; give results of one test set, "
                "or add --allow-different-films."
            )

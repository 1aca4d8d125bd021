"""Fine-tuned classifiers: Grad-CAM on boxed findings, and each finding's AUC, several results side by side.

A Grad-CAM figure shows films, the map of each classifier, and how often the maps meet the boxes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from afire.data.pack import Films
from afire.errors import UserError
from afire.report.figures.files import FigureFiles, Source, as_source, claim, save
from afire.report.style import COLOURS, DOUBLE, FAINT, INK, MARKERS, style
from afire.report.table import metric_word, number
from afire.report.task_figures import label_figure
from afire.tasks.evaluate import bootstrap_means
from afire.tasks.finetune import TrainedClassifier, load_classifier
from afire.tasks.gradcam import HALF, SHARE, Case, Meeting, box_mask, case_maps, find_cases, gradcam, meet
from afire.tasks.results import Estimate, Result, Rows, estimate, find_results, read_result
from afire.weights import pick_device

_BOX = "#56B4E9"  # bright on grey, and on the heat colours, for colour-blind readers too
_HEAT = "inferno"
_OPAQUE, _CLEAR = 0.7, 0.15  # of a map at its maximum, and below which share of it the film is left clear
# Fields of Meeting: what each panel of the summary is called.
METRICS = {
    "hit": "pointing game",
    "iou_half": "IoU above half of the maximum",
    "iou_share": f"IoU of the highest {100 * SHARE:g} %",
}
OTHER_FILMS = 16  # whose maps are laid over each box, to see what a map of another film would reach

logger = logging.getLogger("afire")


@dataclass(frozen=True)
class CamRow:
    """One classifier: its label, the maps (shown cases, S, S) and meetings of the cases shown, and all its numbers."""

    label: str
    maps: NDArray[np.float32]
    meetings: Sequence[Meeting]
    estimates: Mapping[str, Estimate]
    chance: Mapping[str, float]
    elsewhere: Mapping[str, float]  # the same with maps of other films


def draw_gradcam(
    out: Path,
    weights: Mapping[str, str | Path],
    source: Source | Path,
    *,
    show: int = 6,
    block: int | None = None,
    device: str = "auto",
    force: bool = False,
) -> FigureFiles:
    """Grad-CAM of fine-tuned classifiers (folders of ``afire finetune``) on the boxed findings of their test films."""
    stem, source, target = claim(out, "gradcam", force), as_source(source), pick_device(device)
    classifiers = {label: load_classifier(Path(path)) for label, path in weights.items()}
    first = next(iter(classifiers.values()))
    films = source.open(first.image)
    labels = [name for name in first.labels if all(name in classifier.labels for classifier in classifiers.values())]
    rows, split_hash, subset = _test_rows(films, source, classifiers)
    cases = find_cases(films, rows, labels)
    if not cases:
        raise UserError(
            f"none of the {len(rows):,} {subset} films has a box around a finding that all classifiers know "
            f"({', '.join(labels) or 'none in common'}); Grad-CAM is measured against boxes."
        )
    generator = np.random.default_rng(source.seed)
    indices = choose_cases(cases, show, generator)
    other_films = np.sort(generator.permutation(rows)[:OTHER_FILMS])
    cam_rows, numbers = [], {}
    for label, classifier in classifiers.items():
        logger.info("%s: %s of %s", label, classifier.run, classifier.result.name)
        own_films = source.open(classifier.image)
        maps = case_maps(classifier.model, classifier.labels, own_films, cases, block, target)
        meetings = [meet(values, _mask(case, own_films.size)) for values, case in zip(maps, cases, strict=True)]
        elsewhere = _elsewhere(classifier, own_films, cases, other_films, block, target)
        estimates = _estimates(films, cases, meetings, source.seed)
        chance = {name: float(np.mean([getattr(m, f"chance_{name}") for m in meetings])) for name in METRICS}
        cam_rows.append(CamRow(label, maps[indices], [meetings[i] for i in indices], estimates, chance, elsewhere))
        numbers[label] = {
            name: {**asdict(estimates[name]), "chance": chance[name], "maps_of_other_films": elsewhere[name]}
            for name in METRICS
        }
        numbers[label]["by_finding"] = _by_finding(cases, meetings)
    boxes = sum(len(case.boxes) for case in cases)
    data = source.record(films, np.unique([case.row for case in cases]), len(rows), split_hash, subset)
    record: dict[str, Any] = {
        "figure": "gradcam",
        "weights": {label: _describe(classifier) for label, classifier in classifiers.items()},
        "data": {**data, "boxes": boxes, "cases": len(cases), "findings": labels},
        "settings": {
            "block": block or "last norm",
            "half": HALF,
            "share": SHARE,
            "other_films": len(other_films),
            "seed": source.seed,
        },
        "shown": [
            {"image": str(films.manifest.table["image"].iloc[cases[i].row]), "finding": cases[i].label} for i in indices
        ],
        "numbers": numbers,
    }
    with style(print_size=True):
        pictures = films.batch([cases[i].row for i in indices])[:, 0].numpy()
        place = f"{data['films']} {subset} films of {data['name']}"
        caption = (
            f"{boxes} boxes around {len(cases)} findings in {place}; + highest pixel, white line: half of the maximum"
        )
        patients_known = films.manifest.patient_known.iloc[[case.row for case in cases]].all()
        over = "patients" if patients_known else "films, patients unknown"
        return save(stem, cam_figure(pictures, [cases[i] for i in indices], cam_rows, caption, over), record)


def choose_cases(cases: Sequence[Case], show: int, generator: np.random.Generator) -> list[int]:
    """Cases to show, drawn at random: one of each finding first, then more; never by how well they turned out."""
    order = generator.permutation(len(cases)).tolist()
    counts: dict[str, int] = {}
    rank = {}
    for index in order:
        rank[index] = counts[cases[index].label] = counts.get(cases[index].label, -1) + 1
    selection = sorted(order, key=lambda index: rank[index])[:show]
    return sorted(selection, key=lambda number: (cases[number].label, number))


def _mask(case: Case, size: int) -> NDArray[np.bool_]:
    return case.mask if case.mask.shape[0] == size else box_mask(case.boxes, size)


def _test_rows(
    films: Films, source: Source, classifiers: Mapping[str, TrainedClassifier]
) -> tuple[Rows, str | None, str]:
    """The films that no classifier was trained on: their own test films, or a subset of films foreign to them all."""
    # By name, because a pack and the manifest it was made of are the same films with another hash.
    images = set(films.manifest.table["image"])
    own_classifiers = [
        classifier for classifier in classifiers.values() if not images.isdisjoint(classifier.test_images)
    ]
    if not own_classifiers:
        rows, split_hash = source.rows(films)
        logger.warning(
            "the classifiers were made on other data; whether these %s films are new to them is not known",
            source.subset,
        )
        return rows, split_hash, source.subset
    if source.subset != "test":
        raise UserError("--part: a classifier is shown on its own test films; leave --part out.")
    allowed = set.intersection(*(set(classifier.test_images) for classifier in own_classifiers))
    rows = np.flatnonzero(films.manifest.table["image"].isin(list(allowed)).to_numpy())
    if len(rows) == 0:
        raise UserError("the classifiers have no test film in common; fine-tune them on the same split.")
    return rows, own_classifiers[0].result.split_hash, "test"


def _elsewhere(
    classifier: TrainedClassifier,
    films: Films,
    cases: Sequence[Case],
    other_films: Rows,
    block: int | None,
    device: torch.device,
) -> dict[str, float]:
    """What maps of other patients' films reach on each case's boxes: a finding has its usual place in any film."""
    patients = films.manifest.table["patient"].to_numpy(dtype=object)
    images = films.batch(other_films).to(device)
    all_labels, labels = classifier.labels, {case.label for case in cases}
    maps = {label: gradcam(classifier.model, images, all_labels.index(label), block) for label in labels}
    reached: dict[str, list[float]] = {name: [] for name in METRICS}
    for case in cases:
        foreign = [
            values
            for values, row in zip(maps[case.label], other_films, strict=True)
            if patients[row] != patients[case.row]
        ]
        met = [meet(values, _mask(case, films.size)) for values in foreign]
        for name in METRICS:
            reached[name] += [float(np.mean([getattr(m, name) for m in met]))] if met else []
    return {name: float(np.mean(values)) if values else float("nan") for name, values in reached.items()}


def _estimates(films: Films, cases: Sequence[Case], meetings: Sequence[Meeting], seed: int) -> dict[str, Estimate]:
    patients = films.manifest.table["patient"].to_numpy(dtype=object)[[case.row for case in cases]]
    values = {name: np.array([getattr(m, name) for m in meetings]) for name in METRICS}
    draws = bootstrap_means([values], [patients], np.random.default_rng(seed))
    return {name: estimate([float(column.mean())], draws[name]) for name, column in values.items()}


def _by_finding(cases: Sequence[Case], meetings: Sequence[Meeting]) -> dict[str, dict[str, float]]:
    means = {}
    for label in sorted({case.label for case in cases}):
        records = [asdict(m) for m, case in zip(meetings, cases, strict=True) if case.label == label]
        means[label] = {
            "cases": float(len(records)),
            **{key: float(np.mean([record[key] for record in records])) for key in records[0]},
        }
    return means


def _describe(classifier: TrainedClassifier) -> dict[str, Any]:
    return {
        "name": classifier.result.name,
        "run": classifier.run,
        "hash": classifier.hash,
        "started_from": dict(classifier.result.weights),
        "test_auc": classifier.result.metrics["auc"].mean,
        "test_hash": classifier.result.test_hash,
    }


def cam_figure(
    films: NDArray[np.float32],
    cases: Sequence[Case],
    rows: Sequence[CamRow],
    caption: str,
    drawn_over: str = "patients",
) -> Figure:
    """Columns are cases; the first row shows films (cases, S, S) with their boxes, the next each classifier's map."""
    side = DOUBLE / max(len(cases), 4)
    strip = 0.42 + 0.2 * len(rows)
    height = side * len(cases) / max(len(cases), 4) if len(cases) < 4 else side
    figure: Figure = plt.figure(figsize=(DOUBLE, (height + 0.16 + len(rows) * (height + 0.14)) + strip + 0.55))
    pictures, summary = figure.subfigures(
        2, 1, height_ratios=[(height + 0.16 + len(rows) * (height + 0.14)), strip + 0.55], squeeze=False
    )[:, 0]
    grid = pictures.subplots(1 + len(rows), len(cases), squeeze=False)
    for column, case in enumerate(cases):
        _film(grid[0, column], films[column], case)
        grid[0, column].set_title(case.label.replace("_", " "), fontsize=7, pad=3)
        for line, row in enumerate(rows, start=1):
            _overlay(grid[line, column], films[column], row.maps[column], case)
            _verdict(grid[line, column], row.meetings[column], row.maps[column])
    for line, name in enumerate(["film and box", *(row.label for row in rows)]):
        grid[line, 0].set_ylabel(name, fontsize=7, labelpad=3, fontweight="bold" if line else "normal")
    for axis, (metric, title) in zip(summary.subplots(1, len(METRICS), sharey=True), METRICS.items(), strict=True):
        _summary(axis, rows, metric, title)
    handles = [
        Line2D([], [], color=FAINT, marker="|", markersize=7, markeredgewidth=3, linestyle="", label="by chance"),
        Line2D([], [], color=INK, marker="|", markersize=7, linestyle="", label="maps of other films"),
        Line2D([], [], color=INK, marker="o", markersize=3.5, linewidth=1, label=f"own maps, 95 % over {drawn_over}"),
    ]
    summary.legend(handles=handles, loc="outside lower left", ncols=3, title=caption, alignment="left")
    return figure


def _film(axis: Axes, film: NDArray[np.float32], case: Case) -> None:
    axis.imshow(film, cmap="gray", vmin=0, vmax=1, interpolation="bilinear")
    size = film.shape[0]
    for x, y, w, h in case.boxes:
        corner = (x * size - 0.5, y * size - 0.5)
        box = plt.Rectangle(corner, w * size, h * size, fill=False, edgecolor=_BOX, linewidth=1.1)
        box.set_path_effects([withStroke(linewidth=1.9, foreground="black", alpha=0.5)])
        axis.add_patch(box)
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_visible(False)


def _overlay(axis: Axes, film: NDArray[np.float32], values: NDArray[np.float32], case: Case) -> None:
    """The map over the film, each map by its own maximum, as its numbers are; faint places stay grey."""
    _film(axis, film, case)
    peak = float(values.max())
    if peak <= 0:
        return
    share = values / peak
    alpha = _OPAQUE * np.clip((share - _CLEAR) / (1 - _CLEAR), 0, 1)
    axis.imshow(share, cmap=_HEAT, vmin=0, vmax=1, alpha=alpha, interpolation="bilinear")
    axis.contour(share, levels=[HALF], colors="white", linewidths=0.6)
    row, column = np.unravel_index(int(values.argmax()), values.shape)
    mark = axis.plot(column, row, marker="+", color="white", markersize=6, markeredgewidth=1.3)[0]
    mark.set_path_effects([withStroke(linewidth=2.6, foreground="black")])


def _verdict(axis: Axes, meeting: Meeting, values: NDArray[np.float32]) -> None:
    word = "inside" if meeting.hit else "outside"
    text = f"{word}, IoU {number(meeting.iou_half, 2)}" if values.max() > 0 else "no positive place"
    axis.set_xlabel(text, fontsize=6, labelpad=1.5)


def _summary(axis: Axes, rows: Sequence[CamRow], metric: str, title: str) -> None:
    for place, row in enumerate(rows):
        value, colour = row.estimates[metric], COLOURS[place % len(COLOURS)]
        low, high = (value.mean if np.isnan(edge) else edge for edge in (value.low, value.high))
        axis.plot([row.chance[metric]] * 2, [place - 0.4, place + 0.4], color=FAINT, linewidth=3, solid_capstyle="butt")
        axis.plot([low, high], [place, place], color=colour, linewidth=1)
        axis.plot(value.mean, place, marker=MARKERS[place % len(MARKERS)], color=colour, markersize=3.5)
        axis.plot(row.elsewhere[metric], place, marker="|", color=INK, markersize=8, markeredgewidth=1.1)
        text = number(value.mean, 2)
        axis.text(1.0, place, text, transform=axis.get_yaxis_transform(), ha="right", va="center", fontsize=6.5)
    axis.set_title(title)
    axis.set_yticks(range(len(rows)), [row.label for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    ends = [edge for row in rows for edge in (row.estimates[metric].high, row.elsewhere[metric]) if not np.isnan(edge)]
    axis.set_xlim(0, max([*ends, 0.1]) * 1.3)


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
    results_by_label = {label: _read(path) for label, path in results.items()}
    _check(results_by_label, metric, allow_different_films)
    record: dict[str, Any] = {
        "figure": "auc",
        "weights": {label: {**result.weights, "result": result.name} for label, result in results_by_label.items()},
        "data": {
            label: {**result.data, "split_hash": result.split_hash, "test_hash": result.test_hash}
            for label, result in results_by_label.items()
        },
        "settings": {
            "metric": metric,
            "runs": {label: [run.name for run in result.runs] for label, result in results_by_label.items()},
        },
        "numbers": {
            label: {
                "mean_of_labels": asdict(result.metrics[metric]),
                **{name: asdict(row[metric]) for name, row in result.per_label.items()},
            }
            for label, result in results_by_label.items()
        },
    }
    with style(print_size=True):
        figure = label_figure(list(results_by_label.values()), metric, list(results_by_label))
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


def _check(results: Mapping[str, Result], metric: str, allow_different_films: bool) -> None:
    first_label, first = next(iter(results.items()))
    for label, result in results.items():
        if metric not in result.metrics or not result.per_label:
            names = [name for name in result.metrics if result.per_label]
            raise UserError(
                f"the result {label} has no {metric_word(metric)} of single findings"
                + (f"; it has {', '.join(names)}." if names else ".")
            )
        if set(result.labels) != set(first.labels):
            raise UserError(
                f"{first_label} and {label} are about different findings; give results about the same ones."
            )
        if result.test_hash != first.test_hash and not allow_different_films:
            raise UserError(
                f"{first_label} and {label} were tested on different films; give results of one test set, "
                "or add --allow-different-films."
            )

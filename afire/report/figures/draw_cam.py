"""From fine-tuned classifiers and boxed films to ``draw_gradcam``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from afire.data.dataset import Films
from afire.errors import UserError
from afire.report.figures.cam import METRICS, CamRow, cam_figure
from afire.report.figures.files import FigureFiles, claim, save
from afire.report.figures.source import Source, as_source
from afire.report.style import style
from afire.tasks.backbone import pick_device
from afire.tasks.evaluate import bootstrap_means
from afire.tasks.features import data_content_hash
from afire.tasks.figure_films import Rows
from afire.tasks.gradcam import HALF, SHARE, Case, Meeting, box_mask, case_maps, find_cases, gradcam, meet
from afire.tasks.results import Estimate, estimate
from afire.tasks.trained_classifier import TrainedClassifier, load_classifier

logger = logging.getLogger("afire")
OTHER_FILMS = 16  # whose maps are laid over each box, to see what a map that knows nothing of the film would reach


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
    labels = [name for name in first.labels if all(name in one.labels for one in classifiers.values())]
    rows, split_hash, part = _test_rows(films, source, classifiers)
    cases = find_cases(films, rows, labels)
    if not cases:
        raise UserError(
            f"none of the {len(rows):,} {part} films has a box around a finding that all classifiers know "
            f"({', '.join(labels) or 'none in common'}); Grad-CAM is measured against boxes."
        )
    generator = np.random.default_rng(source.seed)
    shown = choose_cases(cases, show, generator)
    others = np.sort(generator.permutation(rows)[:OTHER_FILMS])
    cam_rows, numbers = [], {}
    for label, one in classifiers.items():
        logger.info("%s: %s of %s", label, one.run, one.result.name)
        own = source.open(one.image)
        maps = case_maps(one.model, one.labels, own, cases, block, target)
        meetings = [meet(values, _mask(case, own.size)) for values, case in zip(maps, cases, strict=True)]
        elsewhere = _elsewhere(one, own, cases, others, block, target)
        estimates = _estimates(films, cases, meetings, source.seed)
        chance = {name: float(np.mean([getattr(m, f"chance_{name}") for m in meetings])) for name in METRICS}
        cam_rows.append(CamRow(label, maps[shown], [meetings[i] for i in shown], estimates, chance, elsewhere))
        numbers[label] = {
            name: {**asdict(estimates[name]), "chance": chance[name], "maps_of_other_films": elsewhere[name]}
            for name in METRICS
        }
        numbers[label]["by_finding"] = _by_finding(cases, meetings)
    boxes = sum(len(case.boxes) for case in cases)
    data = source.record(films, np.unique([case.row for case in cases]), len(rows), split_hash, part)
    record: dict[str, Any] = {
        "figure": "gradcam",
        "weights": {label: _describe(one) for label, one in classifiers.items()},
        "data": {**data, "boxes": boxes, "cases": len(cases), "findings": labels},
        "settings": {
            "block": block or "last norm",
            "half": HALF,
            "share": SHARE,
            "other_films": len(others),
            "seed": source.seed,
        },
        "shown": [
            {"image": str(films.manifest.table["image"].iloc[cases[i].row]), "finding": cases[i].label} for i in shown
        ],
        "numbers": numbers,
    }
    with style(print_size=True):
        pictures = films.batch([cases[i].row for i in shown])[:, 0].numpy()
        where = f"{data['films']} {part} films of {data['name']}"
        caption = (
            f"{boxes} boxes around {len(cases)} findings in {where}; + highest pixel, white line: half of the maximum"
        )
        return save(stem, cam_figure(pictures, [cases[i] for i in shown], cam_rows, caption), record)


def choose_cases(cases: Sequence[Case], show: int, generator: np.random.Generator) -> list[int]:
    """Cases to show, drawn at random: one of each finding first, then more; never by how well they turned out."""
    order = generator.permutation(len(cases)).tolist()
    seen: dict[str, int] = {}
    rank = {}
    for number in order:
        rank[number] = seen[cases[number].label] = seen.get(cases[number].label, -1) + 1
    chosen = sorted(order, key=lambda number: rank[number])[:show]
    return sorted(chosen, key=lambda number: (cases[number].label, number))


def _mask(case: Case, size: int) -> NDArray[np.bool_]:
    return case.mask if case.mask.shape[0] == size else box_mask(case.boxes, size)


def _test_rows(
    films: Films, source: Source, classifiers: Mapping[str, TrainedClassifier]
) -> tuple[Rows, str | None, str]:
    """The films that no classifier was trained on: their own test films, or a part of a set foreign to them all."""
    content = data_content_hash(films)
    own = [one for one in classifiers.values() if one.result.data["hash"] == content]
    if not own:
        rows, split_hash = source.rows(films)
        logger.warning("the classifiers were trained on other films than these; %s films are shown", source.part)
        return rows, split_hash, source.part
    if source.part != "test":
        raise UserError("--part: a classifier is shown on its own test films; leave --part out.")
    allowed = set.intersection(*(set(one.test_images) for one in own))
    rows = np.flatnonzero(films.manifest.table["image"].isin(list(allowed)).to_numpy())
    if len(rows) == 0:
        raise UserError("the classifiers have no test film in common; fine-tune them on the same split.")
    return rows, own[0].result.split_hash, "test"


def _elsewhere(
    one: TrainedClassifier, films: Films, cases: Sequence[Case], others: Rows, block: int | None, device: torch.device
) -> dict[str, float]:
    """What maps of other patients' films reach on each case's boxes: a finding has its usual place in any film."""
    patients = films.manifest.table["patient"].to_numpy(dtype=object)
    images = films.batch(others).to(device)
    maps = {label: gradcam(one.model, images, one.labels.index(label), block) for label in {c.label for c in cases}}
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for case in cases:
        foreign = [
            values for values, row in zip(maps[case.label], others, strict=True) if patients[row] != patients[case.row]
        ]
        met = [meet(values, _mask(case, films.size)) for values in foreign]
        for name in METRICS:
            found[name] += [float(np.mean([getattr(m, name) for m in met]))] if met else []
    return {name: float(np.mean(values)) if values else float("nan") for name, values in found.items()}


def _estimates(films: Films, cases: Sequence[Case], meetings: Sequence[Meeting], seed: int) -> dict[str, Estimate]:
    patients = films.manifest.table["patient"].to_numpy(dtype=object)[[case.row for case in cases]]
    values = {name: np.array([getattr(m, name) for m in meetings]) for name in METRICS}
    draws = bootstrap_means([values], [patients], np.random.default_rng(seed))
    return {name: estimate([float(column.mean())], draws[name]) for name, column in values.items()}


def _by_finding(cases: Sequence[Case], meetings: Sequence[Meeting]) -> dict[str, dict[str, float]]:
    found = {}
    for label in sorted({case.label for case in cases}):
        some = [asdict(m) for m, case in zip(meetings, cases, strict=True) if case.label == label]
        found[label] = {
            "cases": float(len(some)),
            **{key: float(np.mean([one[key] for one in some])) for key in some[0]},
        }
    return found


def _describe(one: TrainedClassifier) -> dict[str, Any]:
    return {
        "name": one.result.name,
        "run": one.run,
        "hash": one.hash,
        "started_from": dict(one.result.weights),
        "test_auc": one.result.metrics["auc"].mean,
        "test_hash": one.result.test_hash,
    }

"""What a manifest holds, counted: films, patients, labels, views, and the most frequent combinations of labels.

The combinations are those of the paper's table of the top 20 categories of MIMIC-CXR-JPG: labels are made binary
(unknown and uncertain count as absent), equal rows are counted, and the rows of the table are then merged without
Support Devices, which are no disease.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from afire.data.manifest import LABEL_PREFIX, SPLITS, Manifest

NO_DISEASE = ("Support Devices",)
TOTAL = "all"
NO_SPLIT = "none"
_SHOW_COMBINATIONS_FROM = 5  # labels; with fewer the table of labels says it already


@dataclass(frozen=True)
class SplitCounts:
    """Films and patients of one split, and how many of its films are normal."""

    films: int
    patients: int
    normal: int
    abnormal: int
    unknown: int


@dataclass(frozen=True)
class LabelCounts:
    """Films with, without and of unknown label in one split, and the patients who have it in some film."""

    positive: int
    negative: int
    unknown: int
    patients: int


@dataclass(frozen=True)
class Combination:
    """The labels that a film has, and how many films have exactly these."""

    labels: tuple[str, ...]
    films: int


@dataclass(frozen=True)
class Statistics:
    """Counts of a manifest; splits are in the order train, val, test, none, all, and absent where empty.

    ``none`` are the films without a split; a manifest without any split has only ``all``.
    """

    hash: str
    splits: dict[str, SplitCounts]
    labels: dict[str, dict[str, LabelCounts]]
    views: dict[str, int]
    films_per_patient: dict[str, float]
    films_without_patient: int
    """Films without a patient id; each counts as a patient."""
    crossing_patients: int
    """Patients with films in more than one of train, val and test; should be 0."""
    boxes: int
    masks: int
    distinct_combinations: int
    combinations: list[Combination]
    merged_without: tuple[str, ...]
    merged: list[Combination]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def describe(manifest: Manifest, top: int = 20, combinations: bool | None = None) -> Statistics:
    """Count a manifest. Combinations are left out with few labels unless ``combinations`` asks for them."""
    table = manifest.table
    subsets = _by_split(table)
    listed = len(manifest.labels) >= _SHOW_COMBINATIONS_FROM if combinations is None else combinations
    every = label_combinations(manifest) if listed and manifest.labels else []
    ignored = tuple(name for name in NO_DISEASE if name in manifest.labels)
    per_patient = table.groupby("patient").size()
    splits_of_patient = table[table["split"] != ""].groupby("patient")["split"].nunique()
    return Statistics(
        hash=manifest.hash,
        splits={name: _count_split(subset) for name, subset in subsets.items()},
        labels={
            label: {name: _count_label(subset, LABEL_PREFIX + label) for name, subset in subsets.items()}
            for label in manifest.labels
        },
        views={str(view) or "unknown": int(n) for view, n in table["view"].value_counts().items()},
        films_per_patient={
            "median": float(per_patient.median()), "mean": float(per_patient.mean()), "most": float(per_patient.max())
        },
        films_without_patient=int((~manifest.patient_known).sum()),
        crossing_patients=int((splits_of_patient > 1).sum()),
        boxes=sum(len(manifest.boxes(int(row))) for row in np.flatnonzero(table["boxes"] != "")),
        masks=int(((table["mask"] != "") | (table["rle"] != "")).sum()),
        distinct_combinations=len(every),
        combinations=every[:top],
        merged_without=ignored,
        merged=merge_combinations(every[:top], ignored) if ignored else [],
    )  # fmt: skip


def label_combinations(manifest: Manifest) -> list[Combination]:
    """Every combination of labels with its number of films, most frequent first; only 1 counts as present."""
    labels = manifest.labels
    present = (manifest.table[[LABEL_PREFIX + label for label in labels]] == 1.0).set_axis(labels, axis=1)
    counts = present.value_counts()
    patterns = counts.index.to_frame(index=False).to_numpy(dtype=bool)
    combinations = [
        Combination(tuple(np.asarray(labels)[pattern].tolist()), int(films))
        for pattern, films in zip(patterns, counts, strict=True)
    ]
    return _most_frequent_first(combinations, labels)


def merge_combinations(combinations: Sequence[Combination], without: Sequence[str]) -> list[Combination]:
    """Add up the combinations that differ only in the labels ``without``."""
    films: dict[tuple[str, ...], int] = {}
    for combination in combinations:
        remaining = tuple(label for label in combination.labels if label not in without)
        films[remaining] = films.get(remaining, 0) + combination.films
    order = list(dict.fromkeys(label for combination in combinations for label in combination.labels))
    return _most_frequent_first([Combination(labels, n) for labels, n in films.items()], order)


def _most_frequent_first(combinations: list[Combination], labels: Sequence[str]) -> list[Combination]:
    """By films; ties by the position of the labels, so that the table is the same in every run."""
    position = {label: at for at, label in enumerate(labels)}
    return sorted(combinations, key=lambda item: (-item.films, [position[label] for label in item.labels]))


def _by_split(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    if (table["split"] == "").all():
        return {TOTAL: table}
    subsets = {split or NO_SPLIT: table[table["split"] == split] for split in (*SPLITS, "")}
    return {name: subset for name, subset in subsets.items() if len(subset)} | {TOTAL: table}


def _count_split(subset: pd.DataFrame) -> SplitCounts:
    normal, abnormal = int((subset["normal"] == 1).sum()), int((subset["normal"] == 0).sum())
    return SplitCounts(len(subset), int(subset["patient"].nunique()), normal, abnormal, len(subset) - normal - abnormal)


def _count_label(subset: pd.DataFrame, column: str) -> LabelCounts:
    positive, negative = subset[column] == 1, subset[column] == 0
    with_label = int(positive.sum())
    patients = int(subset["patient"][positive].nunique())
    return LabelCounts(with_label, int(negative.sum()), len(subset) - with_label - int(negative.sum()), patients)

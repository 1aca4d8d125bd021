"""The tables of a bench of detectors: what is there so far, set by set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from afire.data.audit.run import REPORT
from afire.files import read_json
from afire.studies.detect_bench import (
    BALANCED,
    PLAIN,
    PUBLISHED,
    Bench,
    BenchSet,
    Fit,
    LongFit,
    audit_folder,
    fit_name,
)
from afire.studies.recorded import read_step
from afire.tasks.results import RESULT

NUMBERS = "detect.json"


@dataclass(frozen=True)
class PublishedRow:
    """The second column of a row: the same method for the epochs of its paper; ``auc`` is None where it was not run."""

    epochs: int | None
    core_hours: float  # of one fit; those that it would take, where it was not run
    auc: Mapping[str, Any] | None


@dataclass(frozen=True)
class BenchRow:
    """One method on one set. ``against`` is its AUC minus that of the best trivial row, with its interval."""

    method: str
    trivial: bool
    auc: Mapping[str, Any]  # mean, sd, low, high, values
    average_precision: Mapping[str, Any]
    against: Mapping[str, float] | None
    localisation: Mapping[str, Any] | None = None
    epochs: int | None = None
    flops: float = 0.0
    core_minutes: float = float("nan")  # of one fit
    peak_bytes: int = 0
    films_per_second: float = float("nan")
    notes: Sequence[str] = ()
    published: PublishedRow | None = None


@dataclass(frozen=True)
class BenchTable:
    """All rows of one set, the best first; ``balanced`` with views balanced."""

    set_name: str
    films: Mapping[str, int]  # normal and abnormal test films
    fit_films: int
    best_trivial: str
    rows: Sequence[BenchRow]
    balanced: bool = False
    audit: Sequence[str] | None = None  # messages about its shortcuts; None: not audited


Fits = Mapping[tuple[str, str], Fit]
LongFits = Mapping[tuple[str, str], LongFit]


def collect(bench: Bench, fits: Fits, longer: LongFits = MappingProxyType({})) -> list[BenchTable]:
    """What is there so far, set by set; ``longer`` are the fits of the second column, run or not."""
    tables = [_table(bench, films, fits, longer, kind) for films in bench.sets for kind in (PLAIN, BALANCED)]
    return [table for table in tables if table is not None]


def _table(bench: Bench, films: BenchSet, fits: Fits, longer: LongFits, kind: str) -> BenchTable | None:
    rows: list[BenchRow] = []
    trivial: dict[str, BenchRow] = {}
    about: dict[str, Any] = {}
    for method in bench.methods:
        folder = bench.out / films.name / method / kind
        if not (folder / NUMBERS).exists() or not (folder / RESULT).exists():
            continue
        about, result = read_json(folder / NUMBERS), read_json(folder / RESULT)
        published = _published(bench, films, method, longer.get((films.name, method))) if kind == PLAIN else None
        rows.append(_row(bench, films, method, fits[films.name, method], about, result, published))
        for line in about["rows"]:
            if line["kind"] == "trivial":
                trivial.setdefault(
                    line["name"],
                    BenchRow(line["name"], True, line["metrics"]["auc"], line["metrics"]["average_precision"], None),
                )
    if not rows:
        return None
    ranked = sorted([*rows, *trivial.values()], key=lambda row: -float(row.auc["mean"]))
    audit = _audit(audit_folder(bench, films)) if kind == PLAIN else None
    best = about["best_trivial"]
    return BenchTable(films.name, about["films"], films.fit_films, best, ranked, kind == BALANCED, audit)


def _audit(folder: Path) -> list[str] | None:
    """What the audit says of shortcuts."""
    if not (folder / REPORT).exists():
        return None
    return [
        str(finding["message"]) for finding in read_json(folder / REPORT)["findings"] if finding["kind"] == "shortcut"
    ]


def _published(bench: Bench, films: BenchSet, method: str, longer: LongFit | None) -> PublishedRow | None:
    if longer is None:
        return None
    path = bench.out / films.name / method / PUBLISHED / NUMBERS
    if not longer.allowed or not path.exists():
        return PublishedRow(longer.fit.epochs, longer.core_hours, None)
    hours = _core_minutes(bench.at_published_length, films, method) / 60
    return PublishedRow(longer.fit.epochs, hours, read_json(path)["rows"][0]["metrics"]["auc"])


def _core_minutes(bench: Bench, films: BenchSet, method: str) -> float:
    """Of one fit, the mean over seeds."""
    steps = [read_step(bench.out, fit_name(bench, films, method, seed)) for seed in bench.seeds]
    minutes = [step.processor_seconds / 60 for step in steps if step is not None]
    return float(np.mean(minutes)) if minutes else float("nan")


def _row(
    bench: Bench,
    films: BenchSet,
    method: str,
    fit: Fit,
    about: Mapping[str, Any],
    result: Mapping[str, Any],
    published: PublishedRow | None,
) -> BenchRow:
    line = about["rows"][0]
    steps = [read_step(bench.out, fit_name(bench, films, method, seed)) for seed in bench.seeds]
    return BenchRow(
        method,
        False,
        line["metrics"]["auc"],
        line["metrics"]["average_precision"],
        line["against"],
        about["localisation"],
        fit.epochs,
        fit.flops,
        _core_minutes(bench, films, method),
        max((step.peak_bytes for step in steps if step is not None), default=0),
        float(result["config"].get("films_per_second", float("nan"))),
        tuple(about["notes"]),
        published,
    )

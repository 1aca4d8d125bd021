"""The audit of a whole set: measure, check, and write what was found."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire._version import __version__
from afire.data.audit import checks, copies
from afire.data.audit.checks import SUSPECT, UNLIKE, judge_polarity
from afire.data.audit.collect import default_workers, measure_manifest
from afire.data.audit.copies import MIN_CORRELATION, NearPair, near_pairs
from afire.data.audit.measure import (
    THUMB_SIDE,
    Feature,
    Finding,
    count_levels,
    edge_ranks,
    film_features,
    sort_findings,
    verdict,
)
from afire.data.audit.shortcuts import NOTABLE, SEVERE, Shortcut, find_shortcuts
from afire.data.manifest import Manifest
from afire.files import write_json, write_text

SCHEMA = 2
MEASUREMENTS, REPORT, OFFENDERS = "measurements.parquet", "audit.json", "offenders.csv"
_FILMS_IN_REPORT = 50


@dataclass(frozen=True)
class Audit:
    """All that was found; ``measured`` and ``features`` have the rows of the manifest."""

    manifest: Manifest
    findings: list[Finding]
    shortcuts: list[Shortcut]
    measured: pd.DataFrame
    features: list[Feature]
    counts: Mapping[str, Any]
    seconds: float

    @property
    def invalid(self) -> bool:
        """Whether something was found that invalidates results."""
        return any(finding.level == "error" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """A message about the whole set."""
        return verdict(self.findings)


def drawn_over(manifest: Manifest) -> str:
    """What folds and intervals are drawn over: a film without a patient id counts as a patient."""
    return "patients" if manifest.patient_known.any() else "films, patients unknown"


def audit_manifest(manifest: Manifest, folder: Path | None = None, workers: int | None = None, seed: int = 0) -> Audit:
    """Measure every film once and run all checks. ``folder`` keeps the measurements for the next run."""
    start = time.monotonic()
    cache = folder / MEASUREMENTS if folder is not None else None
    measured = measure_manifest(manifest, cache, workers if workers is not None else default_workers())
    table, ranks = manifest.table, _rank_array(measured)
    features = film_features(table, measured)
    shortcuts = find_shortcuts(table, features, np.random.default_rng(seed), _edges(ranks, measured))
    pairs = _near_pairs(ranks, measured)
    findings = sort_findings(
        [
            *checks.check_readable(measured),
            *copies.check_patients(manifest),
            *copies.check_exact(table, measured),
            *copies.check_near(table, pairs),
            *checks.check_shortcuts(shortcuts, drawn_over(manifest)),
            *checks.check_polarity(judge_polarity(ranks, table["view"].to_list())),
            *checks.check_content(measured),
            *checks.check_range(measured),
            *checks.check_labels(table),
            *checks.check_views(table, measured),
        ]
    )
    counts = _count(table, measured)
    return Audit(manifest, findings, shortcuts, measured, features, counts, time.monotonic() - start)


def _near_pairs(ranks_NP: NDArray[np.uint8], measured: pd.DataFrame) -> list[NearPair]:
    """Near-duplicates among different films: of identical ones only the first counts."""
    rows = np.flatnonzero(~measured["pixels"].duplicated() & (measured["error"] == ""))
    pairs = near_pairs(ranks_NP[rows], measured["phash"].to_numpy()[rows])
    return [replace(pair, first=int(rows[pair.first]), second=int(rows[pair.second])) for pair in pairs]


def _edges(ranks_NP: NDArray[np.uint8], measured: pd.DataFrame) -> NDArray[np.float32]:
    edges = edge_ranks(ranks_NP)
    edges[(measured["error"] != "").to_numpy()] = np.nan
    return edges


def _rank_array(measured: pd.DataFrame) -> NDArray[np.uint8]:
    """(N, P); zeros, which count as blank, for films that could not be read."""
    empty = bytes(THUMB_SIDE**2)
    joined = b"".join(value or empty for value in measured["ranks"])
    return np.frombuffer(joined, np.uint8).reshape(-1, THUMB_SIDE**2)


def _count(table: pd.DataFrame, measured: pd.DataFrame) -> dict[str, Any]:
    labels = {
        name: {"present": int((table[name] == 1).sum()), "absent": int((table[name] == 0).sum())}
        for name in table.columns
        if name == "normal" or str(name).startswith("label:")
    }
    return {
        "films": len(table),
        "readable": int((measured["error"] == "").sum()),
        "patients": int(table["patient"].nunique()),
        "splits": _tally(table["split"]),
        "views": _tally(table["view"]),
        "labels": labels,
    }


def _tally(values: pd.Series) -> dict[str, int]:
    return {str(name) or "none": int(count) for name, count in values.value_counts().items()}


def write_audit(audit: Audit, folder: Path) -> None:
    """Write ``audit.json`` (all numbers, at most 50 films for a finding) and ``offenders.csv`` (every film)."""
    write_json(folder / REPORT, as_report(audit))
    write_text(folder / OFFENDERS, offenders_csv(audit))


def as_report(audit: Audit) -> dict[str, Any]:
    """The content of ``audit.json``."""
    images = audit.manifest.table["image"]
    return {
        "schema": SCHEMA,
        "afire": __version__,
        "manifest": audit.manifest.hash,
        "verdict": audit.verdict,
        "invalid": audit.invalid,
        "levels": count_levels(audit.findings),
        "counts": dict(audit.counts),
        "findings": [
            {
                "level": finding.level,
                "kind": finding.kind,
                "message": finding.message,
                "numbers": {name: _json_number(value) for name, value in finding.numbers.items()},
                "film_count": len(finding.films),
                "films": [str(images.iloc[row]) for row in finding.films[:_FILMS_IN_REPORT]],
            }
            for finding in audit.findings
        ],
        "shortcuts": [
            {name: _json_number(value) for name, value in {**asdict(shortcut), "level": shortcut.level}.items()}
            for shortcut in audit.shortcuts
        ],
        "thresholds": {
            "near_duplicate_correlation": MIN_CORRELATION,
            "negative_below": SUSPECT,
            "unlike_below": UNLIKE,
            "shortcut_severe": SEVERE,
            "shortcut_notable": NOTABLE,
            "tiny_below": checks.TINY,
        },
        "seconds": round(audit.seconds, 2),
    }


def _json_number(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def offenders_csv(audit: Audit) -> str:
    """One line for each film of each finding; films that belong together share the number of their group."""
    images = audit.manifest.table["image"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["level", "kind", "group", "image", "note"])
    for finding in audit.findings:
        notes = finding.notes or ("",) * len(finding.groups)
        for number, (group, note) in enumerate(zip(finding.groups, notes, strict=True), start=1):
            for row in group:
                writer.writerow([finding.level, finding.kind, number, images.iloc[row], note])
    return text.getvalue()

"""From finished trials to a table: mean, sd and p against the full method, beside the paper's numbers.

Two tests, because they ask different things: Welch's t-test over seeds (would it hold with other seeds?) and a paired
bootstrap over test patients of the mean over seeds (would it hold with other patients?).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.settings import load_config
from afire.studies.ablation_grid import DETECTED_BY, DETECTION, FULL, MAIN_SCORE, PROBE, SCORES, Row, Study, Trial
from afire.tasks import metrics as m
from afire.tasks.evaluate import TestScores, bootstrap_values
from afire.tasks.results import SCORE, TRUTH, Estimate, estimate, read_predictions, read_result

Floats = NDArray[np.float64]
PROBE_METRICS = ("auc", "accuracy", "f1")
MEASURES = (*PROBE_METRICS, "detection")
_SEED, _DRAWS = 0, 2000
# docs/results.md says the same: two choices of the preset were made while reading these films.
_CAUTION = (
    "The shared head and tau = 1 of the preset `small` come from exploratory runs of one seed that were read on this "
    "test part, so rows that keep them are not a clean test of these two choices. In this set the size of the original "
    "files alone separates the classes with AUC 0.939."
)


@dataclass(frozen=True)
class Against:
    """A row against the full method in one measure; NaN where a test cannot be made."""

    difference: float
    p_seeds: float
    paired: m.Difference


@dataclass(frozen=True)
class TableRow:
    """One row of the table. ``same_as_full``: its settings are those of the full method, its numbers the same."""

    row: Row
    seeds: list[int]
    measures: dict[str, Estimate]  # of MEASURES
    scores: dict[str, Estimate]  # of the detector, those of SCORES that the row has
    against: dict[str, Against]  # of MEASURES; empty for the full method
    same_as_full: bool
    minutes: float  # of one trial, mean

    @property
    def paper(self) -> dict[str, float]:
        """Published numbers as shares of 1."""
        published = self.row.paper
        return {name: getattr(published, name) / 100 for name in PROBE_METRICS} if published else {}


@dataclass(frozen=True)
class Ordering:
    """How our order of the rows with published AUCs agrees with the paper's."""

    rows: int
    spearman: float
    disagree: list[str]  # titles of rows that are not on the side of the full method where the paper has them


@dataclass(frozen=True)
class AblationTable:
    """Everything that the pages and the figure show."""

    rows: list[TableRow]
    facts: dict[str, str]
    ordering: Ordering | None
    notes: list[str] = field(default_factory=list)
    drawn_over: str = "test patients"  # by the paired bootstrap


def make_table(study: Study, rows: Sequence[Row], trials: Sequence[Trial]) -> AblationTable | None:
    """The table of all finished trials; rows without any stand in the notes. None before the full method has one."""
    results = _comparable({trial.key: result for trial in trials if (result := trial.result()) is not None})
    finished = {row.name: [c for c in trials if row.name in c.rows and c.key in results] for row in rows}
    if not finished[FULL]:
        return None
    full = _Measured(finished[FULL], results)
    table_rows: list[TableRow] = []
    for row in rows:
        if finished[row.name]:
            measured = full if finished[row.name] == finished[FULL] else _Measured(finished[row.name], results)
            table_rows.append(_table_row(row, measured, full))
    drawn_over = read_result(finished[FULL][0].folder / PROBE).drawn_over
    notes = _notes(rows, table_rows, results)
    return AblationTable(table_rows, _facts(study, table_rows, results), _ordering(table_rows), notes, drawn_over)


def _comparable(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Detection measured in two ways must not share a column: beside newer trials, older ones have none."""
    if all("detected_by" not in result for result in results.values()):
        return dict(results)
    return {key: r if r.get("detected_by") == DETECTED_BY else {**r, "detection": {}} for key, r in results.items()}


class _Measured:
    """The numbers of a row's trials, and each measure in every bootstrap draw of patients."""

    def __init__(self, trials: Sequence[Trial], results: Mapping[str, Mapping[str, Any]]) -> None:
        self.trials = sorted(trials, key=lambda trial: trial.seed)
        self.results = [results[trial.key] for trial in self.trials]
        draws = bootstrap_values([_probe_scores(c) for c in self.trials], np.random.default_rng(_SEED), _DRAWS)
        self.draws: dict[str, Floats] = {name: draws[name][:, -1] for name in PROBE_METRICS}
        self.draws["detection"] = np.full(_DRAWS, math.nan)
        if all(result["detection"] for result in self.results):
            scores = [_detection_scores(trial) for trial in self.trials]
            self.draws["detection"] = bootstrap_values(scores, np.random.default_rng(_SEED), _DRAWS)["auc"][:, -1]
        self.values = {name: [float(r["probe"].get(name, math.nan)) for r in self.results] for name in PROBE_METRICS}
        self.values["detection"] = [float(r["detection"].get(MAIN_SCORE, math.nan)) for r in self.results]

    def of_seeds(self, seeds: Sequence[int]) -> _Measured:
        """The same row with these seeds only."""
        trials = [trial for trial in self.trials if trial.seed in seeds]
        if len(trials) == len(self.trials):
            return self
        return _Measured(trials, {c.key: r for c, r in zip(self.trials, self.results, strict=True)})

    @property
    def seeds(self) -> list[int]:
        return [trial.seed for trial in self.trials]


def _table_row(row: Row, measured: _Measured, full: _Measured) -> TableRow:
    is_same = measured.trials == full.trials
    scores = {
        name: estimate([float(r["detection"][name]) for r in measured.results])
        for name in SCORES
        if all(name in r["detection"] for r in measured.results)
    }
    return TableRow(
        row=row,
        seeds=measured.seeds,
        measures={name: estimate(measured.values[name], measured.draws[name]) for name in MEASURES},
        scores=scores,
        against={} if is_same else {name: _against(measured, full, name) for name in MEASURES},
        same_as_full=is_same and row.name != FULL,
        minutes=float(np.mean([sum(r["seconds"].values()) for r in measured.results])) / 60,
    )


def _against(measured: _Measured, full: _Measured, name: str) -> Against:
    """Differences are of shared seeds only, so that an unfinished row is not compared with other seeds' luck."""
    shared = [seed for seed in measured.seeds if seed in full.seeds]
    if not shared:
        nothing = m.Difference(math.nan, math.nan, math.nan, math.nan)
        return Against(math.nan, math.nan, nothing)
    ours, theirs = measured.of_seeds(shared), full.of_seeds(shared)
    difference = float(np.mean(ours.values[name]) - np.mean(theirs.values[name]))
    paired = m.paired_difference(difference, ours.draws[name] - theirs.draws[name])
    return Against(difference, m.t_test(ours.values[name], theirs.values[name]).p, paired)


def _probe_scores(trial: Trial) -> TestScores:
    result, predictions = read_result(trial.folder / PROBE), read_predictions(trial.folder / PROBE)
    test = predictions[predictions["part"] == "test"]
    thresholds = result.runs[0].chosen["thresholds"]
    return TestScores(
        scores=test[[SCORE + label for label in result.labels]].to_numpy(np.float64),
        truth=test[[TRUTH + label for label in result.labels]].to_numpy(np.float64),
        patients=test["patient"].to_numpy(dtype=object),
        thresholds=np.array([thresholds[label] for label in result.labels]),
    )


def _detection_scores(trial: Trial) -> TestScores:
    films = pd.read_parquet(trial.folder / DETECTION)
    return TestScores(
        scores=films[[MAIN_SCORE]].to_numpy(np.float64),
        truth=films[["abnormal"]].to_numpy(np.float64),
        patients=films["patient"].to_numpy(dtype=object),
        thresholds=np.zeros(1),  # only the AUC is used
    )


def _ordering(rows: Sequence[TableRow]) -> Ordering | None:
    """Spearman's rank correlation with the paper's AUCs; needs three rows that have one."""
    from scipy.stats import spearmanr

    published = [row for row in rows if row.paper]
    full = next(row for row in rows if row.row.name == FULL)
    ours, paper = [row.measures["auc"].mean for row in published], [row.paper["auc"] for row in published]
    if len(published) < 3 or len(set(ours)) == 1:
        return None
    disagree = [
        row.row.title
        for row in published
        if row.against and row.against["auc"].difference * (row.paper["auc"] - full.paper["auc"]) <= 0
    ]
    return Ordering(len(published), float(spearmanr(ours, paper).statistic), disagree)


def _facts(study: Study, rows: Sequence[TableRow], results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    base, films, data = study.base, study.films, study.identity["data"]
    result = next(iter(results.values()))
    machine = result["machine"]
    hardware = ", ".join(machine["gpus"]) or f"CPU with {machine['cores']} cores, one process a trial"
    seeds = sorted({seed for row in rows for seed in row.seeds})
    encoder = base.encoder
    facts = {
        "data": f"{data['name']}, {data['size']} px, hash `{data['hash'][:12]}`",
        "films": f"{films['normal']:,} normal ones to pre-train; probe on {films['train']:,} / {films['val']:,} / "
        f"{films['test']:,} (train / val / test)",
        "split": f"hash `{study.split.hash[:12]}`, the same for every trial; thresholds and C from validation films",
        "label": ", ".join(study.labels),
        "network": f"ViT of width {encoder.width}, depth {encoder.depth}, patch {encoder.patch_size}",
        "budget": f"equal: {base.training.epochs} epochs, batch {base.training.batch_size}, in every row",
        "seeds": f"{', '.join(map(str, seeds))} (initial weights, order of films and lesions)",
        "machine": f"{hardware}; {machine['system']}, torch {result['torch']}, afire {result['afire']}",
    }
    caution = _caution(study)
    return {**facts, "caution": caution} if caution else facts


def _caution(study: Study) -> str:
    """What the reader must know about the test films before any number, or nothing."""
    small = load_config("small")
    chosen_there = (study.base.head.form, study.base.losses.temperature) == (
        small.head.form,
        small.losses.temperature,
    )
    return _CAUTION if study.builder == "childcxr" and chosen_there else ""


def _notes(rows: Sequence[Row], table_rows: Sequence[TableRow], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    notes = [f"{row.row.title}: {row.row.note}" for row in table_rows if row.row.note]
    same_titles = [row.row.title for row in table_rows if row.same_as_full]
    if same_titles:
        notes.append(f"the same settings as the full method here, so the same trials: {', '.join(same_titles)}")
    names = {row.row.name for row in table_rows}
    missing_titles = [row.title for row in rows if row.name not in names]
    if missing_titles:
        notes.append(f"not finished, so not in the table: {', '.join(missing_titles)}")
    most_seeds = max(len(row.seeds) for row in table_rows)
    fewer = [row.row.title for row in table_rows if len(row.seeds) < most_seeds]
    if fewer:
        notes.append(f"fewer seeds than the others: {', '.join(fewer)}")
    if most_seeds < 3:
        notes.append(
            "one seed has no sd and no t-test"
            if most_seeds == 1
            else "two seeds say little about an sd, and the t-test less"
        )
    comparisons = sum(1 for row in table_rows if row.against)
    if comparisons > 1:
        notes.append(f"p-values are not corrected for the {comparisons} comparisons")
    older = sum("detected_by" not in result for result in results.values())
    if older:
        notes.append(
            f"detection of {older:,} trials was measured by an earlier version, by scores that were not those of "
            "`afire detect`; delete their record (trial.json or cell.json) and run `afire ablate` again: it measures "
            "them anew and trains nothing" + ("" if older == len(results) else ". Here they have none")
        )
    versions = sorted({str(result["afire"]) for result in results.values()})
    if len(versions) > 1:
        notes.append(f"trials of different versions of afire: {', '.join(versions)}")
    return notes

"""Evaluating detectors: the chosen score, every single one and the trivial ones on the same test films.

Several detectors are the seeds of one row: mean, sd, and an interval by bootstrap over patients, in which all rows see
the same draws, so that their differences are paired. Below 0.5 a score is sign-flipped; afire never flips it back.
Messages sum up the table: whether learning beats the trivial rows, and what is sign-flipped.

Shapes: N test films, R rows of the table, B bootstrap draws.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from afire.data.keys import most_seen
from afire.data.manifest import ABNORMAL
from afire.data.pack import Films
from afire.data.splits import Split
from afire.detect.base import BATCH, AnomalyDetector
from afire.detect.localise import (
    CHOSEN,
    Localisation,
    Measured,
    Places,
    abnormal_truth,
    find_places,
    localise,
    measure,
    needed_rows,
    open_models,
    trivial_of,
)
from afire.detect.marks import Marks, mark_notes, plan_marked_test
from afire.detect.normals import Floats
from afire.detect.protocol import (
    TRIVIAL,
    Name,
    TestFilms,
    balanced_by_view,
    look_plainly,
    missing,
    pa_only,
    plan_test,
)
from afire.detect.run import detector_hash
from afire.tasks import metrics as m
from afire.tasks.evaluate import TestScores, bootstrap_means, bootstrap_values, run_values
from afire.tasks.features import data_content_hash
from afire.tasks.results import SCORE, TRUTH, Estimate, Result, RunResult, estimate, joint_hash, test_patients
from afire.training.run_folder import environment
from afire.weights import pick_device

Kind = Literal["chosen", "single", "trivial"]
ROW = "row:"  # prefix of a row's scores in predictions.parquet
FEWEST_OF_A_FINDING = 5
_SEED = 0
CHANCE = 0.5

logger = logging.getLogger("afire")


@dataclass(frozen=True)
class EvalTask:
    """What is evaluated on what. ``models`` are the seeds of one row."""

    models: Sequence[Path]
    films: Films
    source: str
    split: Split | None = None
    protocol: Name = "auto"
    name: str | None = None
    device: str = "auto"
    draws: int = m.DRAWS
    balance: Literal["view"] | None = None
    labels: Marks | None = None  # instead of the manifest's: marks from the page of `afire detect run`


@dataclass(frozen=True)
class Line:
    """A row of the table. ``against`` is its AUC minus that of the best trivial row, on paired draws."""

    name: str
    kind: Kind
    meaning: str
    metrics: dict[str, Estimate]  # auc, average_precision, accuracy, f1, and oracle_accuracy, oracle_f1
    against: m.Difference | None
    drawn_auc: float  # mean AUC on drawn lesions when the detector was fitted; NaN for trivial rows


@dataclass(frozen=True)
class Place:
    """Localisation over detectors."""

    kind: str
    films: int
    pixel_auc: Estimate
    pro: Estimate
    hit: Estimate
    chance: float


@dataclass(frozen=True)
class Evaluated:
    """Everything a page needs."""

    result: Result
    predictions: pd.DataFrame
    lines: list[Line]
    best_trivial: str
    findings: dict[str, dict[str, Estimate]]
    finding_films: dict[str, int]
    place: Place | None
    verdicts: list[str]
    counts: dict[str, int]
    protocol: str
    thresholds: list[float] = field(default_factory=list)


def evaluate_detectors(task: EvalTask) -> Evaluated:
    """Measure all detectors on the test films and compare them with the trivial ones."""
    films = task.films
    if task.protocol == "chexpert250":
        films.manifest = pa_only(films.manifest)
    test = _test_films(task)
    split = task.split if task.split is not None else test.split
    logger.info("%s: %s normal and %s abnormal films", test.message, *_counts(test).values())
    places = find_places(films, test.rows)
    measured = [
        measure(name, folder, detector, films, test, split, places)
        for name, folder, detector in open_models(task.models, films, pick_device(task.device))
    ]
    notes = [*_label_notes(task, measured), *_add_trivial(films, test, measured)]
    table = _table(films, test, measured, task.draws)
    predictions = _predictions(films, test, measured, table.names)
    lines = [_line(table, number, measured) for number in range(len(table.names))]
    place = _place(films, places, measured, task.draws)
    messages = verdicts(lines, table.best_trivial)
    result = _result(task, films, test, measured, lines[0], [*messages, *notes])
    findings = abnormal_truth(films.manifest, test.rows, FEWEST_OF_A_FINDING)
    return Evaluated(
        result=result,
        predictions=predictions,
        lines=lines,
        best_trivial=table.best_trivial,
        findings=_findings(films, test, measured, findings, task.draws),
        finding_films={name: int((truth == 1).sum()) for name, truth in findings.items()},
        place=place,
        verdicts=messages,
        counts=_counts(test),
        protocol=test.message,
        thresholds=[run.detector.threshold for run in measured],
    )


def _test_films(task: EvalTask) -> TestFilms:
    manifest = task.films.manifest
    if task.labels is None:
        test = plan_test(manifest, task.split, task.protocol)
    else:
        test = plan_marked_test(task.labels, manifest, task.split, task.protocol)
    return test if task.balance is None else balanced_by_view(manifest, test)


def _label_notes(task: EvalTask, measured: Sequence[Measured]) -> list[str]:
    if task.labels is None:
        return []
    return mark_notes(task.labels, {run.name: (detector_hash(run.folder), run.detector.threshold) for run in measured})


def _add_trivial(films: Films, test: TestFilms, measured: Sequence[Measured]) -> list[str]:
    """Add the trivial rows to what was measured; returns what a reader must know about them."""
    rows = needed_rows(measured, test)
    plain = look_plainly(films, rows)
    index = {row: place for place, row in enumerate(rows.tolist())}
    for run in measured:
        scores, thresholds = trivial_of(plain, index, run, test)
        run.scores.update(scores)
        run.thresholds.update(thresholds)
    fitted = measured[0].subsets.fit if measured[0].subsets is not None else test.normals
    notes = [note for run in measured for note in run.notes]
    return list(dict.fromkeys([*notes, *missing(plain, fitted)]))


@dataclass(frozen=True)
class _Table:
    """Values of R rows in each run, and in each draw of patients."""

    names: list[str]
    values: list[dict[str, Floats]]  # of each run: (R,) by metric
    drawn: dict[str, Floats]  # (B, R) by metric, mean over runs
    best_trivial: str


def _table(films: Films, test: TestFilms, measured: Sequence[Measured], draws: int) -> _Table:
    order = [CHOSEN, *measured[0].detector.meanings, *TRIVIAL]
    names = [name for name in order if all(name in run.scores for run in measured)]
    patients = films.manifest.table["patient"].to_numpy(dtype=object)[test.rows]
    truth = np.repeat(test.truth[:, None], len(names), axis=1)
    tests = []
    for run in measured:
        scores = np.stack([run.scores[name] for name in names], axis=1)
        thresholds = np.array([run.thresholds[name] for name in names])
        tests.append(TestScores(scores, truth, patients, thresholds))
    values = [{name: of_rows[:-1] for name, of_rows in run_values(tested).items()} for tested in tests]
    bootstraps = bootstrap_values(tests, np.random.default_rng(_SEED), draws)
    bootstraps = {name: of_rows[:, :-1] for name, of_rows in bootstraps.items()}
    unknown = np.isnan(np.stack([tested.thresholds for tested in tests])).any(axis=0)
    for value, tested in zip(values, tests, strict=True):
        for metric in ("accuracy", "f1"):
            value[metric][unknown] = np.nan
            bootstraps[metric][:, unknown] = np.nan
        best = [oracle(tested.scores[:, row], test.truth) for row in range(len(names))]
        value["oracle_accuracy"], value["oracle_f1"] = map(np.array, zip(*best, strict=True))
    means = {name: float(np.mean([value["auc"][row] for value in values])) for row, name in enumerate(names)}
    best_trivial = max((name for name in names if name in TRIVIAL), key=lambda name: means[name])
    return _Table(names, values, bootstraps, best_trivial)


def oracle(scores_N: Floats, truth_N: Floats) -> tuple[float, float]:
    """The best accuracy and the best F1 that any threshold gives on these very films: an upper bound, not a result."""
    order = np.argsort(-scores_N, kind="stable")
    ends = np.flatnonzero(np.r_[np.diff(scores_N[order]) != 0, True])
    positives = truth_N.sum()
    hits = np.r_[0.0, np.cumsum(truth_N[order])[ends]]
    called = np.r_[0.0, ends + 1.0]
    correct = hits + (len(truth_N) - positives) - (called - hits)
    return float(correct.max() / len(truth_N)), float((2 * hits / (called + positives)).max())


def _line(table: _Table, number: int, measured: Sequence[Measured]) -> Line:
    name = table.names[number]
    metrics = {
        metric: estimate(
            [float(value[metric][number]) for value in table.values],
            table.drawn[metric][:, number] if metric in table.drawn else None,
        )
        for metric in (*m.METRICS, "oracle_accuracy", "oracle_f1")
    }
    kind: Kind = "chosen" if name == CHOSEN else "trivial" if name in TRIVIAL else "single"
    against = None
    if kind != "trivial":
        best = table.names.index(table.best_trivial)
        draws = table.drawn["auc"]
        difference = metrics["auc"].mean - float(np.mean([value["auc"][best] for value in table.values]))
        against = m.paired_difference(difference, draws[:, number] - draws[:, best])
    return Line(name, kind, _meaning(name, measured), metrics, against, _drawn_auc(name, measured))


def _meaning(name: str, measured: Sequence[Measured]) -> str:
    if name == CHOSEN:
        return "; ".join(dict.fromkeys(run.detector.choice.name for run in measured))
    return TRIVIAL[name] if name in TRIVIAL else measured[0].detector.meanings[name]


def _drawn_auc(name: str, measured: Sequence[Measured]) -> float:
    if name == CHOSEN:
        return float(np.mean([run.detector.choice.mean_auc for run in measured]))
    tables = [run.detector.choice.table.get(name, {}) for run in measured]
    means = [float(np.mean(list(table.values()))) for table in tables if table]
    return float(np.mean(means)) if means else float("nan")


def _findings(
    films: Films, test: TestFilms, measured: Sequence[Measured], truths: dict[str, Floats], draws: int
) -> dict[str, dict[str, Estimate]]:
    """The chosen score for each finding: normal films against those with it."""
    if not truths:
        return {}
    names = list(truths)
    truth = np.stack([truths[name] for name in names], axis=1)
    patients = films.manifest.table["patient"].to_numpy(dtype=object)[test.rows]
    tests = [
        TestScores(
            np.repeat(run.scores[CHOSEN][:, None], len(names), axis=1),
            truth,
            patients,
            np.full(len(names), run.thresholds[CHOSEN]),
        )
        for run in measured
    ]
    values, bootstraps = list(map(run_values, tests)), bootstrap_values(tests, np.random.default_rng(_SEED), draws)
    return {
        name: {
            metric: estimate([float(value[metric][c]) for value in values], bootstraps[metric][:, c])
            for metric in m.METRICS
        }
        for c, name in enumerate(names)
    }


def _place(films: Films, places: Places | None, measured: Sequence[Measured], draws: int) -> Place | None:
    if places is None:
        return None
    hits: list[Localisation] = [localise(run.heat, places.inside) for run in measured if run.heat is not None]
    patients = films.manifest.table["patient"].to_numpy(dtype=object)[places.rows]
    bootstraps = bootstrap_means(
        [{"hit": run.hit} for run in hits], [patients] * len(hits), np.random.default_rng(_SEED), draws
    )
    return Place(
        kind=places.kind,
        films=len(places.rows),
        pixel_auc=estimate([run.pixel_auc for run in hits]),
        pro=estimate([run.pro for run in hits]),
        hit=estimate([float(run.hit.mean()) for run in hits], bootstraps["hit"]),
        chance=float(hits[0].chance.mean()),
    )


def _counts(test: TestFilms) -> dict[str, int]:
    return {"normal": int((test.truth == 0).sum()), "abnormal": int((test.truth == 1).sum())}


def _predictions(films: Films, test: TestFilms, measured: Sequence[Measured], names: Sequence[str]) -> pd.DataFrame:
    frames = []
    for run in measured:
        frame = films.manifest.table.iloc[test.rows][["image", "patient"]].reset_index(drop=True)
        frame.insert(0, "run", run.name)
        frame.insert(1, "part", "test")
        columns = {TRUTH + ABNORMAL: test.truth, SCORE + ABNORMAL: run.scores[CHOSEN]}
        columns |= {ROW + name: run.scores[name] for name in names if name != CHOSEN}
        frames.append(pd.concat([frame, pd.DataFrame(columns)], axis=1))
    return pd.concat(frames, ignore_index=True)


def _result(
    task: EvalTask, films: Films, test: TestFilms, measured: Sequence[Measured], line: Line, notes: list[str]
) -> Result:
    state = environment()
    test_hash = test.hash(films.manifest)
    detector = measured[0].detector
    metrics = {name: line.metrics[name] for name in m.METRICS}
    runs = [_run_result(run, number, test, test_hash, line) for number, run in enumerate(measured)]
    config: dict[str, Any] = {
        "protocol": test.protocol,
        "balance": task.balance,
        "films_per_second": _films_per_second(detector, films, test),
        "detector": detector.method,
        "procedure": detector.origin.get("procedure", "afire"),
        "flops": detector.cost(),
        "false_alarms": detector.false_alarms,
        "fitted": [run.detector.settings.model_dump() for run in measured],
        **({"labels": {"file": task.labels.name, "hash": task.labels.hash}} if task.labels is not None else {}),
    }
    weights = dict(detector.origin.get("weights", {}))
    return Result(
        task="detect",
        method=line.meaning,
        name=task.name or task.models[0].resolve().name,
        data={
            "name": task.source,
            "hash": data_content_hash(films),
            "films": len(films),
            "size": films.size,
            "test_patients": test_patients(films.manifest, test.rows),
        },
        split_hash=test_hash,  # detectors compare where they are tested on the same films, whatever fitted them
        test_hash=test_hash,
        weights={
            "name": str(weights.get("name", "unknown")),
            "hash": joint_hash([run.weights_hash for run in runs]),
            "report": f"fitted on normal films of {detector.origin.get('data', {}).get('name', 'unknown')}",
        },
        labels=[ABNORMAL],
        fraction=1.0,
        config=config,
        runs=runs,
        metrics=metrics,
        per_label={ABNORMAL: metrics},
        command=state.pop("command"),
        environment=state,
        notes=notes,
        seen={
            "fit": most_seen(run.fit for run in measured).as_dict(),
            "pretraining": most_seen(run.pretraining for run in measured).as_dict(),
        },
    )


def _films_per_second(detector: AnomalyDetector, films: Films, test: TestFilms) -> float:
    """Of scoring a batch that is in memory, after one to warm up."""
    images = films.batch(test.rows[:BATCH])
    detector.score(images, restore=False)
    start = time.perf_counter()
    detector.score(images, restore=False)
    return len(images) / (time.perf_counter() - start)


def _run_result(run: Measured, number: int, test: TestFilms, test_hash: str, line: Line) -> RunResult:
    detector = run.detector
    return RunResult(
        name=run.name,
        seed=run.seed,
        fold=None,
        split_hash=test_hash,
        weights_hash=detector.weights_hash,
        films={**detector.origin.get("parts", {}), "test": len(test.rows)},
        chosen={"score": detector.choice.name, "thresholds": {ABNORMAL: detector.threshold}},
        metrics={name: line.metrics[name].values[number] for name in m.METRICS},
    )


def verdicts(lines: Sequence[Line], best_trivial: str) -> list[str]:
    """Messages, the most important first. ``lines`` begin with the chosen score."""
    chosen = lines[0]
    best = next(line for line in lines if line.name == best_trivial)
    messages = [_against(chosen, best), *_sign_flipped(lines)]
    better = [line for line in lines if line.kind == "single" and line.against is not None and line.against.low > 0]
    if chosen.against is not None and chosen.against.low <= 0 and better:
        names = ", ".join(line.name for line in better)
        messages.append(
            f"{names} would have beaten {best_trivial} here; that is known only now, with test labels, and is no result"
        )
    return messages


def _against(line: Line, best: Line) -> str:
    ours, theirs, difference = line.metrics["auc"].mean, best.metrics["auc"].mean, line.against
    assert difference is not None
    numbers = f"{difference.value:+.3f}, 95 % interval {difference.low:+.3f} to {difference.high:+.3f}"
    subject = f"the chosen score {line.meaning} (AUC {ours:.3f})"
    rival = f"the best trivial detector, {best.name} (AUC {theirs:.3f})"
    if difference.low > 0:
        return f"{subject} beats {rival}: {numbers}"
    if difference.high < 0:
        return f"{subject} does not beat the trivial detectors: it is worse than {rival}: {numbers}"
    return f"{subject} does not beat {rival}: {numbers}"


def is_sign_flipped(line: Line) -> bool:
    """Whether its AUC, as it is printed, lies below chance."""
    return round(line.metrics["auc"].mean, 3) < CHANCE


def _sign_flipped(lines: Sequence[Line]) -> list[str]:
    messages = []
    wrong = [f"{line.name} ({line.metrics['auc'].mean:.3f})" for line in lines if is_sign_flipped(line)]
    if wrong:
        messages.append(f"sign-flipped, normal films score higher: {', '.join(wrong)}; afire flips no score back")
    for line in lines:
        auc = line.metrics["auc"].mean
        if line.kind != "trivial" and line.drawn_auc < CHANCE < auc:
            messages.append(
                f"{line.name} reaches {auc:.3f} here only because it is sign-flipped: drawn lesions score lower than "
                f"normals (AUC {line.drawn_auc:.3f}), so what it finds is an artefact, such as smoother films"
            )
    return messages

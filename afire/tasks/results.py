"""The runs of an experiment, and the result that they become: ``result.json`` and ``predictions.parquet``.

There is a run for each seed (and fold), with the split it uses. What a seed may change is decided here, for all tasks:

- a split file fixes all subsets for every seed;
- the manifest's own lists fix the test films. Where they have no validation films, each seed carves its own from train;
- without lists, the test films are drawn once (always from seed 0) and each seed carves its own validation films;
- a label fraction keeps a share of train that each seed draws for itself;
- folds are drawn once (seed 0); each seed repeats all of them.

So the test films never depend on the seed. Exact copies of a film count as one patient when a subset is drawn here.

A result says what was measured, on which films, with which weights. It is one row of a table: one method, one label
fraction, all of its runs. ``predictions.parquet`` has a row for each film of val and test in each run, with the columns
``run``, ``part``, ``image``, ``patient`` and either ``truth:X`` and ``score:X`` for every label X (classification), or
``value:M`` for every metric M that is a mean over films (segmentation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from afire.data.manifest import SPLITS, Manifest
from afire.data.splits import (
    Scope,
    Split,
    films_hash,
    fold_splits,
    fraction_of,
    make_split,
    official_split,
    random_split,
)
from afire.errors import UserError
from afire.files import read_json, remove_unfinished, require_own, sha256_text, write_atomic, write_json
from afire.tasks.guard import check_no_leaks, film_digests, group_copies
from afire.tasks.metrics import interval

Rows = NDArray[np.int64]
FORMAT = 1
RESULT, PREDICTIONS, PAGE = "result.json", "predictions.parquet", "result.md"
TRUTH, SCORE, VALUE = "truth:", "score:", "value:"
_VAL_SHARE = 0.1


@dataclass(frozen=True)
class Run:
    """One training and testing: its seed, its fold (or None), and the rows of its subsets."""

    seed: int
    fold: int | None
    split: Split
    rows: Mapping[str, NDArray[np.int64]]

    @property
    def name(self) -> str:
        return f"seed-{self.seed}" if self.fold is None else f"seed-{self.seed}-fold-{self.fold}"

    def result(self, weights_hash: str, chosen: Mapping[str, Any], metrics: Mapping[str, float]) -> RunResult:
        """Its record: its weights, what was chosen on validation, and its metrics on the test films."""
        return RunResult(
            name=self.name,
            seed=self.seed,
            fold=self.fold,
            split_hash=self.split.hash,
            weights_hash=weights_hash,
            films={subset: len(rows) for subset, rows in self.rows.items()},
            chosen=dict(chosen),
            metrics=dict(metrics),
        )


def plan_runs(
    manifest: Manifest, split: Split | None, seeds: Sequence[int], fraction: float = 1.0, folds: int = 0
) -> list[Run]:
    """The runs for all seeds and folds, checked for leaks between their subsets. ``fraction`` is in (0, 1]."""
    if len(set(seeds)) < len(seeds) or not seeds:
        raise UserError("--seeds needs at least one seed, and each only once, as in --seeds 0,1,2.")
    if folds and split is not None:
        raise UserError("--folds and --split exclude each other: every fold brings its own subsets.")
    runs = []
    digests = film_digests(manifest)
    grouped = group_copies(manifest, digests)
    if split is None and not folds:
        # Before copies are grouped: one that crosses the official lists is to be named as a copy, not as a patient.
        listed = {subset: np.flatnonzero(manifest.table["split"] == subset) for subset in SPLITS}
        check_no_leaks(manifest, listed, digests)
    for seed in seeds:
        for fold, base in enumerate(_splits(manifest, grouped, split, seed, folds)):
            rows = base.rows(manifest)
            _check_subsets(base)
            check_no_leaks(manifest, rows, digests)
            if fraction < 1:
                base = fraction_of(base, manifest, fraction, seed)
                rows = base.rows(manifest)
            runs.append(Run(seed, fold if folds else None, base, rows))
    return runs


def _check_subsets(split: Split) -> None:
    for subset in SPLITS:
        if split.films[subset] == 0:
            raise UserError(f"the split has no {subset} films; make one that has with `afire data split`.")


def _splits(manifest: Manifest, grouped: Manifest, split: Split | None, seed: int, folds: int) -> list[Split]:
    """The splits of one seed, drawn on ``grouped`` (copies are one patient), in the manifest's own patients."""
    if split is not None:
        return [split]
    if folds:
        splits = fold_splits(grouped, folds, _VAL_SHARE)
        return [_ungroup(manifest, grouped, fold, "all", fold.method) for fold in splits]
    if (manifest.table["split"] == "train").any():
        carved = official_split(grouped, _VAL_SHARE, seed)
        return [_ungroup(manifest, grouped, carved, "listed", carved.method)]
    test = random_split(grouped, _VAL_SHARE, seed=0)
    carved = official_split(_list_subsets(grouped, test), _VAL_SHARE, seed)
    return [_ungroup(manifest, grouped, carved, "all", {**test.method, "val_seed": seed})]


def _list_subsets(manifest: Manifest, split: Split) -> Manifest:
    """The manifest with ``split``'s test films listed as test and everything else as train."""
    listed = np.where(manifest.table["patient"].isin(list(split.patients["test"])), "test", "train")
    return Manifest(manifest.table.assign(split=listed), manifest.root, manifest.info)


def _ungroup(manifest: Manifest, grouped: Manifest, split: Split, scope: Scope, method: Mapping[str, Any]) -> Split:
    """A split of grouped patients as a split of the manifest's own."""
    patient, group = manifest.table["patient"], grouped.table["patient"]
    patients = {subset: sorted(patient[group.isin(list(ids))].unique()) for subset, ids in split.patients.items()}
    return make_split(manifest, patients, scope, method)


def joint_hash(hashes: Sequence[str]) -> str:
    """One hash for the runs of an experiment: the hash itself where all are equal."""
    return hashes[0] if len(set(hashes)) == 1 else sha256_text("\n".join(hashes))


def split_hash(runs: Sequence[Run]) -> str:
    """What two results must share to be comparable: the films of all subsets of all runs."""
    return joint_hash([run.split.hash for run in runs])


def test_hash(manifest: Manifest, runs: Sequence[Run]) -> str:
    """Hash of the test films alone."""
    return joint_hash([films_hash(manifest, {"test": run.rows["test"]}) for run in runs])


@dataclass(frozen=True)
class Estimate:
    """A metric over runs: mean, sd over runs (NaN with one), bootstrap 95 % interval over test patients, run values."""

    mean: float
    sd: float
    low: float
    high: float
    values: list[float]


@dataclass(frozen=True)
class RunResult:
    """One run: its seed and fold, its split and weights, what was chosen on validation, and its test metrics."""

    name: str
    seed: int
    fold: int | None
    split_hash: str
    weights_hash: str
    films: dict[str, int]
    chosen: dict[str, Any]  # from validation only: C, k, epoch, threshold of each label, ...
    metrics: dict[str, float]


@dataclass(frozen=True)
class Result:
    """What ``result.json`` holds. Numbers that do not exist are NaN here and null there."""

    task: str  # probe, finetune, segment
    method: str  # linear, knn, ...
    name: str  # of the row in a table
    data: dict[str, Any]  # name, hash, test_patients
    split_hash: str
    test_hash: str
    weights: dict[str, str]  # name, hash, report
    labels: list[str]
    fraction: float
    config: dict[str, Any]
    runs: list[RunResult]
    metrics: dict[str, Estimate]  # over labels: the mean of those with both classes
    per_label: dict[str, dict[str, Estimate]]
    environment: dict[str, Any]
    command: list[str]
    notes: list[str] = field(default_factory=list)
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)  # what pre-training and fitting saw of the test films

    @property
    def seen_text(self) -> str:
        """What pre-training saw of the test films, as text; empty where there was none, or it was not checked."""
        pretraining = self.seen.get("pretraining", {})
        if not pretraining:
            return ""
        if pretraining["answer"] == "unknown":
            return f"whether it saw {pretraining['unknown']:,} of {pretraining['films']:,} test films is not known"
        return (
            f"saw {pretraining['seen']:,} of {pretraining['films']:,} test films"
            if pretraining["seen"]
            else "saw none of the test films"
        )

    @property
    def drawn_over(self) -> str:
        """What the draws behind intervals and paired tests are of. A film without a patient id counts as a patient."""
        counts = self.data.get("test_patients", {})
        films, unknown = counts.get("films", 0), counts.get("films_without_patient", 0)
        if not unknown:
            return "test patients"
        if unknown == films:
            return "test films, patients unknown"
        return f"test patients ({unknown:,} of {films:,} test films have no patient id and count as one each)"


def test_patients(manifest: Manifest, rows: NDArray[np.int64]) -> dict[str, int]:
    """What a result says about the patients of its test films."""
    return {"films": len(rows), "films_without_patient": int((~manifest.patient_known.iloc[rows]).sum())}


def estimate(values: Sequence[float], bootstrap_B: np.ndarray | None = None) -> Estimate:
    """Summarise the values of the runs, with the interval of bootstrap values of their mean."""
    numbers = np.asarray(values, np.float64)
    defined = numbers[~np.isnan(numbers)]
    mean = float(defined.mean()) if len(defined) else math.nan
    sd = float(defined.std(ddof=1)) if len(defined) > 1 else math.nan
    low, high = interval(bootstrap_B) if bootstrap_B is not None else (math.nan, math.nan)
    return Estimate(mean, sd, low, high, [float(value) for value in numbers])


def check_out(out: Path, force: bool) -> None:
    """Refuse to write over a result unless asked to."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; --out needs a folder.")
    require_own(out, RESULT)
    if (out / RESULT).exists() and not force:
        raise UserError(f"{out} already holds a result; add --force to replace it, or choose another --out.")


def write_result(out: Path, result: Result, predictions: pd.DataFrame) -> None:
    """Write the predictions, then ``result.json``: its presence says that the result is whole."""
    remove_unfinished(out)
    write_atomic(out / PREDICTIONS, lambda path: predictions.to_parquet(path, index=False))
    write_json(out / RESULT, {"format": FORMAT, **to_json(asdict(result))})


def read_result(path: Path) -> Result:
    """Read ``result.json``, given itself or its folder."""
    file = path / RESULT if path.is_dir() else path
    if not file.exists():
        raise UserError(f"{path} holds no {RESULT}; give the folder that a task wrote.")
    raw = read_json(file)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise UserError(f"{file} is not a result of format {FORMAT}; run the task again.")
    try:
        names = [entry.name for entry in fields(Result)]
        values = {name: raw[name] for name in names if name in raw or name != "seen"}
        values["runs"] = [RunResult(**{**run, "metrics": _numbers(run["metrics"])}) for run in values["runs"]]
        values["metrics"] = _estimates(values["metrics"])
        values["per_label"] = {label: _estimates(row) for label, row in values["per_label"].items()}
        return Result(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is truncated or not written by afire ({type(error).__name__}: {error}); run the task again."
        ) from None


def find_results(path: Path) -> list[Path]:
    """Folders with a result: ``path`` itself, or those directly and one level below it."""
    if path.is_file():
        return [path.parent]
    if (path / RESULT).exists():
        return [path]
    folders = sorted(file.parent for pattern in (f"*/{RESULT}", f"*/*/{RESULT}") for file in path.glob(pattern))
    if not folders:
        raise UserError(f"{path} holds no {RESULT}; give a folder that `afire probe` or another task wrote.")
    return folders


def read_predictions(path: Path) -> pd.DataFrame:
    """The predictions beside a ``result.json`` (its folder or the file)."""
    file = (path if path.is_dir() else path.parent) / PREDICTIONS
    try:
        pq.read_table(file, partitioning=None).validate(full=True)  # else a damaged text is noticed much later
        return pd.read_parquet(file)
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the predictions {file} cannot be read ({reason}); run the task again.") from None


def _estimates(raw: Mapping[str, Mapping[str, Any]]) -> dict[str, Estimate]:
    return {
        name: Estimate(**{**_numbers({k: v for k, v in row.items() if k != "values"}), "values": _list(row["values"])})  # type: ignore[arg-type]
        for name, row in raw.items()
    }


def _numbers(raw: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else float(value) for name, value in raw.items()}


def _list(raw: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else float(value) for value in raw]


def to_json(value: Any) -> Any:
    """NaN and infinities become null; numpy numbers and paths become plain ones."""
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value

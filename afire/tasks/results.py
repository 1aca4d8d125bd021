"""A result: what was measured, on which films, with which weights; as ``result.json`` and ``predictions.parquet``.

One result is one row of a table: one method, one label fraction, all of its runs (seeds, folds).

``predictions.parquet`` has a row for each film of val and test in each run, with the columns ``run``, ``part``,
``image``, ``patient`` and either ``truth:X`` and ``score:X`` for every label X (classification), or ``value:M`` for
every metric M that is a mean over films (segmentation).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from afire.errors import UserError
from afire.files import read_json, write_atomic, write_json

FORMAT = 1
RESULT, PREDICTIONS, PAGE = "result.json", "predictions.parquet", "result.md"
TRUTH, SCORE, VALUE = "truth:", "score:", "value:"


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
    data: dict[str, Any]  # name, hash
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


def estimate(values: Sequence[float], bootstrap_B: np.ndarray | None = None) -> Estimate:
    """Summarise the values of the runs, with the interval of bootstrap values of their mean."""
    from afire.tasks.metrics import interval

    numbers = np.asarray(values, np.float64)
    known = numbers[~np.isnan(numbers)]
    mean = float(known.mean()) if len(known) else math.nan
    sd = float(known.std(ddof=1)) if len(known) > 1 else math.nan
    low, high = interval(bootstrap_B) if bootstrap_B is not None else (math.nan, math.nan)
    return Estimate(mean, sd, low, high, [float(value) for value in numbers])


def check_out(out: Path, force: bool) -> None:
    """Refuse to write over a result unless asked to."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; --out needs a folder.")
    if (out / RESULT).exists() and not force:
        raise UserError(f"{out} already holds a result; add --force to replace it, or choose another --out.")


def write_result(out: Path, result: Result, predictions: pd.DataFrame) -> None:
    """Write the predictions, then ``result.json``: its presence says that the result is whole."""
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
        values = {one.name: raw[one.name] for one in fields(Result)}
        values["runs"] = [RunResult(**{**run, "metrics": _numbers(run["metrics"])}) for run in values["runs"]]
        values["metrics"] = _estimates(values["metrics"])
        values["per_label"] = {label: _estimates(row) for label, row in values["per_label"].items()}
        return Result(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is torn or not ours ({type(error).__name__}: {error}); run the task again.") from None


def find_results(path: Path) -> list[Path]:
    """Folders with a result: ``path`` itself, or those directly and one level below it."""
    if path.is_file():
        return [path.parent]
    if (path / RESULT).exists():
        return [path]
    found = sorted(file.parent for pattern in (f"*/{RESULT}", f"*/*/{RESULT}") for file in path.glob(pattern))
    if not found:
        raise UserError(f"{path} holds no {RESULT}; give a folder that `afire probe` or another task wrote.")
    return found


def read_predictions(path: Path) -> pd.DataFrame:
    """The predictions beside a ``result.json`` (its folder or the file)."""
    file = (path if path.is_dir() else path.parent) / PREDICTIONS
    try:
        return pd.read_parquet(file)
    except (OSError, ValueError) as error:
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

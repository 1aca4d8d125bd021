"""Finished trials without training: results written as a trial would, with scores that a test can compute with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from afire.files import write_json
from afire.studies.ablation_grid import DETECTED_BY, DETECTION, FORMAT, PROBE, TRIAL, Trial
from afire.tasks.results import Result, RunResult, estimate, write_result

PATIENTS = 40


def truth() -> np.ndarray:
    """Two test films of each patient, every other patient abnormal, (2 * PATIENTS,)."""
    return np.repeat(np.arange(PATIENTS) % 2, 2).astype(float)


def scores(generator: np.random.Generator, signal: float) -> np.ndarray:
    """Noise plus ``signal`` where a film is abnormal; the two films of a patient share half of their noise."""
    own, shared = generator.normal(size=2 * PATIENTS), np.repeat(generator.normal(size=PATIENTS), 2)
    return np.asarray(signal * truth() + 0.5 * own + 0.5 * shared)


def finish(
    trial: Trial, probe: np.ndarray, detection: np.ndarray, metrics: dict[str, float], seconds: float = 60
) -> None:
    """Write what a trial writes. ``metrics`` are the probe's; the threshold of its scores is 0.5."""
    patients = [f"p{number // 2}" for number in range(len(probe))]
    frame = pd.DataFrame(
        {
            "run": "seed",
            "part": "test",
            "image": [f"{number}.png" for number in range(len(probe))],
            "patient": patients,
            "truth:abnormal": truth(),
            "score:abnormal": probe,
        }
    )
    write_result(trial.folder / PROBE, _result(trial.seed, metrics), frame)
    trial.folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame({"image": frame["image"], "patient": patients, "abnormal": truth(), "gaussian": detection}).to_parquet(
        trial.folder / DETECTION
    )
    write_json(trial.folder / TRIAL, _record(trial, metrics, detection, seconds))


def area(values: np.ndarray, positive: np.ndarray) -> float:
    """AUC the slow way: every pair."""
    above = values[positive == 1][:, None] - values[positive == 0][None]
    return float((above > 0).mean() + 0.5 * (above == 0).mean())


def _record(trial: Trial, metrics: dict[str, float], detection: np.ndarray, seconds: float) -> dict[str, object]:
    return {
        "format": FORMAT,
        "key": trial.key,
        "name": trial.rows[0],
        "seed": trial.seed,
        "probe": metrics,
        "detection": {"gaussian": area(detection, truth())},
        "detected_by": DETECTED_BY,
        "seconds": {"train": seconds - 10, "probe": 6.0, "detection": 4.0},
        "afire": "0",
        "torch": "0",
        "machine": {"gpus": [], "cores": 2, "system": "drawn"},
    }


def _result(seed: int, metrics: dict[str, float]) -> Result:
    run = RunResult("seed", seed, None, "s", "w", {"test": 2 * PATIENTS}, {"thresholds": {"abnormal": 0.5}}, metrics)
    return Result(
        task="probe",
        method="linear",
        name="drawn",
        data={"name": "drawn", "hash": "h"},
        split_hash="s",
        test_hash="t",
        weights={"name": "w", "hash": "w", "report": ""},
        labels=["abnormal"],
        fraction=100,
        config={},
        runs=[run],
        metrics={name: estimate([value]) for name, value in metrics.items()},
        per_label={},
        environment={},
        command=[],
    )


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()

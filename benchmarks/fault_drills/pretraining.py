"""``kill -9`` during pre-training, then ``--resume`` until done: bit-identical to an uninterrupted run."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from afire.files import sha256_file
from fault_drills.commands import DrillError, Ended, afire, require_documented_end, run, stray_files, succeed

SETTINGS = (
    "training.batch_size=8",
    "training.epochs=4",
    "run.checkpoint_minutes=1e-9",  # a checkpoint after every step
    "run.picture_epochs=2",
)
CLOCK = {"images_per_second", "data_wait"}  # of metrics.jsonl; nothing else may differ
_AIMED = 5  # every fifth drill waits for a checkpoint that is being written
_AGAIN = 0.3  # share of resumed runs that are killed too
_MOST_KILLS = 4


def command(pack: Path, out: Path, *extra: str) -> list[str]:
    chosen = [word for setting in SETTINGS for word in ("--set", setting)]
    words = ("pretrain", "--data", pack, "--out", out, "--preset", "tiny", "--device", "cpu", *chosen, *extra)
    return afire(*words)


def outcome(run_folder: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on kills."""
    checkpoints = sorted((run_folder / "checkpoints").iterdir())
    found: dict[str, Any] = {
        f"{folder.name}/{file.name}": sha256_file(file) for folder in checkpoints for file in sorted(folder.iterdir())
    }
    records = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    found["metrics.jsonl"] = [{key: record[key] for key in record if key not in CLOCK} for record in records]
    summary = json.loads((run_folder / "summary.json").read_text())
    found["summary.json"] = {key: summary[key] for key in ("status", "step", "losses", "health", "bad_films")}
    for name in ("config.yaml", "data.json", "films.txt"):
        found[name] = sha256_file(run_folder / name)
    for picture in sorted((run_folder / "pictures").glob("*")):
        found[f"pictures/{picture.name}"] = sha256_file(picture)
    return found


def require_equal(expected: dict[str, Any], found: dict[str, Any], what: str) -> None:
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if different:
        raise DrillError(f"{what} differs from the undisturbed run in {', '.join(different[:6])}")


def phase(out: Path) -> str:
    """Where a run stood when it was killed, by what is on disk."""
    if not (out / "config.yaml").exists():
        return "starting, before the run folder"
    if (out / "summary.json").exists():
        return "ending, summary written"
    if any((out / "checkpoints").glob(".part-*")):
        return "writing a checkpoint"
    if not any((out / "checkpoints").glob("step-*")):
        return "before the first checkpoint"
    return "between checkpoints"


def moment(rng: np.random.Generator, cpu_seconds: float, aimed_at: Path | None) -> Callable[[float], bool]:
    """When to kill: at a random moment of the run, or from then on at the first sight of a checkpoint being written."""
    after = float(rng.uniform(0, cpu_seconds))

    def now(used: float) -> bool:
        if used < after:
            return False
        return aimed_at is None or any(aimed_at.glob(".part-step-*")) or (aimed_at.parent / "summary.json").exists()

    return now


def one_drill(
    number: int, seed: int, pack: Path, folder: Path, cpu_seconds: float, expected: dict[str, Any]
) -> list[str]:
    """One run that is killed at least once and resumed to its end; the phases in which it was killed."""
    rng = np.random.default_rng([seed, number])
    out = folder / f"run-{number:02d}"
    phases: list[str] = []
    attempt = 0
    while True:
        aimed_at = out / "checkpoints" if number % _AIMED == 0 and not phases else None
        wants_kill = not phases or (len(phases) < _MOST_KILLS and rng.random() < _AGAIN)
        resume = ["--resume"] if (out / "config.yaml").exists() else []
        ended = run(
            command(pack, out, *resume),
            folder / f"logs/run-{number:02d}-{attempt}",
            kill_when=moment(rng, cpu_seconds, aimed_at) if wants_kill else None,
        )
        attempt += 1
        if ended.killed:
            phases.append(phase(out))
            continue
        require_documented_end(ended, f"drill {number}", codes=(0,))
        if phases:
            break
        shutil.rmtree(out)  # it was faster than the kill: once more
        if attempt > 10:
            raise DrillError(f"drill {number} could not kill its run")
    require_equal(expected, outcome(out), f"drill {number}, killed {' and '.join(phases)},")
    if left := stray_files(out):
        raise DrillError(f"drill {number} left {', '.join(left)}")
    shutil.rmtree(out)
    return phases


def drill(folder: Path, pack: Path, *, kills: int, seed: int, jobs: int) -> dict[str, Any]:
    """``kills`` drills, ``jobs`` of them at a time."""

    def undisturbed(number: int) -> Ended:
        return succeed(command(pack, folder / f"whole-{number}"), folder / f"logs/whole-{number}")

    with ThreadPoolExecutor(jobs) as pool:
        cpu_seconds = max(ended.cpu_seconds for ended in pool.map(undisturbed, range(jobs)))
        expected = outcome(folder / "whole-0")
        for number in range(1, jobs):
            require_equal(expected, outcome(folder / f"whole-{number}"), "a second undisturbed run")
        drills = pool.map(lambda number: one_drill(number, seed, pack, folder, cpu_seconds, expected), range(kills))
        phases = [phase for phases in drills for phase in phases]
    return {
        "drills": kills,
        "kills": len(phases),
        "identical": kills,
        "steps": expected["summary.json"]["step"],
        "cpu seconds of a run": round(cpu_seconds, 1),
        "killed while": dict(sorted(Counter(phases).items())),
    }

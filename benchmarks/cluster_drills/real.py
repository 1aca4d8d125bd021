"""One real set, packed, scored and embedded over two raylets, and by one process: the same bytes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fault_drills.commands import DrillError, afire, tree_hashes

from afire.files import sha256_file
from cluster_drills.raylets import Raylets

_SIZE, _SHARDS = 128, 8


def compare(films: Path, work: Path, raylets: Raylets) -> dict[str, Any]:
    """Shenzhen at 128 px: every file that two raylets write is that of one process."""
    work.mkdir(parents=True)
    seconds: dict[str, float] = {}

    def run(name: str, *words: object) -> None:
        start = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(afire(*words, "--quiet"), cwd=work, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise DrillError(f"{name} ended with {done.returncode}: {done.stderr[-800:]}")
        seconds[name] = round(time.monotonic() - start, 1)

    ray = ("--engine", "ray", "--address", raylets.address)
    run("build", "data", "build", "lungmasks", "--root", films, "--out", "films.parquet")
    pack = ("data", "pack", "--data", "films.parquet", "--size", _SIZE)
    run("pack, one array", *pack, "--out", "one", "--workers", 1)
    run("pack, one process", *pack, "--out", "pack", "--shards", _SHARDS, "--workers", 1)
    run("pack, two raylets", *pack, "--out", "pack-ray", "--shards", _SHARDS, *ray)
    detector = ("detect", "fit", "--method", "patchcore", "--weights", "random", "--preset", "small")
    run("fit", *detector, "--data", "one", "--out", "detector")
    score = ("detect", "run", "--model", "detector")
    run("detect, one process", *score, "--data", "one", "--out", "found")
    run("detect, two raylets", *score, "--data", "pack-ray", "--out", "found-ray", "--shards", _SHARDS, *ray)
    embed = ("embed", "--weights", "random", "--preset", "small")
    run("embed, one process", *embed, "--data", "one", "--out", "features.parquet")
    run("embed, two raylets", *embed, "--data", "pack-ray", "--out", "ray.parquet", "--shards", _SHARDS, *ray)
    parts = [np.load(file) for file in sorted((work / "pack-ray").glob("images-*.npy"))]
    checks: dict[str, Callable[[], bool]] = {
        "pack, file by file": lambda: tree_hashes(work / "pack") == tree_hashes(work / "pack-ray"),
        "pack, as one array": lambda: np.array_equal(np.concatenate(parts), np.load(work / "one/images.npy")),
        "detect run, file by file": lambda: tree_hashes(work / "found") == tree_hashes(work / "found-ray"),
        "embed": lambda: sha256_file(work / "features.parquet") == sha256_file(work / "ray.parquet"),
    }
    for name, same in checks.items():
        if not same():
            raise DrillError(f"{name}: two raylets and one process differ")
    return {
        "films": sum(map(len, parts)),
        "shards": _SHARDS,
        "same bytes": list(checks),
        "files of the pack": len(tree_hashes(work / "pack")),
        "files of detect run": len(tree_hashes(work / "found")),
        "seconds": seconds,
    }

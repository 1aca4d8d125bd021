"""What equal means for what the commands write: everything that a seed decides, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file

from afire.data.manifest import read_manifest
from afire.training.run_folder import newest_checkpoint

_OF_THE_MOMENT = {"command", "environment", "started"}
_OF_THE_NAME = {"name", "source", "held_out_by"}
_SPEED = ("images_per_second", "data_wait", "memory", "seconds", "time", "bad_films")


def differences(kind: str, first: Path, second: Path) -> list[str]:
    """Where two things of one kind differ; empty where they are equal."""
    return _COMPARE[kind](first, second)


def _manifests(first: Path, second: Path) -> list[str]:
    return [] if read_manifest(first).hash == read_manifest(second).hash else ["the table"]


def _files(first: Path, second: Path) -> list[str]:
    if first.is_file():
        return [] if first.read_bytes() == second.read_bytes() else [first.name]
    names = sorted(path.name for path in first.iterdir())
    if names != sorted(path.name for path in second.iterdir()):
        return ["the names of the files"]
    return [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()]


def _packs(first: Path, second: Path) -> list[str]:
    return _manifests(first / "manifest.parquet", second / "manifest.parquet") + [
        name for name in ("images.npy", "pack.json") if (first / name).read_bytes() != (second / name).read_bytes()
    ]


def _runs(first: Path, second: Path) -> list[str]:
    ours, theirs = newest_checkpoint(first), newest_checkpoint(second)
    assert ours is not None and theirs is not None
    if ours.step != theirs.step:
        return [f"step {ours.step} and {theirs.step}"]
    return [
        *_tensors(ours.model_tensors(), theirs.model_tensors()),
        *_tensors(ours.optimizer_tensors(), theirs.optimizer_tensors()),
        *_values(_metrics(first), _metrics(second), "metrics.jsonl"),
        *([] if (first / "films.txt").read_text() == (second / "films.txt").read_text() else ["films.txt"]),
    ]


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not any(word in key for word in _SPEED)} for line in lines]


def _detectors(first: Path, second: Path) -> list[str]:
    found = []
    for file in ("model.safetensors", "detector.safetensors"):
        found += _tensors(load_file(first / file), load_file(second / file))
    return found + _json(first / "detector.json", second / "detector.json")


def _results(first: Path, second: Path) -> list[str]:
    tables = [pd.read_parquet(folder / "predictions.parquet") for folder in (first, second)]
    found = [] if tables[0].equals(tables[1]) else ["predictions.parquet"]
    return found + _json(first / "result.json", second / "result.json")


def _reports(first: Path, second: Path) -> list[str]:
    tables = [pd.read_csv(folder / "results.csv").sort_values("file", ignore_index=True) for folder in (first, second)]
    columns = [name for name in tables[0].columns if "picture" not in name]
    return [name for name in columns if not tables[0][name].equals(tables[1][name])]


def _features(first: Path, second: Path) -> list[str]:
    if first.suffix == ".npz":
        with np.load(first) as ours, np.load(second) as theirs:
            return [name for name in ours.files if name != "about" and not np.array_equal(ours[name], theirs[name])]
    return [] if pd.read_parquet(first).equals(pd.read_parquet(second)) else ["the table"]


def _bundles(first: Path, second: Path) -> list[str]:
    hashes = [json.loads((folder / "manifest.json").read_text())["files"] for folder in (first, second)]
    names = sorted(hashes[0].keys() | hashes[1].keys())
    return [name for name in names if hashes[0].get(name) != hashes[1].get(name)]


def _tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    if ours.keys() != theirs.keys():
        return [f"tensors {sorted(ours.keys() ^ theirs.keys())[:4]}"]
    return [name for name in ours if not torch.equal(ours[name], theirs[name])][:4]


def _json(first: Path, second: Path) -> list[str]:
    return _values(json.loads(first.read_text()), json.loads(second.read_text()), first.name)


def _values(ours: Any, theirs: Any, where: str) -> list[str]:
    """Paths to values that differ, but for times and names."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted((ours.keys() | theirs.keys()) - _OF_THE_MOMENT - _OF_THE_NAME)
        return [path for key in keys for path in _values(ours.get(key), theirs.get(key), f"{where}:{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [path for number, (a, b) in pairs for path in _values(a, b, f"{where}[{number}]")]
    same = ours == theirs or (ours != ours and theirs != theirs)
    return [] if same else [f"{where}: {ours!r} and {theirs!r}"]


_COMPARE: dict[str, Callable[[Path, Path], list[str]]] = {
    "manifest": _manifests,
    "split": _files,
    "pack": _packs,
    "run": _runs,
    "detector": _detectors,
    "result": _results,
    "report": _reports,
    "features": _features,
    "bundle": _bundles,
}

"""What is known about weights besides the numbers in them: the run, its films, its losses, and measured results.

Nothing that names a person, a machine or a path on it goes into a bundle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from afire.errors import UserError
from afire.files import read_json
from afire.tasks.backbone import encoder_hash, run_config_file
from afire.tasks.pretrained import Pretrained
from afire.tasks.results import Result, find_results, read_result
from afire.training.checkpoint import STATE, weights_file
from afire.training.run_folder import DATA, ENVIRONMENT, SUMMARY
from afire.weights.bundle import is_bundle, open_bundle
from afire.weights.hub import local_path

_SUMMARY = ("status", "step", "steps", "epoch", "losses", "health", "parameters", "processes", "bad_films")
_DATA = ("source", "films", "used", "hash")


def source_facts(weights: str | Path) -> dict[str, Any]:
    """Where weights come from: a run's data, counts, end and environment; those of a bundle are passed on."""
    path = local_path(weights)
    if is_bundle(path):
        return dict(open_bundle(path).about["source"])
    settings = run_config_file(path)
    assert settings is not None  # load_pretrained has refused weights alone
    run, state = settings.parent, weights_file(path).parent / STATE
    environment = _optional(run / ENVIRONMENT)
    git = environment.get("git") or {}
    return {
        "run": run.resolve().name,
        "step": _optional(state).get("step"),
        "data": _chosen(_optional(run / DATA), _DATA),
        "summary": _chosen(_optional(run / SUMMARY), _SUMMARY),
        "trained_with": {
            "afire": environment.get("afire"),
            "commit": git.get("commit"),
            "changed": git.get("changed"),
            "torch": (environment.get("packages") or {}).get("torch"),
            "started": environment.get("started"),
        },
    }


def measured(folders: Iterable[Path], pretrained: Pretrained) -> list[dict[str, Any]]:
    """Results in ``folders`` as rows of the card; those of other weights are refused."""
    model = pretrained.model
    own = {pretrained.hash, encoder_hash(model.teacher.encoder), encoder_hash(model.student.encoder)}
    rows = []
    for folder in folders:
        for found in find_results(folder):
            result = read_result(found)
            if result.weights.get("hash") not in own:
                raise UserError(
                    f"the results in {found} were measured with other weights ({result.weights.get('name')}); "
                    "a card quotes only those of the weights in the bundle."
                )
            rows.append(_row(result))
    return rows


def _row(result: Result) -> dict[str, Any]:
    films = result.runs[0].films if result.runs else {}
    return {
        "task": result.task,
        "method": result.method,
        "data": result.data.get("name"),
        "labels": result.labels,
        "fraction": result.fraction,
        "runs": len(result.runs),
        "test_films": films.get("test"),
        "split_hash": result.split_hash,
        "metrics": {
            name: {key: _number(getattr(value, key)) for key in ("mean", "sd", "low", "high")}
            for name, value in result.metrics.items()
        },
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _chosen(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _optional(file: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = read_json(file) if file.is_file() else {}
    return found

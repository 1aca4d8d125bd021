"""The cells of an ablation: one for each different configuration and seed, with a key that says what decides it.

    OUT/study.json             the base settings, the data and the split that all cells share
    OUT/split.json             the parts, the same for every cell
    OUT/cells/NAME-KEY/        one cell: request.json, log.txt, run/, probe/, detection.parquet, and last cell.json

Rows whose settings come out the same share their cells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afire.config import Config
from afire.data.dataset import Films, open_films
from afire.data.splits import Split, write_split
from afire.errors import UserError
from afire.files import read_json, sha256_text, write_json
from afire.studies.ablate_rows import Row
from afire.tasks.features import data_content_hash
from afire.tasks.labels import check_classes, task_labels
from afire.tasks.runs import plan_runs
from afire.training.selection import normal_training_rows

FORMAT = 1
STUDY, SPLIT, CELLS = "study.json", "split.json", "cells"
REQUEST, LOG, RUN, PROBE, DETECTION, CELL = (
    "request.json",
    "log.txt",
    "run",
    "probe",
    "detection.parquet",
    "cell.json",
)
_KEY_LENGTH = 12


@dataclass(frozen=True)
class Study:
    """What all cells of one ablation share."""

    out: Path
    data: Path
    root: Path | None
    base: Config
    split: Split
    labels: list[str]
    identity: dict[str, Any]  # what study.json holds
    builder: str = ""  # the public dataset that the manifest was built from, if it says so

    @property
    def films(self) -> dict[str, int]:
        """Films of each part, and the normal ones that pre-training uses."""
        return dict(self.identity["films"])


@dataclass(frozen=True)
class Cell:
    """One training with its probe and detection: a configuration with its seed, and the rows that share it."""

    key: str
    config: Config
    rows: tuple[str, ...]
    folder: Path

    @property
    def seed(self) -> int:
        """Of pre-training and probe."""
        return self.config.seed

    @property
    def name(self) -> str:
        """For lines and logs."""
        return f"{self.rows[0]}, seed {self.seed}"

    def state(self) -> str:
        """``finished``, ``begun`` or ``to run``."""
        if self.result() is not None:
            return "finished"
        return "begun" if (self.folder / RUN).exists() else "to run"

    def result(self) -> dict[str, Any] | None:
        """What ``cell.json`` holds once the cell is finished, else None; a torn or foreign one is none."""
        try:
            found = read_json(self.folder / CELL)
        except UserError:
            return None
        whole = isinstance(found, dict) and found.get("format") == FORMAT and found.get("key") == self.key
        return found if whole else None


def open_study(
    data: Path,
    out: Path,
    base: Config,
    *,
    root: Path | None = None,
    split: Split | None = None,
    labels: Sequence[str] | None = None,
) -> Study:
    """Look at the films and settle the split; everything that can be refused is refused here, and nothing written."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; --out needs a folder.")
    films = open_films(data, root, base.image.size, base.image.fit, base.image.voi)
    if films.size != base.image.size:
        raise UserError(
            f"the films are {films.size} px, but image.size is {base.image.size}; pack them at that size, or add "
            f"--set image.size={films.size}."
        )
    # One split for all seeds: then a seed changes the pre-training and nothing else, and rows pair up film by film.
    settled = plan_runs(films.manifest, split, [0])[0].split
    parts = settled.rows(films.manifest)
    names, truth = task_labels(films.manifest, labels)
    check_classes(names, truth, parts)
    normal = normal_training_rows(films.manifest, settled)[0]
    detection_rows(films, parts["test"])
    identity = {
        "format": FORMAT,
        "base": base.model_dump(exclude={"seed", "run"}),
        "data": {"name": data.name, "hash": data_content_hash(films), "size": films.size},
        "split": settled.hash,
        "labels": names,
        "films": {"normal": len(normal), **{part: len(rows) for part, rows in parts.items()}},
    }
    builder = str(films.manifest.info.get("builder", ""))
    study = Study(out, data.resolve(), root.resolve() if root else None, base, settled, names, identity, builder)
    _refuse_another(study)
    return study


def begin_study(study: Study) -> None:
    """Write what the cells share."""
    write_split(study.split, study.out / SPLIT)
    write_json(study.out / STUDY, study.identity)


def plan_cells(study: Study, rows: Sequence[Row], seeds: Sequence[int]) -> list[Cell]:
    """The cells of all rows and seeds, seed by seed, each different configuration once."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError("--seeds needs at least one seed, and each only once, as in --seeds 0,1,2.")
    found: dict[str, tuple[Config, list[str]]] = {}
    for seed in seeds:
        for row in rows:
            config = row.config(study.base, seed)
            found.setdefault(_key(study, config), (config, []))[1].append(row.name)
    return [
        Cell(key, config, tuple(names), _folder(study.out, key, f"{names[0]}-seed{config.seed}"))
        for key, (config, names) in found.items()
    ]


def detection_rows(films: Films, test: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Test films known to be normal or not, and whether they are abnormal (N,)."""
    normal = films.manifest.table["normal"].to_numpy(np.float64)[test]
    rows, abnormal = test[~np.isnan(normal)], 1 - normal[~np.isnan(normal)]
    if len(set(abnormal.tolist())) < 2:
        raise UserError("the test part needs films known to be normal and films known not to be, to measure detection.")
    return rows, abnormal


def relative_cost(config: Config) -> float:
    """Training cost of a film against one view of it: forward and backward of each view, one forward of the teacher."""
    return (3 * config.lesions.views + 1) / 4


def _key(study: Study, config: Config) -> str:
    decides = {
        "config": config.model_dump(exclude={"run"}),
        **{name: study.identity[name] for name in ("data", "split", "labels")},
    }
    decides["data"] = {"hash": decides["data"]["hash"]}
    return sha256_text(json.dumps(decides, sort_keys=True))[:_KEY_LENGTH]


def _folder(out: Path, key: str, name: str) -> Path:
    """The cell's folder: the one that carries its key, whichever row it was first run for."""
    existing = sorted((out / CELLS).glob(f"*-{key}"))
    return existing[0] if existing else out / CELLS / f"{name}-{key}"


def _refuse_another(study: Study) -> None:
    """Cells of another base, other films or another split must not stand in one table with these."""
    file = study.out / STUDY
    if not file.exists():
        if (study.out / CELLS).exists():
            raise UserError(f"{study.out} holds cells but no {STUDY}; choose another --out.")
        return
    before = read_json(file)
    if not isinstance(before, dict) or before.get("format") != FORMAT:
        raise UserError(f"{file} is not a study of format {FORMAT}; choose another --out.")
    changes = _differences(before, study.identity)
    if changes:
        more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise UserError(
            f"{study.out} holds an ablation with other settings or data ({'; '.join(changes[:3])}{more}); "
            "repeat its settings, or choose another --out."
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in now.items():
        old = before.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            found += _differences(old, value, f"{prefix}{key}.")
        elif old != value and f"{prefix}{key}" != "data.name":
            name = f"{prefix}{key}".removeprefix("base.")
            found.append(f"{name} was {_short(old)}, is {_short(value)}")
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text

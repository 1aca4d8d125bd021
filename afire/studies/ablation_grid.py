"""The plan of an ablation: rows, which say what changes, and trials, each a row's settings with one seed.

A row is a YAML file with a small header (its title, the tables it belongs to, the paper's numbers) and ``settings``,
which hold only what differs from the base. Those that come with afire lie in ``presets/ablations`` (in a checkout also
seen as ``configs/ablations``). A trial has a key made from everything that decides it; rows whose settings come out the
same share their trials.

    OUT/study.json             the base settings, the data and the split that all trials share
    OUT/split.json             the subsets, the same for every trial
    OUT/trials/NAME-KEY/       one trial: request.json, log.txt, run/, probe/, detection.parquet, and last trial.json
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from afire.config import Config, Section
from afire.data.manifest import task_labels
from afire.data.pack import Films, config_for, open_films
from afire.data.splits import Split, write_split
from afire.errors import UserError
from afire.files import read_json, sha256_text, write_json
from afire.settings import changed, load_settings, validate
from afire.tasks.evaluate import check_classes
from afire.tasks.features import data_content_hash
from afire.tasks.results import plan_runs
from afire.training.batches import normal_training_rows
from afire.training.budget import in_epochs

FOLDER = Path(__file__).parents[1] / "presets" / "ablations"
FULL = "full"
TABLES = {"table1": "Table 1 of the paper", "table4": "Table 4 of the paper", "ours": "Ours"}
ALL = "all"


class Published(Section):
    """The paper's linear probe of ChildCXR, in percent as printed."""

    auc: float = Field(ge=0, le=100)
    accuracy: float = Field(ge=0, le=100)
    f1: float = Field(ge=0, le=100)


class RowFile(Section):
    """What a row's YAML file says."""

    title: str = Field(min_length=1, description="what tables call the row")
    tables: dict[Literal["table1", "table4", "ours"], int] = Field(
        default_factory=dict, description="the tables it belongs to, and its place in each"
    )
    paper: Published | None = Field(None, description="published numbers, if any")
    note: str = Field("", description="what to know when reading its numbers, such as another cost")
    settings: dict[str, Any] = Field(default_factory=dict, description="what differs from the base")


class Row:
    """A row with its name, the stem of its file."""

    def __init__(self, name: str, file: RowFile) -> None:
        self.name, self.title, self.note, self.paper = name, file.title, file.note, file.paper
        self.tables: Mapping[str, int] = {str(table): place for table, place in file.tables.items()}
        self.settings = file.settings

    def config(self, base: Config, seed: int) -> Config:
        """The base with this row's changes and a seed; a change that does not fit is refused with the row's name."""
        try:
            return changed(base, {**self.settings, "seed": seed})
        except UserError as error:
            raise UserError(f"row {self.name}: {error}") from None


def read_row(path: Path) -> Row:
    """Read one row's file."""
    return Row(path.stem, load_settings(RowFile, [path]))


def known_rows() -> dict[str, Row]:
    """The rows that come with afire, in the order of their tables."""
    rows = [read_row(path) for path in sorted(FOLDER.glob("*.yaml"))]
    order = list(TABLES)
    rows.sort(key=lambda row: min((order.index(table), place) for table, place in row.tables.items()))
    return {row.name: row for row in rows}


def choose_rows(text: str) -> list[Row]:
    """``table1``, ``table4``, ``ours``, ``all``, names, YAML files or folders of them, separated by commas.

    The full method is always among them, first: it is what the others are compared with.
    """
    rows_by_name = known_rows()
    selection: dict[str, Row] = {FULL: rows_by_name[FULL]}
    for word in (word.strip() for word in text.split(",")):
        if word:
            selection.update((row.name, row) for row in _rows_of(word, rows_by_name))
    return list(selection.values())


def _rows_of(word: str, rows_by_name: Mapping[str, Row]) -> Iterable[Row]:
    if word == ALL:
        return rows_by_name.values()
    if word in TABLES:
        return sorted((row for row in rows_by_name.values() if word in row.tables), key=lambda row: row.tables[word])
    if word in rows_by_name:
        return [rows_by_name[word]]
    path = Path(word)
    if path.is_dir():
        return _own_rows(sorted(path.glob("*.yaml")), path, rows_by_name)
    if path.suffix in (".yaml", ".yml"):
        return _own_rows([path], path, rows_by_name)
    names = [ALL, *TABLES, *rows_by_name]
    close = difflib.get_close_matches(word, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UserError(f"there is no row {word!r}{hint} (--rows takes {', '.join(names)}, or YAML files).")


def _own_rows(paths: Sequence[Path], source: Path, rows_by_name: Mapping[str, Row]) -> list[Row]:
    """A user's own rows; one with the name of ours but other settings is refused."""
    if not paths:
        raise UserError(f"{source} holds no .yaml file of a row.")
    rows = [read_row(path) for path in paths]
    for row in rows:
        if row.name in rows_by_name and row.settings != rows_by_name[row.name].settings:
            raise UserError(f"{source}: {row.name} is the name of a row of afire with other settings; rename the file.")
    return rows


FORMAT = 1
STUDY, SPLIT, TRIALS = "study.json", "split.json", "trials"
REQUEST, LOG, RUN, PROBE, DETECTION, TRIAL = (
    "request.json",
    "log.txt",
    "run",
    "probe",
    "detection.parquet",
    "trial.json",
)
_OLD_TRIALS, _OLD_TRIAL = "cells", "cell.json"  # what trials were called; such a study is still read and resumed
SCORES = ("gaussian", "surprise", "restoration", "lesion")  # of the detector, those that tables show
MAIN_SCORE = "gaussian"  # what tables call detection: every row has it
DETECTED_BY = "detector"  # the scores are those of `afire detect`; earlier trials, which do not say so, had others
_KEY_LENGTH = 12


@dataclass(frozen=True)
class Study:
    """What all trials of one ablation share."""

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
        """Films of each subset, and the normal ones that pre-training uses."""
        return dict(self.identity["films"])


@dataclass(frozen=True)
class Trial:
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
        """What ``trial.json`` holds once the trial is finished, else None; a truncated or foreign one is none."""
        keys = (self.key, _key_of(self.folder))
        for name in (TRIAL, _OLD_TRIAL):
            with suppress(UserError):
                record = read_json(self.folder / name)
                if isinstance(record, dict) and record.get("format") == FORMAT and record.get("key") in keys:
                    return record
        return None


def open_study(
    data: Path,
    out: Path,
    base: Config,
    *,
    root: Path | None = None,
    split: Split | None = None,
    labels: Sequence[str] | None = None,
) -> Study:
    """Read the films and fix the split; everything that can be refused is refused here, and nothing is written."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; --out needs a folder.")
    base = config_for(base, data)
    films = open_films(data, root, base.image.size, base.image.fit, base.image.voi)
    if films.size != base.image.size:
        raise UserError(
            f"the films are {films.size} px, but image.size is {base.image.size}; pack them at that size, or add "
            f"--set image.size={films.size}."
        )
    # One split for all seeds: then a seed changes the pre-training and nothing else, and rows pair up film by film.
    settled = plan_runs(films.manifest, split, [0])[0].split
    subsets = settled.rows(films.manifest)
    names, truth = task_labels(films.manifest, labels)
    check_classes(names, truth, subsets)
    normal = normal_training_rows(films.manifest, settled)[0]
    base = in_epochs(base, len(normal))
    detection_rows(films, subsets["test"])
    identity = {
        "format": FORMAT,
        "base": base.model_dump(exclude={"seed", "run"}),
        "data": {"name": data.name, "hash": data_content_hash(films), "size": films.size},
        "split": settled.hash,
        "labels": names,
        "films": {"normal": len(normal), **{name: len(rows) for name, rows in subsets.items()}},
    }
    builder = str(films.manifest.info.get("builder", ""))
    study = Study(out, data.resolve(), root.resolve() if root else None, base, settled, names, identity, builder)
    _refuse_another(study)
    return study


def begin_study(study: Study) -> None:
    """Write what the trials share."""
    write_split(study.split, study.out / SPLIT)
    write_json(study.out / STUDY, study.identity)


def plan_trials(study: Study, rows: Sequence[Row], seeds: Sequence[int]) -> list[Trial]:
    """The trials of all rows and seeds, seed by seed, each different configuration once."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError("--seeds needs at least one seed, and each only once, as in --seeds 0,1,2.")
    planned: dict[str, tuple[Config, list[str]]] = {}
    for seed in seeds:
        for row in rows:
            config = row.config(study.base, seed)
            planned.setdefault(_key(study, config), (config, []))[1].append(row.name)
    folders = _folders(study)
    return [
        Trial(key, config, tuple(names), folders.get(key, study.out / TRIALS / f"{names[0]}-seed{config.seed}-{key}"))
        for key, (config, names) in planned.items()
    ]


def detection_rows(films: Films, test: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Test films known to be normal or not, and whether they are abnormal (N,)."""
    normal = films.manifest.table["normal"].to_numpy(np.float64)[test]
    rows, abnormal = test[~np.isnan(normal)], 1 - normal[~np.isnan(normal)]
    if len(set(abnormal.tolist())) < 2:
        raise UserError(
            "the test films must include some known to be normal and some known not to be, to measure detection."
        )
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


def _folders(study: Study) -> dict[str, Path]:
    """The folders of earlier starts by key, whichever row each was first run for.

    The key is computed anew from the settings in the folder: a setting added to afire since then changes the hash of
    an old trial, but not what was trained.
    """
    folders: dict[str, Path] = {}
    for folder in sorted(path for name in (_OLD_TRIALS, TRIALS) for path in (study.out / name).glob("*-*")):
        folders[_key_of(folder)] = folder
        with suppress(UserError, KeyError, TypeError):
            folders[_key(study, validate(read_json(folder / REQUEST)["config"], Config))] = folder
    return folders


def _key_of(folder: Path) -> str:
    return folder.name.rpartition("-")[2]


def _refuse_another(study: Study) -> None:
    """Refuse to mix these trials with those of another base, other films or another split."""
    file = study.out / STUDY
    if not file.exists():
        if any((study.out / name).exists() for name in (TRIALS, _OLD_TRIALS)):
            raise UserError(f"{study.out} holds trials but no {STUDY}; choose another --out.")
        return
    record = read_json(file)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{file} is not a study of format {FORMAT}; choose another --out.")
    changes = _differences({**record, "base": _base(record)}, study.identity)
    if changes:
        suffix = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
        raise UserError(
            f"{study.out} holds an ablation with other settings or data ({'; '.join(changes[:3])}{suffix}); "
            "repeat its settings, or choose another --out."
        )


def _base(record: Mapping[str, Any]) -> Any:
    """The base settings of an earlier start, with settings added since then at their defaults."""
    try:
        return validate(record["base"], Config).model_dump(exclude={"seed", "run"})
    except (KeyError, UserError):
        return record.get("base")


def _differences(earlier: Mapping[str, Any], current: Mapping[str, Any], prefix: str = "") -> list[str]:
    changes = []
    for key, value in current.items():
        earlier_value = earlier.get(key)
        if isinstance(value, Mapping) and isinstance(earlier_value, Mapping):
            changes += _differences(earlier_value, value, f"{prefix}{key}.")
        elif earlier_value != value and f"{prefix}{key}" != "data.name":
            name = f"{prefix}{key}".removeprefix("base.")
            changes.append(f"{name} was {_short(earlier_value)}, is {_short(value)}")
    return changes


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text

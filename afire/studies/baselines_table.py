"""From a study's results to the rows of its table: means over seeds, differences to AFiRe, the paper's numbers, traps.

A difference is tested twice, because the tests ask different things: a paired bootstrap over test patients of the mean
over seeds (would it hold with other patients?) and Welch's t-test over seeds (would it hold with other seeds?).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from afire.errors import UserError
from afire.files import read_json
from afire.studies.ablation_grid import known_rows
from afire.studies.baselines import (
    BESIDE,
    FINETUNE,
    GAUSSIAN,
    KNN,
    PATCHCORE,
    PROBE,
    SEGMENT,
    Baselines,
    By,
    Length,
    Training,
    beside,
    beside_folder,
    folder_of,
    possible_tasks,
    pretrain_name,
)
from afire.studies.baselines_sets import StudySet
from afire.studies.recorded import read_step
from afire.studies.reproduce_sets import column, protocol
from afire.tasks.compare import AllPairs, Comparison, all_pairs, compare
from afire.tasks.results import PREDICTIONS, RESULT, Estimate, read_result
from afire.training.run_folder import CHECKPOINTS, SUMMARY
from afire.training.run_folder import environment as run_environment

REFERENCE = "afire"
START = "imagenet"  # the start itself, where all methods begin with the same weights
FEW_SEEDS = 3
IN_PAPER = {
    "afire": "AFiRe",
    "imagenet": "ViTB",
    "moco": "MoCov2",
    "dino": "DINO",
    "mae": "MAE",
    "c2l": "C2L",
    "genesis": "MG",
    "transvw": "TransVW",
    "dira": "DiRA",
    "pcrl": "PCRL",
    "adam1": "Adamv1",
    "adam2": "Adamv2",
}
"""What the paper's tables call a method."""


@dataclass(frozen=True)
class Against:
    """A row minus the reference in one measure: interval and p over test patients, p over seeds."""

    value: float
    low: float
    high: float
    p_patients: float
    p_seeds: float


@dataclass(frozen=True)
class BaselineRow:
    """One method at one length, or a row beside them. ``measures`` are what :func:`measures_of` names."""

    name: str
    measures: Mapping[str, Estimate]
    against: Mapping[str, Against] = field(default_factory=dict)
    training: Training | None = None
    core_minutes: float = math.nan  # of one pre-training
    health: Sequence[str] = ()  # colour and reason of each seed
    paper: Mapping[str, float] = field(default_factory=dict)
    chosen: Sequence[str] = ()
    gone: Sequence[str] = ()  # of what it rests on: weights, predictions


@dataclass(frozen=True)
class BaselineTable:
    """All rows of one length on one set, the best first, then those beside them."""

    by: By
    length: str
    reference: str
    measures: Mapping[str, str]  # name -> title
    rows: Sequence[BaselineRow]
    pairs: AllPairs | None = None
    films: str = ""  # name of a further set; methods learnt from another one
    protocol: str = ""  # films behind the paper's numbers

    @property
    def name(self) -> str:
        """What files of the table are called."""
        return f"{self.by}-{self.films}" if self.films else self.by

    @property
    def text(self) -> str:
        """Length and set, for people."""
        return f"{self.length}, on {self.films}" if self.films else self.length

    @property
    def main(self) -> str:
        """The measure that rows are sorted by."""
        return next(iter(self.measures))


def measures_of(study: Baselines, films: StudySet) -> dict[str, str]:
    """Measures that the tasks give on these films, by name, with titles; the main one first."""
    shares = sorted(study.fractions, reverse=True)
    titles = {
        PROBE: {f"probe-{share:g}": f"probe {share:g} %" for share in shares},
        KNN: {KNN: "k-NN"},
        FINETUNE: {FINETUNE: "fine-tuned"},
        SEGMENT: {SEGMENT: "Dice"},
        PATCHCORE: {PATCHCORE: "PatchCore"},
        GAUSSIAN: {GAUSSIAN: "Gaussian"},
    }
    return {name: title for task in possible_tasks(study.tasks, films)[0] for name, title in titles[task].items()}


def result_folder(study: Baselines, folder: Path, measure: str) -> Path:
    """Where the result behind a measure lies below the folder of a row."""
    if not measure.startswith(f"{PROBE}-"):
        return folder / measure
    share = measure.partition("-")[2]
    return folder / PROBE / f"{share}pct" if len(study.fractions) > 1 else folder / PROBE


def metric_of(measure: str) -> str:
    return "dice" if measure == SEGMENT else "auc"


def collect(study: Baselines, trainings: Mapping[tuple[By, str], Training]) -> list[BaselineTable]:
    """What is there so far, length by length and set by set."""
    tables = [_table(study, films, length, trainings) for length in study.lengths for films in study.sets]
    return [table for table in tables if table is not None]


def _table(
    study: Baselines, films: StudySet, length: Length, trainings: Mapping[tuple[By, str], Training]
) -> BaselineTable | None:
    measures = measures_of(study, films)
    folders = {method: films.place(folder_of(study, length, method)) for method in study.methods}
    other_folders = {name: films.place(beside_folder(study, name)) for name in beside(films)}
    estimates = {name: _measured(study, folder, measures) for name, folder in {**folders, **other_folders}.items()}
    finished = [method for method in study.methods if estimates[method]]
    if not finished or not measures:
        return None
    preferred = START if study.start_all else REFERENCE
    reference = preferred if preferred in finished else finished[0]
    compared = _compared(study, {**folders, **other_folders}, estimates, reference, measures)
    rows = [
        _row(study, films, length, method, estimates[method], compared.get(method, {}), trainings[length.by, method])
        for method in finished
    ]
    main = next(iter(measures))
    rows.sort(key=lambda row: -row.measures[main].mean if main in row.measures else math.inf)
    rows += [
        BaselineRow(BESIDE[name], estimates[name], compared.get(name, {})) for name in other_folders if estimates[name]
    ]
    pairs = _pairs(study, folders, [row.name for row in rows if row.name in folders], main)
    return BaselineTable(
        length.by, length.text, reference, measures, rows, pairs, films.name, paper_protocol(films.builder)
    )


def _measured(study: Baselines, folder: Path, measures: Mapping[str, str]) -> dict[str, Estimate]:
    estimates = {}
    for measure in measures:
        place = result_folder(study, folder, measure)
        if (place / RESULT).exists():
            result = read_result(place)
            if set(study.seeds) == {run.seed for run in result.runs}:
                estimates[measure] = result.metrics[metric_of(measure)]
    return estimates


def _compared(
    study: Baselines,
    folders: Mapping[str, Path],
    estimates: Mapping[str, Mapping[str, Estimate]],
    reference: str,
    measures: Mapping[str, str],
) -> dict[str, dict[str, Against]]:
    """Every row minus the reference, measure by measure."""
    against: dict[str, dict[str, Against]] = {}
    for measure in measures:
        rows = [name for name in folders if measure in estimates[name] and name != reference]
        if measure not in estimates[reference] or not rows:
            continue
        paths = [result_folder(study, folders[name], measure) for name in (reference, *rows)]
        [comparison] = _compare(paths, measure)
        for name, pair in zip(rows, comparison.pairs, strict=True):
            low, high, p = (
                (pair.paired.low, pair.paired.high, pair.paired.p) if pair.paired is not None else (math.nan,) * 3
            )
            against.setdefault(name, {})[measure] = Against(pair.difference, low, high, p, pair.t.p)
    return against


def _compare(paths: Sequence[Path], measure: str) -> list[Comparison]:
    """Results of one measure; a study that goes on from its records may have no predictions."""
    return compare(paths, metrics=[metric_of(measure)], allow_different_splits=True, need_predictions=False)


def _pairs(study: Baselines, folders: Mapping[str, Path], names: Sequence[str], main: str) -> AllPairs | None:
    """Every method against every other in the main measure, for the figure of p-values."""
    paths = [result_folder(study, folders[name], main) for name in names]
    paths = [path for path in paths if (path / RESULT).exists()]
    if len(paths) < 2:
        return None
    [comparison] = _compare(paths, main)
    return all_pairs(comparison, metric_of(main), need_predictions=False)


def _row(
    study: Baselines,
    films: StudySet,
    length: Length,
    method: str,
    measures: Mapping[str, Estimate],
    against: Mapping[str, Against],
    training: Training,
) -> BaselineRow:
    steps = [read_step(study.out, pretrain_name(length, method, seed)) for seed in study.seeds]
    minutes = [step.processor_seconds / 60 for step in steps if step is not None]
    return BaselineRow(
        method,
        measures,
        against,
        training,
        float(np.mean(minutes)) if minutes else math.nan,
        [text for seed in study.seeds if (text := _health(folder_of(study, length, method) / f"seed-{seed}"))],
        paper_numbers(films.builder, method),
        study.chosen.get(method, ()),
        _gone(study, films, length, method, measures),
    )


def _gone(
    study: Baselines, films: StudySet, length: Length, method: str, measures: Mapping[str, Estimate]
) -> list[str]:
    """What a finished row no longer has, because the study went on from its records."""
    folder = folder_of(study, length, method)
    paths_by_kind = {
        "weights": [folder / f"seed-{seed}" / CHECKPOINTS for seed in study.seeds],
        "predictions": [result_folder(study, films.place(folder), measure) / PREDICTIONS for measure in measures],
    }
    return [kind for kind, paths in paths_by_kind.items() if not all(path.exists() for path in paths)]


def _health(run: Path) -> str:
    try:
        colour, reason = read_json(run / SUMMARY)["health"]
    except (UserError, KeyError, ValueError, TypeError):
        return ""
    return f"{colour}: {reason}"


def paper_numbers(builder: str, method: str) -> dict[str, float]:
    """What the paper prints for a method on this set, as shares of 1, beside the measure that comes nearest."""
    name = IN_PAPER.get(method)
    if name is None:
        return {}
    if builder == "childcxr":
        full = known_rows()["full"].paper
        detection = column("table3", "childcxr")
        assert full is not None and detection is not None
        mine = {"probe-100": full.auc / 100, GAUSSIAN: detection.rows["AFiRe"]["auc"]}
        return mine if method == REFERENCE else {}
    if builder not in ("nih", "chexpert", "siim"):
        return {}
    table = column("table2", builder)
    assert table is not None
    numbers = table.rows.get(name, {})
    return {SEGMENT if builder == "siim" else FINETUNE: numbers["100"]} if "100" in numbers else {}


def paper_protocol(builder: str) -> str:
    """The films that the paper's numbers on this set are from."""
    films = protocol()["films"]
    return str({**films["table3"], **films["table2"]}.get(builder, ""))


BACKBONES = {
    "afire": "ViT-B, 81,117 films of MIMIC-CXR",
    "imagenet": "ViT-B, ImageNet with labels",
    "moco": "pre-trained on ImageNet",
    "dino": "pre-trained on ImageNet",
    "mae": "pre-trained on ImageNet",
    "c2l": "published with ResNet-18 on other radiographs",
    "genesis": "published with a U-Net",
    "transvw": "published with a U-Net",
    "dira": "published with a U-Net on ResNet-50, trained on NIH",
    "pcrl": "published with a U-Net on ResNet-18, trained on NIH",
    "adam1": "published with ResNet-50",
    "adam2": "published with ResNet-50",
}
"""The network and data behind the paper's number of a method, as far as they were published."""


def traps(study: Baselines, tables: Sequence[BaselineTable]) -> list[str]:
    """Warnings about the table."""
    messages = []
    if len(study.seeds) < FEW_SEEDS:
        messages.append(
            f"{len(study.seeds)} seed(s): too few to rank methods; intervals are over test patients and do not know "
            "what another seed would have given"
        )
    lengths = {table.by for table in tables}
    if lengths == {"flops"}:
        messages.append("equal FLOPs are not equal epochs: methods with more networks see each film less often")
    elif lengths == {"epochs"}:
        messages.append("equal epochs are not equal compute: see the TFLOP column")
    messages += [_beaten(table) for table in tables if _beaten(table)]
    if any(films.builder == "childcxr" for films in study.sets):
        messages.append(
            "ChildCXR: the classes differ in the size of the original files, which sharpness keeps after resizing; a "
            "method that beats neither of the rows in italics may have learnt no more than that. Draw no conclusion "
            "from this set alone"
        )
    if not study.chosen:
        messages.append(
            "no search: every method runs with the learning rate of the preset (--search tries three of each)"
        )
    if any(row.paper for table in tables for row in table.rows):
        messages.append(
            "the paper's numbers are of other trunks, films, lengths and protocols, most of them borrowed from other "
            "papers: read them beside ours, not against ours"
        )
    messages += [message for table in tables for message in _from_records(table)]
    for table in tables:
        for row in table.rows:
            messages += [f"{row.name}, {table.length}: {health}" for health in row.health if health.startswith("red")]
    return list(dict.fromkeys(messages))


def _from_records(table: BaselineTable) -> list[str]:
    """Notes on rows that come from records of an earlier start."""
    meanings = {
        "weights": "from the records of an earlier sitting, their weights are gone",
        "predictions": "without predictions of every task, so not every difference has a test over patients",
    }
    rows = {kind: [row.name for row in table.rows if kind in row.gone] for kind in meanings}
    return [f"{table.text}: {meaning}: {', '.join(rows[kind])}" for kind, meaning in meanings.items() if rows[kind]]


def _beaten(table: BaselineTable) -> str:
    """Methods that are no better in the main measure than the best row beside them."""
    ours = [row for row in table.rows if row.training is not None and table.main in row.measures]
    rivals = [row for row in table.rows if row.training is None and table.main in row.measures]
    if not rivals:
        return ""
    bar = max(rivals, key=lambda row: row.measures[table.main].mean)
    below = [row.name for row in ours if row.measures[table.main].mean <= bar.measures[table.main].mean]
    if not below:
        return ""
    return (
        f"{table.text}: not above {bar.name} ({bar.measures[table.main].mean:.3f}) in {table.measures[table.main]}: "
        f"{', '.join(below)}"
    )


def facts(study: Baselines) -> dict[str, str]:
    """The facts above the table: films, length, settings, machine."""
    environment = run_environment()
    films = study.films
    search_settings = "; ".join(f"{method}: {', '.join(settings)}" for method, settings in study.chosen.items())
    own_settings = "; ".join(f"{method}: {' '.join(settings)}" for method, settings in study.own.items())
    return {
        "films": f"{films.data.name}: {films.normals:,} normal training films of {films.size} px for all methods",
        **({"also tested on": ", ".join(further.name for further in study.also)} if study.also else {}),
        "labels": study.labels,
        "length": " and ".join(length.text for length in study.lengths),
        "seeds": ", ".join(map(str, study.seeds)),
        **({"start": f"all methods from {Path(study.start).name}"} if study.start and study.start_all else {}),
        "settings": f"preset {study.preset}; {own_settings or 'defaults'}",
        "chosen by the search": search_settings or "no search",
        "machine": f"{environment['system']}, {environment['cores']} cores, torch {environment['packages']['torch']}",
        "command": f"`{' '.join(environment['command'])}`",
    }

"""An equal search before methods are compared: three learning rates and two values of one own setting for each.

Every method gets the same number of short pre-trainings on a development split, which has no test film in it, and the
settings with the best linear probe on its held-out films are used afterwards. What was tried is kept, and shown.

OUT/search/split.json             drawn from the training and validation patients of the study's split
OUT/search/METHOD/TRIAL/run       a short pre-training, and beside it its probe
OUT/search.json                   every trial with its AUC, and what was chosen
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from afire.data.pack import open_films
from afire.data.splits import development_split, read_split, write_split
from afire.errors import UserError
from afire.files import write_json
from afire.methods import method_type
from afire.studies.baselines import (
    PROBE,
    Baselines,
    Length,
    method_config,
    method_settings,
    plan_training,
    pretrain_step,
    probed_vector,
    starts,
)
from afire.studies.recorded import PlannedStep
from afire.tasks.results import RESULT, read_result
from afire.training.batches import labelled_training_rows, normal_training_rows

FOLDER, RECORD = "search", "search.json"
RATES = (1 / 3, 1.0, 3.0)
"""Factors on the learning rate of the preset."""
OWN: Mapping[str, tuple[str, float, float]] = {
    "afire": ("losses.temperature", 1.0, 0.3),
    "mae": ("options.mask_ratio", 0.75, 0.6),
    "moco": ("options.temperature", 0.2, 0.1),
    "dino": ("options.teacher_temperature", 0.04, 0.07),
    "c2l": ("options.temperature", 0.07, 0.2),
    "pcl": ("options.temperature", 0.2, 0.1),
    "genesis": ("options.paint", 0.9, 0.5),
    "transvw": ("options.classification", 0.01, 0.1),
    "dira": ("options.restorative", 10.0, 1.0),
    "pcrl": ("options.preservational", 1.0, 10.0),
    "adam1": ("options.temperature", 0.2, 0.1),
    "adam2": ("options.teacher_temperature", 0.04, 0.07),
    "supervised": ("encoder.drop_path", 0.0, 0.1),
    "phantom": ("options.findings", 2.0, 0.5),
}
"""The setting of a method's own that is searched, and the two values, its default first."""


@dataclass(frozen=True)
class Choice:
    """One trial of a search: its settings, and the AUC on development films once it has run."""

    method: str
    name: str
    words: tuple[str, ...]
    auc: float | None = None


def development(study: Baselines) -> Baselines:
    """The study on development films alone: another split, fewer normal films."""
    films = study.films
    manifest = open_films(films.data, size=films.size).manifest
    parent = read_split(films.split) if films.split is not None else None
    split = development_split(manifest, of=parent)
    path = study.out / FOLDER / "split.json"
    if not path.exists():
        write_split(split, path)
    (normals, _), (labelled, _) = (choose(manifest, split) for choose in (normal_training_rows, labelled_training_rows))
    return replace(study, films=replace(films, split=path, normals=len(normals), labelled=len(labelled)))


def searched_methods(study: Baselines) -> list[str]:
    """Methods that are trained here; others have nothing to choose."""
    return [method for method in study.methods if method_type(method).trains]


def plan_choices(study: Baselines, method: str) -> list[Choice]:
    """Every pair of a learning rate and a value of the method's own setting, where it has one."""
    rate = method_config(study, method, method_settings(study, method)).training.learning_rate
    key, *values = OWN.get(method, ("",))
    own_settings = [f"{key}={value:g}" for value in values] or [""]
    return [
        Choice(
            method,
            f"rate-{place}" + (f"-own-{own_settings.index(setting)}" if setting else ""),
            (f"training.learning_rate={rate * factor:.6g}", *((setting,) if setting else ())),
        )
        for (place, factor), setting in product(enumerate(RATES), own_settings)
    ]


def search_steps(study: Baselines, length: Length, machine: Sequence[str] = ()) -> list[PlannedStep]:
    """Pre-training and probe of every trial of every method; ``study`` is the one of :func:`development`."""
    return [
        step
        for method in searched_methods(study)
        for choice in plan_choices(study, method)
        for step in _trial_steps(study, length, choice, machine)
    ]


def _trial_steps(study: Baselines, length: Length, choice: Choice, machine: Sequence[str]) -> Iterator[PlannedStep]:
    folder, name = _folder(study, choice), f"search-{choice.method}-{choice.name}"
    films, seed = study.films, study.seeds[0]
    settings = plan_training(study, choice.method, length, choice.words).words
    out, start = folder / "run", study.start if starts(study, choice.method) else None
    yield pretrain_step(name, films, out, choice.method, seed, study.preset, settings, machine, films.split, start)
    command = [
        *("probe", "--weights", str(folder / "run"), "--data", str(films.data), "--split", str(films.split)),
        *("--labels", study.labels, "--seeds", str(seed), "--name", f"{choice.method} {choice.name}", "--no-cache"),
        *probed_vector(study, choice.method),
        *("--out", str(folder / PROBE), "--force", "--quiet"),
    ]
    makes = folder / PROBE / RESULT
    yield PlannedStep(
        f"{name}-probe", tuple(command), (name,), makes=makes, inputs=films.inputs, machine=tuple(machine)
    )


def _folder(study: Baselines, choice: Choice) -> Path:
    return study.out / FOLDER / choice.method / choice.name


def choose(study: Baselines, length: Length) -> tuple[dict[str, tuple[str, ...]], list[Choice]]:
    """The best settings of each method by the AUC on development films, and all trials; written to ``search.json``.

    Of equals the first wins. A method without a finished trial is refused: it would be compared unsearched.
    """
    best: dict[str, tuple[str, ...]] = {}
    all_trials: list[Choice] = []
    for method in searched_methods(study):
        trials = [replace(choice, auc=_auc(_folder(study, choice) / PROBE)) for choice in plan_choices(study, method)]
        finished = [trial for trial in trials if trial.auc is not None]
        if not finished:
            raise UserError(f"no trial of the search for {method} has finished; run the same command again.")
        all_trials += trials
        best[method] = max(finished, key=lambda trial: trial.auc or 0.0).words
    record: Mapping[str, object] = {
        "films": "development films of the training and validation patients; no test film",
        "length": length.text,
        "seed": study.seeds[0],
        "trials": [asdict(trial) for trial in all_trials],
        "chosen": {method: list(settings) for method, settings in best.items()},
    }
    write_json(study.out / RECORD, record)
    return best, all_trials


def _auc(folder: Path) -> float | None:
    return read_result(folder).metrics["auc"].mean if (folder / RESULT).exists() else None

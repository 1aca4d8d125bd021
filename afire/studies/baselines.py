"""Pre-training methods side by side: one trunk, the same films, an equal budget, and everything that follows.

The budget is counted: floating-point operations of a pre-training, the same for all methods; each trains as many epochs
as fit into it. Beside it, or instead, all train for the same epochs. Every pre-training and every task is an `afire`
command in a process of its own (:mod:`afire.studies.recorded`), so a study that was killed goes on where it was. Test
films are looked at last: after all pre-trainings, and after a search, which sees development films only.

OUT/split.json                        where a set has no lists of its own
OUT/search/...                        the search (:mod:`afire.studies.baselines_search`)
OUT/LENGTH/METHOD/seed-N              pre-trainings; LENGTH is flops or epochs
OUT/LENGTH/METHOD/TASK                results over all seeds
OUT/LENGTH/METHOD/also/SET/TASK       the same on a further set, from the same weights
OUT/beside/NAME/TASK                  rows that need no pre-training: random weights, trivial ones

Weights are needed until the tasks of their method are done; after that the study goes on from its records
(docs/baselines.md says which files), so that it may take longer than one sitting on machines that keep nothing large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from afire.config import Config
from afire.detect.base import SETTINGS
from afire.errors import UserError
from afire.methods import METHODS, make_method, method_type, unread
from afire.methods.base import count_parameters
from afire.nn.residual import PATCH
from afire.settings import load_config, validate
from afire.studies.baselines_sets import ALSO, StudySet
from afire.studies.recorded import PlannedStep
from afire.tasks.results import RESULT
from afire.training.run_folder import CHECKPOINTS, CONFIG
from afire.weights import RANDOM
from afire.weights.hub import BUILTIN
from afire.weights.lite0 import LITE0, lite0_file
from afire.weights.open import SEED

By = Literal["flops", "epochs"]
TERA = 1e12
PROBE, KNN, FINETUNE, SEGMENT, PATCHCORE, GAUSSIAN = "probe", "knn", "finetune", "segment", "patchcore", "gaussian"
TASKS = (PROBE, KNN, FINETUNE, SEGMENT, PATCHCORE, GAUSSIAN)
DETECTING = {
    PATCHCORE: ("--method", "patchcore"),
    # The Gaussian of every place's tokens, of the networks as they were exported.
    GAUSSIAN: ("--method", "afire", "--set", "score=gaussian", "--set", "adapt.epochs=0"),
}
BESIDE = {
    RANDOM: "random weights",
    BUILTIN: "network of the built-in detector",
    LITE0: "EfficientNet-Lite0, ImageNet",
    "area": "original area only",
    "sharpness": "sharpness only",
    "edge": "edge of the film only",
}
"""Rows that need no pre-training, as `afire probe --weights` takes them, and what tables call them."""


@dataclass(frozen=True)
class Length:
    """How long all methods train: the same counted ``tera_flops``, or the same number of epochs."""

    by: By
    amount: float

    @property
    def text(self) -> str:
        unit = "TFLOP" if self.by == "flops" else "epoch" if self.amount == 1 else "epochs"
        return f"{self.amount:g} {unit} each"


@dataclass(frozen=True)
class Baselines:
    """What is compared, and by what."""

    out: Path
    films: StudySet
    methods: Sequence[str]
    seeds: Sequence[int]
    lengths: Sequence[Length]
    tasks: Sequence[str] = TASKS
    labels: str = "abnormal"
    fractions: Sequence[float] = (1, 10, 100)  # percent of the labels, of the linear probe
    preset: str = "small"
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)  # --set arguments by command
    own: Mapping[str, Sequence[str]] = field(default_factory=dict)  # --set arguments by method
    chosen: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by a search, by method
    start: str | None = None  # weights of rows that are not trained here
    start_all: bool = False  # and of all others, which train on from them
    weights_settings: Mapping[str, Any] = field(default_factory=dict)  # settings that come with the weights
    in_turn: bool = False  # a method's tasks before the next method's pre-training
    also: Sequence[StudySet] = ()  # further sets, on which the same weights are measured

    @property
    def sets(self) -> tuple[StudySet, ...]:
        """All sets that are tested on; methods learn from the first."""
        return (self.films, *self.also)


def parse_names(text: str, choices: Sequence[str], option: str) -> list[str]:
    """``all``, or names separated by commas, each of them one of ``choices``."""
    if text.strip() == "all":
        return list(choices)
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    wrong = [name for name in names if name not in choices]
    if wrong or not names:
        problem = f"knows no {wrong[0]!r}" if wrong else "names none"
        raise UserError(f"{option} {problem}; it takes all, or some of {', '.join(choices)}.")
    return names


def possible_methods(text: str, start: str | None) -> tuple[list[str], list[str]]:
    """The methods asked for, and messages about those that are left out: without weights, a row that learns nothing."""
    names = parse_names(text, list(METHODS), "--methods")
    needy = [name for name in names if not method_type(name).trains] if start is None else []
    if needy and text.strip() != "all":
        raise UserError(f"the row {needy[0]} learns nothing by itself; give its weights with --init FILE.")
    left_out = [f"{name} is left out: it needs weights, --init FILE" for name in needy]
    return [name for name in names if name not in needy], left_out


def possible_tasks(tasks: Sequence[str], films: StudySet) -> tuple[list[str], list[str]]:
    """The tasks that the films allow, and messages about the others."""
    which = f"the films of {films.name}" if films.name else "the films"
    left_out = [f"{SEGMENT} is left out: {which} have no masks"] if SEGMENT in tasks and not films.masks else []
    return [task for task in tasks if task != SEGMENT or films.masks], left_out


@dataclass(frozen=True)
class Training:
    """One method's pre-training: how long, at which cost, and its ``--set`` settings."""

    epochs: int
    films: int  # of an epoch
    flops: float  # of all epochs
    parameters: int  # that are trained
    words: tuple[str, ...]  # the key of baselines.json

    @property
    def tera_flops(self) -> float:
        return self.flops / TERA


def plan_training(study: Baselines, method: str, length: Length, extra: Sequence[str] = ()) -> Training:
    """As many epochs as the length allows, at least one. The warm-up keeps its share of the preset's epochs."""
    settings = [*method_settings(study, method), *study.chosen.get(method, ()), *extra]
    config = method_config(study, method, settings)
    model = make_method(config)
    model.hold_blocks()  # which are not trained, and not counted
    if not model.trains:
        return Training(0, 0, 0.0, 0, tuple(settings))
    films = study.films.labelled if model.learns_from_labels else study.films.normals
    per_epoch = model.flops() * films
    epochs = round(length.amount * TERA / per_epoch) if length.by == "flops" else round(length.amount)
    epochs = max(1, epochs)
    recipe = config.training
    warmup = round(min(recipe.warmup_epochs / recipe.epochs, 0.5) * epochs, 3)
    settings += [f"training.epochs={epochs}", f"training.warmup_epochs={warmup:g}"]
    return Training(epochs, films, epochs * per_epoch, count_parameters(model)["trained"], tuple(settings))


def method_settings(study: Baselines, method: str) -> list[str]:
    """``--set`` settings of a method: those of all pre-trainings whose group it reads, then its own."""
    foreign = unread(method)
    shared = [
        setting
        for setting in study.settings.get("pretrain", ())
        if setting.partition("=")[0].split(".")[0] not in foreign
    ]
    labels = [f"options.labels=[{study.labels}]"] if method_type(method).learns_from_labels else []
    return [f"image.size={study.films.size}", *shared, *labels, *study.own.get(method, ())]


def method_config(study: Baselines, method: str, settings: Sequence[str]) -> Config:
    """The settings of a pre-training."""
    weights_settings = study.weights_settings if starts(study, method) else {}
    return load_config(study.preset, None, [f"method={method}", *settings], weights_settings)


def probed_vector(study: Baselines, method: str) -> list[str]:
    """Arguments of a probe: the vector that stands for a film in the method's own loss, else the mean token."""
    options = method_config(study, method, method_settings(study, method)).options
    pool = getattr(validate(options, method_type(method).settings_type), "pool", "mean")
    return ["--pool", pool] if pool != "mean" else []


def starts(study: Baselines, method: str) -> bool:
    """Whether a method's pre-training begins with the weights of the study, and not at random."""
    return study.start is not None and (study.start_all or not method_type(method).trains)


def folder_of(study: Baselines, length: Length, method: str) -> Path:
    """Everything of one method at one length."""
    return study.out / length.by / method


def beside_folder(study: Baselines, name: str) -> Path:
    """Everything of a row without a pre-training."""
    return study.out / "beside" / name


def pretrain_name(length: Length, method: str, seed: int) -> str:
    return f"{length.by}-{method}-{seed}"


def plan_steps(
    study: Baselines, trainings: Mapping[tuple[By, str], Training], machine: Sequence[str] = ()
) -> list[PlannedStep]:
    """Pre-trainings seed by seed through all methods, so that a study stopped early has all rows; then tasks.

    In turn: everything of one method, then everything of the next, so that a study stopped early has whole rows.
    """
    groups = [[method] for method in study.methods] if study.in_turn else [list(study.methods)]
    steps: list[PlannedStep] = []
    for methods in groups:
        steps += (
            _pretrain_step(study, length, method, seed, trainings[length.by, method], machine)
            for seed in study.seeds
            for length in study.lengths
            for method in methods
        )
        if methods is groups[0]:
            steps += (
                step
                for films in study.sets
                for name in beside(films)
                for step in _beside_steps(study, films, name, machine)
            )
        steps += (
            step
            for length in study.lengths
            for method in methods
            for films in study.sets
            for task in possible_tasks(study.tasks, films)[0]
            for step in _task_steps(study, length, method, films, task, machine)
        )
    return steps


def beside(films: StudySet) -> list[str]:
    """Rows without a pre-training that the films allow."""
    needs = {
        "area": films.areas,
        BUILTIN: films.size % PATCH == 0,
        LITE0: lite0_file() is not None,
    }
    return [name for name in BESIDE if needs.get(name, True)]


def pretrain_step(
    name: str,
    films: StudySet,
    out: Path,
    method: str,
    seed: int,
    preset: str,
    settings: Sequence[str],
    machine: Sequence[str],
    split: Path | None,
    start: str | None = None,
) -> PlannedStep:
    """One pre-training; begun again it resumes."""
    paths = (films.data, split, Path(start) if start is not None else None)
    inputs = tuple(path for path in paths if path is not None and path.exists())
    command = [
        *("pretrain", "--method", method, "--data", str(films.data), "--out", str(out), "--seed", str(seed)),
        *("--preset", preset),
        *(("--split", str(split)) if split is not None else ()),
        *(("--init", start) if start is not None else ()),
        *(argument for setting in settings for argument in ("--set", setting)),
        *("--set", "run.picture_epochs=0", "--set", "run.keep_checkpoints=1", "--quiet"),
    ]
    return PlannedStep(
        name,
        tuple(command),
        resume=("--resume",),
        resume_when=out / CONFIG,
        makes=out / CHECKPOINTS,
        inputs=inputs,
        machine=tuple(machine),
    )


def _pretrain_step(
    study: Baselines, length: Length, method: str, seed: int, training: Training, machine: Sequence[str]
) -> PlannedStep:
    name, out = pretrain_name(length, method, seed), folder_of(study, length, method) / f"seed-{seed}"
    films, start = study.films, study.start if starts(study, method) else None
    return pretrain_step(name, films, out, method, seed, study.preset, training.words, machine, films.split, start)


def _task_steps(
    study: Baselines, length: Length, method: str, films: StudySet, task: str, machine: Sequence[str]
) -> Iterator[PlannedStep]:
    runs = folder_of(study, length, method)
    folder, name = films.place(runs), _step_name(f"{length.by}-{method}", films, task)
    needs = tuple(pretrain_name(length, method, seed) for seed in study.seeds)
    if task in DETECTING:
        yield from _detection_steps(study, films, name, runs, folder, task, method, machine, needs)
    else:
        weights = str(runs / f"seed-{SEED}")
        vector = probed_vector(study, method) if task in (PROBE, KNN) else ()
        yield _learning_step(study, films, name, folder / task, task, weights, method, machine, needs, vector)


def _step_name(row: str, films: StudySet, task: str) -> str:
    return "-".join([row, *([ALSO, films.name] if films.name else []), task])


def _beside_steps(study: Baselines, films: StudySet, name: str, machine: Sequence[str]) -> Iterator[PlannedStep]:
    """The probes of a row without a pre-training; networks are probed by both kinds."""
    for task in study.tasks:
        if task == PROBE or (task == KNN and name in (RANDOM, BUILTIN, LITE0)):
            out = films.place(beside_folder(study, name)) / task
            step = _step_name(f"beside-{name}", films, task)
            yield _learning_step(study, films, step, out, task, name, BESIDE[name], machine, ())


def _learning_step(
    study: Baselines,
    films: StudySet,
    name: str,
    out: Path,
    task: str,
    weights: str,
    row: str,
    machine: Sequence[str],
    needs: tuple[str, ...],
    vector: Sequence[str] = (),
) -> PlannedStep:
    """A probe, a fine-tuning or a segmentation over all seeds. Seeds may be added: a probe is cheap and made anew,
    the others go on with the seeds they have."""
    probing = task in (PROBE, KNN)
    command = [
        *("probe" if probing else task, "--weights", weights, "--data", str(films.data), "--out", str(out)),
        *("--seeds", ",".join(map(str, study.seeds)), "--name", row),
        *(("--split", str(films.split)) if films.split is not None else ()),
        *(("--labels", study.labels) if task != SEGMENT else ()),
        *(("--fraction", ",".join(f"{share:g}" for share in study.fractions)) if task == PROBE else ()),
        *(("--method", "knn") if task == KNN else ()),
        *vector,
        *(("--preset", study.preset, "--set", f"image.size={films.size}") if weights == RANDOM else ()),
        *(("--overlays", "0") if task == SEGMENT else ()),
        *(argument for setting in study.settings.get(task, ()) for argument in ("--set", setting)),
        *(
            argument
            for setting in (_of_networks(study) if weights == RANDOM else ())
            for argument in ("--set", setting)
        ),
        *("--force" if probing else "--resume", "--quiet"),
    ]
    several = task == PROBE and len(study.fractions) > 1
    makes = out / (f"{study.fractions[0]:g}pct" if several else "") / RESULT
    name += _seeds(study)
    return PlannedStep(name, tuple(command), needs, makes=makes, inputs=films.inputs, machine=tuple(machine))


def _seeds(study: Baselines) -> str:
    """Behind the name of a step over all seeds: with another seed it is another step."""
    return "".join(f"-{seed}" for seed in study.seeds)


def _of_networks(study: Baselines) -> list[str]:
    """Of the shared settings, those of the trunk, for random weights; where all start from weights, of their trunk."""
    from_weights = [
        f"{group}.{name}={'null' if value is None else value}"
        for group, values in (study.weights_settings if study.start_all else {}).items()
        for name, value in values.items()
        if (group, name) != ("image", "size")
    ]
    shared = [
        setting for setting in study.settings.get("pretrain", ()) if setting.split(".")[0] in ("image", "encoder")
    ]
    return [*from_weights, *shared]


def _detection_steps(
    study: Baselines,
    films: StudySet,
    name: str,
    runs: Path,
    folder: Path,
    task: str,
    row: str,
    machine: Sequence[str],
    needs: tuple[str, ...],
) -> Iterator[PlannedStep]:
    """A detector of each seed's exported tokens, then all of them as one row."""
    models = {seed: folder / f"{task}-{seed}" for seed in study.seeds}
    shared = (*("--data", str(films.data)), *(("--split", str(films.split)) if films.split is not None else ()))
    for seed, model in models.items():
        command = [
            *("detect", "fit", *DETECTING[task], "--weights", str(runs / f"seed-{seed}"), *shared),
            *("--seed", str(seed), "--out", str(model)),
            *(argument for setting in study.settings.get("detect", ()) for argument in ("--set", setting)),
            "--quiet",
        ]
        yield PlannedStep(
            f"{name}-{seed}",
            tuple(command),
            tuple(need for need in needs if need.endswith(f"-{seed}")),
            ("--resume",),
            complete=model / SETTINGS,
            makes=model / SETTINGS,
            inputs=films.inputs,
            machine=tuple(machine),
        )
    model_arguments = [argument for model in models.values() for argument in ("--model", str(model))]
    command = [
        "detect",
        "eval",
        *model_arguments,
        *shared,
        "--name",
        row,
        "--out",
        str(folder / task),
        "--force",
        "--quiet",
    ]
    of_fits = tuple(f"{name}-{seed}" for seed in models)
    makes = folder / task / RESULT
    name += f"-eval{_seeds(study)}"
    yield PlannedStep(name, tuple(command), of_fits, makes=makes, inputs=films.inputs, machine=tuple(machine))

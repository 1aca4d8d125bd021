"""Detectors side by side: every method fitted with several seeds on several sets of films, at an equal budget.

The budget is counted: floating-point operations of a training, the same for all methods; each trains as many epochs as
fit into it. ``published`` trains each for the epochs of its paper instead. Every fit and every evaluation is an `afire`
command in a process of its own (:mod:`afire.studies.recorded`), so a bench that was killed goes on where it was.

OUT/SET/split.json              where a set has no lists of its own
OUT/SET/METHOD/seed-N           detectors
OUT/SET/METHOD/result           their evaluation; OUT/SET/METHOD/balanced with views balanced, where there are two
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from afire.data.pack import open_films
from afire.data.splits import write_split
from afire.detect import DETECTORS
from afire.detect.base import SETTINGS
from afire.detect.fit import detect_settings, detection_subsets, networks_for
from afire.detect.protocol import plan_test, views_of
from afire.errors import UserError
from afire.files import read_json
from afire.studies.recorded import PlannedStep, read_step
from afire.tasks.results import RESULT
from afire.training.run_folder import environment as run_environment
from afire.weights import RANDOM

Length = Literal["equal", "published"]
NUMBERS = "detect.json"
SPLIT = "split.json"
PLAIN, BALANCED = "result", "balanced"
_TERA = 1e12
_FEWEST_OF_A_VIEW = 10


@dataclass(frozen=True)
class BenchSet:
    """A set of films: a pack or a manifest, and the split that its detectors are fitted and tested with."""

    name: str
    data: Path
    split: Path | None = None  # None: the set's own lists
    fit_films: int = 0
    size: int = 128
    two_views: bool = False


@dataclass(frozen=True)
class Bench:
    """What is compared: methods, seeds and sets, and how long each may train."""

    out: Path
    sets: Sequence[BenchSet]
    methods: Sequence[str]
    seeds: Sequence[int]
    tera_flops: float = 10.0
    length: Length = "equal"
    weights: str = RANDOM  # of detectors that start from some
    preset: str = "small"  # of random weights
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)  # --set words by method


def parse_methods(text: str) -> list[str]:
    """``all``, or names separated by commas."""
    if text.strip() == "all":
        return list(DETECTORS)
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        DETECTORS[name]  # a message names those there are
    if not names:
        raise UserError(f"--methods names none; methods are all, {', '.join(DETECTORS)}.")
    return names


def settings_by_method(overrides: Sequence[str], methods: Sequence[str]) -> dict[str, list[str]]:
    """``METHOD.key=value`` words -> ``key=value`` words by method."""
    found: dict[str, list[str]] = {}
    for override in overrides:
        method, dot, word = override.strip().partition(".")
        if not dot or method not in methods:
            raise UserError(f"--with {override}: begin with one of the methods of this bench: {', '.join(methods)}.")
        found.setdefault(method, []).append(word)
    return found


def facts(bench: Bench) -> dict[str, str]:
    """What the tables must be read with."""
    environment = run_environment()
    long = f"{bench.tera_flops:g} TFLOP each" if bench.length == "equal" else "each for the epochs of its paper"
    return {
        "training": long,
        "seeds": ", ".join(map(str, bench.seeds)),
        "weights": f"{bench.weights}" + (f", preset {bench.preset}" if bench.weights == RANDOM else ""),
        "settings": "; ".join(f"{method}: {' '.join(words)}" for method, words in bench.settings.items()) or "defaults",
        "machine": f"{environment['system']}, {environment['cores']} cores, torch {environment['packages']['torch']}",
        "command": f"`{' '.join(environment['command'])}`",
    }


def open_set(text: str, out: Path, size: int = 128) -> BenchSet:
    """``NAME=PATH``, or a path whose last name is the set's; what must be known of it to plan.

    A set without lists gets a split of ours, drawn with seed 0 and kept in ``out``, so that fits know what to leave
    for the test.
    """
    name, equals, path = text.partition("=")
    data = Path(path if equals else text)
    name = name if equals else data.resolve().stem
    if not data.exists():
        raise UserError(f"--data {text}: {data} does not exist; give a pack or a manifest, as NAME=PATH or PATH.")
    films = open_films(data, size=size)
    test = plan_test(films.manifest)
    split = out / name / SPLIT if test.split is not None else None
    if split is not None and test.split is not None and not split.exists():
        write_split(test.split, split)
    views = views_of(films.manifest, test.rows)
    counts = [int((views[test.truth == value] == view).sum()) for value in (0, 1) for view in ("AP", "PA")]
    fit = detection_subsets(films.manifest, test.split, 0).fit
    return BenchSet(name, data, split, len(fit), films.size, min(counts) >= _FEWEST_OF_A_VIEW)


@dataclass(frozen=True)
class Fit:
    """How long one method trains on one set: epochs (None: it does not train) and counted FLOPs in all."""

    epochs: int | None
    flops: float


def plan_fit(bench: Bench, films: BenchSet, method: str) -> Fit:
    """As many epochs as the budget allows, at least one; or those of the method's paper."""
    kind = DETECTORS[method]
    if _length(bench, method) is None:
        return Fit(None, 0.0)
    own, of_networks = _sorted(bench, method)
    networks = networks_for(
        method,
        _weights(bench, method),
        films.data,
        _preset(bench, method),
        overrides=[*_size(bench, method, films), *of_networks],
    )
    settings = detect_settings(own, method)
    per_epoch = kind.training_flops(networks.config, settings) * films.fit_films
    published = getattr(kind, "published_epochs", None)
    if bench.length == "published":
        epochs = published if published is not None else networks.config.training.epochs
    else:
        epochs = max(1, round(bench.tera_flops * _TERA / per_epoch))
    return Fit(epochs, epochs * per_epoch)


def _sorted(bench: Bench, method: str) -> tuple[list[str], list[str]]:
    """``--set`` words of the detector and of its networks."""
    fields = DETECTORS[method].Settings.model_fields
    words = list(bench.settings.get(method, ()))
    own = [word for word in words if word.partition("=")[0].split(".")[0] in fields]
    return own, [word for word in words if word not in own]


def _length(bench: Bench, method: str) -> str | None:
    """The setting that says how long a method trains."""
    length: str | None = DETECTORS[method].length(pretrained=_weights(bench, method) not in (None, RANDOM))
    return length


def _weights(bench: Bench, method: str) -> str | None:
    return None if DETECTORS[method].takes == "nothing" else bench.weights


def _preset(bench: Bench, method: str) -> str | None:
    return bench.preset if _weights(bench, method) == RANDOM else None


def _size(bench: Bench, method: str, films: BenchSet) -> list[str]:
    """What must be said of the networks' input: nothing where the weights bring it."""
    return [] if _weights(bench, method) not in (None, RANDOM) else [f"image.size={films.size}"]


def plan_steps(bench: Bench, fits: Mapping[tuple[str, str], Fit], machine: Sequence[str] = ()) -> list[PlannedStep]:
    """Fits seed by seed through all methods, so that a bench that is stopped early has all rows; then evaluations."""
    return [
        *(
            _fit_step(bench, films, method, seed, fits[films.name, method], machine)
            for seed in bench.seeds
            for films in bench.sets
            for method in bench.methods
        ),
        *(
            step
            for films in bench.sets
            for method in bench.methods
            for step in _evaluation_steps(bench, films, method, machine)
        ),
    ]


def fit_name(films: BenchSet, method: str, seed: int) -> str:
    return f"{films.name}-{method}-{seed}"


def model_folder(bench: Bench, films: BenchSet, method: str, seed: int) -> Path:
    return bench.out / films.name / method / f"seed-{seed}"


def _fit_step(bench: Bench, films: BenchSet, method: str, seed: int, fit: Fit, machine: Sequence[str]) -> PlannedStep:
    folder = model_folder(bench, films, method, seed)
    weights, preset = _weights(bench, method), _preset(bench, method)
    settings = [*_size(bench, method, films), *bench.settings.get(method, ())]
    if fit.epochs is not None:
        settings.append(f"{_length(bench, method)}={fit.epochs}")
    words = [
        *("detect", "fit", "--method", method, "--data", str(films.data), "--seed", str(seed), "--out", str(folder)),
        *(("--weights", weights) if weights is not None else ()),
        *(("--preset", preset) if preset is not None else ()),
        *(("--split", str(films.split)) if films.split is not None else ()),
        *(word for setting in settings for word in ("--set", setting)),
        "--quiet",
    ]
    return PlannedStep(
        fit_name(films, method, seed),
        tuple(words),
        resume=("--resume",),
        complete=folder / SETTINGS,
        makes=folder / SETTINGS,
        inputs=(films.data,),
        machine=tuple(machine),
    )


def _evaluation_steps(bench: Bench, films: BenchSet, method: str, machine: Sequence[str]) -> Iterator[PlannedStep]:
    """One evaluation of all seeds, and one with views balanced. They are cheap and made anew: seeds may be added."""
    seeds = "".join(f"-{seed}" for seed in bench.seeds)
    for kind in (PLAIN, BALANCED) if films.two_views else (PLAIN,):
        models = [str(model_folder(bench, films, method, seed)) for seed in bench.seeds]
        words = [
            *("detect", "eval", "--data", str(films.data), "--name", method, "--force", "--quiet"),
            *(word for model in models for word in ("--model", model)),
            *(("--split", str(films.split)) if films.split is not None else ()),
            *(("--balance", "view") if kind == BALANCED else ()),
            *("--out", str(bench.out / films.name / method / kind)),
        ]
        yield PlannedStep(
            f"{films.name}-{method}-{kind}{seeds}",
            tuple(words),
            needs=tuple(fit_name(films, method, seed) for seed in bench.seeds),
            makes=bench.out / films.name / method / kind / RESULT,
            inputs=(films.data,),
            machine=tuple(machine),
        )


@dataclass(frozen=True)
class BenchRow:
    """One method on one set. ``against`` is its AUC minus that of the best trivial row, with its interval."""

    method: str
    trivial: bool
    auc: Mapping[str, Any]  # mean, sd, low, high, values
    average_precision: Mapping[str, Any]
    against: Mapping[str, float] | None
    localisation: Mapping[str, Any] | None = None
    epochs: int | None = None
    flops: float = 0.0
    core_minutes: float = float("nan")  # of one fit
    peak_bytes: int = 0
    films_per_second: float = float("nan")
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class BenchTable:
    """All rows of one set, the best first; ``balanced`` with views balanced."""

    set_name: str
    films: Mapping[str, int]  # normal and abnormal test films
    fit_films: int
    best_trivial: str
    rows: Sequence[BenchRow]
    balanced: bool = False


def collect(bench: Bench, fits: Mapping[tuple[str, str], Fit]) -> list[BenchTable]:
    """What is there so far, set by set."""
    tables = [_table(bench, films, fits, kind) for films in bench.sets for kind in (PLAIN, BALANCED)]
    return [table for table in tables if table is not None]


def _table(bench: Bench, films: BenchSet, fits: Mapping[tuple[str, str], Fit], kind: str) -> BenchTable | None:
    rows: list[BenchRow] = []
    trivial: dict[str, BenchRow] = {}
    about: dict[str, Any] = {}
    for method in bench.methods:
        folder = bench.out / films.name / method / kind
        if not (folder / NUMBERS).exists() or not (folder / RESULT).exists():
            continue
        about, result = read_json(folder / NUMBERS), read_json(folder / RESULT)
        rows.append(_row(bench, films, method, fits[films.name, method], about, result))
        for line in about["rows"]:
            if line["kind"] == "trivial":
                trivial.setdefault(
                    line["name"],
                    BenchRow(line["name"], True, line["metrics"]["auc"], line["metrics"]["average_precision"], None),
                )
    if not rows:
        return None
    ranked = sorted([*rows, *trivial.values()], key=lambda row: -float(row.auc["mean"]))
    return BenchTable(films.name, about["films"], films.fit_films, about["best_trivial"], ranked, kind == BALANCED)


def _row(
    bench: Bench, films: BenchSet, method: str, fit: Fit, about: Mapping[str, Any], result: Mapping[str, Any]
) -> BenchRow:
    chosen = about["rows"][0]
    steps = [read_step(bench.out, fit_name(films, method, seed)) for seed in bench.seeds]
    known = [step for step in steps if step is not None]
    return BenchRow(
        method,
        False,
        chosen["metrics"]["auc"],
        chosen["metrics"]["average_precision"],
        chosen["against"],
        about["localisation"],
        fit.epochs,
        fit.flops,
        float(np.mean([step.processor_seconds / 60 for step in known])) if known else float("nan"),
        max((step.peak_bytes for step in known), default=0),
        float(result["config"].get("films_per_second", float("nan"))),
        tuple(about["notes"]),
    )

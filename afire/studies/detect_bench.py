"""Detectors side by side: every method fitted with several seeds on several sets of films, at an equal budget.

The budget is counted: floating-point operations of a training, the same for all methods; each trains as many epochs as
fit into it. ``published`` trains each for the epochs of its paper instead, and ``both`` adds that as a second column,
where it takes no longer than allowed. Every audit, fit and evaluation is an `afire` command in a process of its own
(:mod:`afire.studies.recorded`), so a bench that was killed goes on where it was.

OUT/SET/split.json              where a set has no lists of its own
OUT/SET/audit                   shortcuts that give the set's labels away
OUT/SET/METHOD/seed-N           detectors
OUT/SET/METHOD/result           their evaluation; OUT/SET/METHOD/balanced with views balanced, where there are two
OUT/SET/METHOD/published-N, OUT/SET/METHOD/published    the same at published length, beside an equal budget
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from afire.config import LengthConfig
from afire.data.pack import open_films
from afire.data.splits import write_split
from afire.detect import DETECTORS
from afire.detect.base import SETTINGS
from afire.detect.fit import detect_settings, detection_subsets, networks_for
from afire.detect.protocol import plan_test, views_of
from afire.errors import UserError
from afire.studies.baselines_sets import named_set
from afire.studies.recorded import PlannedStep, read_step
from afire.tasks.results import RESULT
from afire.training.run_folder import environment as run_environment
from afire.weights import RANDOM

Length = Literal["equal", "published", "both"]
SPLIT, AUDIT = "split.json", "audit"
PLAIN, BALANCED, PUBLISHED = "result", "balanced", "published"
_TERA, _HOUR = 1e12, 3600.0
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
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)  # --set arguments by method
    most_hours: float = 10.0  # core-hours of one fit at published length
    second: bool = False  # these are the fits of the second column

    @property
    def at_published_length(self) -> Bench:
        """What fills the second column of a bench of both lengths."""
        return replace(self, length="published", second=True)


def parse_methods(text: str) -> list[str]:
    """``all``, or names separated by commas."""
    if text.strip() == "all":
        return list(DETECTORS)
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        DETECTORS[name]  # raises an error that lists them
    if not names:
        raise UserError(f"--methods names none; methods are all, {', '.join(DETECTORS)}.")
    return names


def settings_by_method(overrides: Sequence[str], methods: Sequence[str]) -> dict[str, list[str]]:
    """``METHOD.key=value`` texts -> ``key=value`` texts by method."""
    settings: dict[str, list[str]] = {}
    for override in overrides:
        method, dot, setting = override.strip().partition(".")
        if not dot or method not in methods:
            raise UserError(f"--with {override}: begin with one of the methods of this bench: {', '.join(methods)}.")
        settings.setdefault(method, []).append(setting)
    return settings


def facts(bench: Bench) -> dict[str, str]:
    """The facts above the tables: length, seeds, weights, machine."""
    environment = run_environment()
    long = {
        "equal": f"{bench.tera_flops:g} TFLOP each",
        "published": "each for the epochs of its paper",
        "both": f"{bench.tera_flops:g} TFLOP each, and each for the epochs of its paper where a fit takes at most "
        f"{bench.most_hours:g} core-hours",
    }[bench.length]
    return {
        "training": long,
        "seeds": ", ".join(map(str, bench.seeds)),
        "weights": f"{bench.weights}" + (f", preset {bench.preset}" if bench.weights == RANDOM else ""),
        "settings": "; ".join(f"{method}: {' '.join(settings)}" for method, settings in bench.settings.items())
        or "defaults",
        "machine": f"{environment['system']}, {environment['cores']} cores, torch {environment['packages']['torch']}",
        "command": f"`{' '.join(environment['command'])}`",
    }


def open_set(text: str, out: Path, size: int = 128) -> BenchSet:
    """A set as :func:`named_set` reads it, with the facts to plan with.

    A set without lists gets a split of ours, drawn with seed 0 and kept in ``out``, so that fits know what to leave
    for the test.
    """
    name, data = named_set(text)
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
    """How long one method trains on one set: epochs (None: it does not train), counted FLOPs in all, and the setting
    that says so."""

    epochs: int | None
    flops: float
    setting: str | None = None


def plan_fit(bench: Bench, films: BenchSet, method: str) -> Fit:
    """As many epochs as the budget allows, at least one; or those of the method's paper."""
    kind = DETECTORS[method]
    own_settings, of_networks = _sorted(bench, method)
    networks = networks_for(
        method,
        _weights(bench, method),
        films.data,
        _preset(bench, method),
        overrides=[*_size(bench, method, films), *of_networks],
    )
    setting: str | None = kind.length(pretrained=networks.pretrained is not None)
    if setting is None:
        return Fit(None, 0.0)
    _refuse_lengths(bench, method, setting)
    settings = detect_settings(own_settings, method)
    per_epoch = kind.training_flops(networks.config, settings) * films.fit_films
    published = getattr(kind, "published_epochs", None)
    if bench.length == "published":
        epochs = published if published is not None else networks.config.training.epochs
    else:
        epochs = max(1, round(bench.tera_flops * _TERA / per_epoch))
    return Fit(epochs, epochs * per_epoch, setting)


def _refuse_lengths(bench: Bench, method: str, setting: str) -> None:
    """Settings of a user that say otherwise how long a method trains."""
    group = setting.partition(".")[0]
    lengths = [f"{group}.{name}" for name in LengthConfig.model_fields]
    for given in bench.settings.get(method, ()):
        if given.partition("=")[0].strip() in lengths:
            raise UserError(f"--with {method}.{given}: a bench says itself how long each method trains; leave it out.")


@dataclass(frozen=True)
class LongFit:
    """A fit at published length: how long it would take, by what the one at equal budget took; whether it may."""

    fit: Fit
    core_hours: float
    allowed: bool


def plan_long_fits(bench: Bench, fits: Mapping[tuple[str, str], Fit]) -> dict[tuple[str, str], LongFit]:
    """The second column, for methods that train and whose fits at equal budget are there to be timed."""
    long_fits: dict[tuple[str, str], LongFit] = {}
    for films in bench.sets:
        for method in bench.methods:
            equal = fits[films.name, method]
            steps = [read_step(bench.out, fit_name(bench, films, method, seed)) for seed in bench.seeds]
            seconds = [step.processor_seconds for step in steps if step is not None and step.state == "done"]
            if equal.epochs is None or not seconds:
                continue
            fit = plan_fit(bench.at_published_length, films, method)
            # All of a fit grows with its length here, also what does not: a little too much is on the safe side.
            hours = max(seconds) * fit.flops / equal.flops / _HOUR
            long_fits[films.name, method] = LongFit(fit, hours, hours <= bench.most_hours)
    return long_fits


def plan_long_steps(
    bench: Bench, longer: Mapping[tuple[str, str], LongFit], machine: Sequence[str] = ()
) -> list[PlannedStep]:
    """Fits and evaluations of the second column, the quickest first."""
    published = bench.at_published_length
    allowed = sorted((long_fit.core_hours, key) for key, long_fit in longer.items() if long_fit.allowed)
    sets = {films.name: films for films in bench.sets}
    steps: list[PlannedStep] = []
    for _, (name, method) in allowed:
        films = sets[name]
        steps += [_fit_step(published, films, method, seed, longer[name, method].fit, machine) for seed in bench.seeds]
        steps.append(_evaluation_step(published, films, method, PUBLISHED, machine))
    return steps


def _sorted(bench: Bench, method: str) -> tuple[list[str], list[str]]:
    """``--set`` settings of the detector and of its networks."""
    fields = DETECTORS[method].Settings.model_fields
    settings = list(bench.settings.get(method, ()))
    own_settings = [setting for setting in settings if setting.partition("=")[0].split(".")[0] in fields]
    return own_settings, [setting for setting in settings if setting not in own_settings]


def _weights(bench: Bench, method: str) -> str | None:
    return None if DETECTORS[method].takes == "nothing" else bench.weights


def _preset(bench: Bench, method: str) -> str | None:
    return bench.preset if _weights(bench, method) == RANDOM else None


def _size(bench: Bench, method: str, films: BenchSet) -> list[str]:
    """Settings of the networks' input: none where they come with the weights."""
    return [] if _weights(bench, method) not in (None, RANDOM) else [f"image.size={films.size}"]


def plan_steps(bench: Bench, fits: Mapping[tuple[str, str], Fit], machine: Sequence[str] = ()) -> list[PlannedStep]:
    """Audits; fits seed by seed through all methods, so that a stopped bench has all rows; evaluations."""
    return [
        *(_audit_step(bench, films) for films in bench.sets),
        *(
            _fit_step(bench, films, method, seed, fits[films.name, method], machine)
            for seed in bench.seeds
            for films in bench.sets
            for method in bench.methods
        ),
        *(
            _evaluation_step(bench, films, method, kind, machine)
            for films in bench.sets
            for method in bench.methods
            for kind in ((PLAIN, BALANCED) if films.two_views else (PLAIN,))
        ),
    ]


def _audit_step(bench: Bench, films: BenchSet) -> PlannedStep:
    split = ("--split", str(films.split)) if films.split is not None else ()
    arguments = (
        "data",
        "check",
        "--data",
        str(films.data),
        *split,
        "--out",
        str(audit_folder(bench, films)),
        "--quiet",
    )
    # It ends with 1 where what it found invalidates results: that belongs in the table and is no failure.
    return PlannedStep(
        f"{films.name}-audit", arguments, inputs=(films.data,), machine=("--workers", "1"), finishes=(0, 1)
    )


def audit_folder(bench: Bench, films: BenchSet) -> Path:
    return bench.out / films.name / AUDIT


def fit_name(bench: Bench, films: BenchSet, method: str, seed: int) -> str:
    return f"{films.name}-{method}-{PUBLISHED + '-' if bench.second else ''}{seed}"


def model_folder(bench: Bench, films: BenchSet, method: str, seed: int) -> Path:
    return bench.out / films.name / method / f"{PUBLISHED if bench.second else 'seed'}-{seed}"


def _fit_step(bench: Bench, films: BenchSet, method: str, seed: int, fit: Fit, machine: Sequence[str]) -> PlannedStep:
    folder = model_folder(bench, films, method, seed)
    weights, preset = _weights(bench, method), _preset(bench, method)
    settings = [*_size(bench, method, films), *bench.settings.get(method, ())]
    if fit.setting is not None:
        settings.append(f"{fit.setting}={fit.epochs}")
    arguments = [
        *("detect", "fit", "--method", method, "--data", str(films.data), "--seed", str(seed), "--out", str(folder)),
        *(("--weights", weights) if weights is not None else ()),
        *(("--preset", preset) if preset is not None else ()),
        *(("--split", str(films.split)) if films.split is not None else ()),
        *(argument for setting in settings for argument in ("--set", setting)),
        "--quiet",
    ]
    return PlannedStep(
        fit_name(bench, films, method, seed),
        tuple(arguments),
        resume=("--resume",),
        complete=folder / SETTINGS,
        makes=folder / SETTINGS,
        inputs=(films.data,),
        machine=tuple(machine),
    )


def _evaluation_step(bench: Bench, films: BenchSet, method: str, kind: str, machine: Sequence[str]) -> PlannedStep:
    """One evaluation of all seeds. It is cheap and made anew: seeds may be added."""
    seeds = "".join(f"-{seed}" for seed in bench.seeds)
    models = [str(model_folder(bench, films, method, seed)) for seed in bench.seeds]
    arguments = [
        *("detect", "eval", "--data", str(films.data), "--name", method, "--force", "--quiet"),
        *(argument for model in models for argument in ("--model", model)),
        *(("--split", str(films.split)) if films.split is not None else ()),
        *(("--balance", "view") if kind == BALANCED else ()),
        *("--out", str(bench.out / films.name / method / kind)),
    ]
    return PlannedStep(
        f"{films.name}-{method}-{kind}{seeds}",
        tuple(arguments),
        needs=tuple(fit_name(bench, films, method, seed) for seed in bench.seeds),
        makes=bench.out / films.name / method / kind / RESULT,
        inputs=(films.data,),
        machine=tuple(machine),
    )

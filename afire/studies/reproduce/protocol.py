"""Where a run's protocol differs from the paper's, computed from what the steps wrote, not from what was intended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afire.config import Config, load_config, validate
from afire.files import read_json
from afire.studies.reproduce.sets import protocol
from afire.tasks.results import Result
from afire.tasks.settings import load_task_config
from afire.training.run_folder import CONFIG, DATA

_SECTIONS = ("image", "lesions", "encoder", "head", "decoder", "prototypes", "losses", "training")
# How a step is computed, and what has a line of its own.
_LEFT_OUT = {"encoder.size", "encoder.gradient_checkpointing", "training.precision", "training.compile"}
_LEFT_OUT |= {"training.batch_size", "training.accumulate"}
_TRAINING = ("learning_rate", "weight_decay", "batch_size", "patience")


@dataclass(frozen=True)
class Difference:
    """One setting in which the two differ."""

    setting: str
    paper: str
    ours: str


def differing(pairs: Iterable[tuple[str, Any, Any]]) -> list[Difference]:
    """Those whose texts are not the same."""
    return [Difference(name, str(paper), str(ours)) for name, paper, ours in pairs if str(paper) != str(ours)]


def of_pretraining(run: Path) -> list[Difference]:
    """A pre-training run against the paper's: films, steps, and every setting of the method."""
    config = load_config(file=run / CONFIG)
    data = read_json(run / DATA)
    return [*of_films(int(data["used"]), str(data["source"])), *of_settings(config)]


def of_films(films: int, source: str) -> list[Difference]:
    """The films of the pre-training."""
    paper = protocol()["pretraining"]
    theirs, ours = f"{paper['films']:,} normal films of {paper['data']}", f"{films:,} normal films of {source}"
    return differing([("pre-training films", theirs, ours)])


def of_settings(config: Config) -> list[Difference]:
    """Settings of the method against the preset ``paper``, a line for each section; in one step: films of all GPUs."""
    paper = load_config("paper")
    theirs, ours = paper.model_dump(), config.model_dump()
    differences = []
    for section in _SECTIONS:
        keys = [key for key in theirs[section] if f"{section}.{key}" not in _LEFT_OUT]
        other = [key for key in keys if theirs[section][key] != ours[section][key]]
        if other:
            texts = (", ".join(f"{key} {_short(side[section][key])}" for key in other) for side in (theirs, ours))
            differences.append(Difference(section, *texts))
    steps = paper.training.batch_size, config.training.batch_size
    return [*differences, *differing([("films in a step", *steps)])]


def of_study(study: Mapping[str, Any], seeds: Iterable[int]) -> list[Difference]:
    """An ablation: each trial has a pre-training of its own, on the normal training films of the set itself."""
    base = validate({**study["base"], "seed": 0}, Config)
    films = of_films(int(study["films"]["normal"]), str(study["data"]["name"]))
    return [*films, *of_settings(base), *of_seeds(seeds)]


def of_seeds(seeds: Iterable[int]) -> list[Difference]:
    return differing([("seeds", protocol()["seeds"], len(set(seeds)))])


def of_pretrainings(seeds: int) -> list[Difference]:
    """One pre-training behind all seeds: their spread is that of what follows, and smaller than the paper's."""
    if seeds == 1:
        return []  # the one seed is told already
    return [Difference("pre-trainings", f"{protocol()['seeds']}, one for each seed", f"1, the same for {seeds} seeds")]


def of_supervised(ratios: Mapping[float, Result], folds: Result | None, recipe: str | None) -> list[Difference]:
    """Fine-tuning or segmentation: seeds, labelling ratios, folds, and the recipe's training against the paper's."""
    paper, first = protocol(), next(iter(ratios.values()))
    pairs: list[tuple[str, Any, Any]] = [
        ("labelling ratios", _ratios(paper["fractions"]), _ratios(100 * share for share in ratios)),
        ("folds", paper["folds"], len({run.fold for run in folds.runs}) if folds is not None else "none"),
    ]
    if recipe is not None and first.task == "finetune":
        theirs = load_task_config("finetune", recipe).training.model_dump()
        ours = first.config["training"]
        pairs += [(key.replace("_", " "), _short(theirs[key]), _short(ours[key])) for key in _TRAINING]
    pairs.append(("most epochs", "not stated, patience 10", f"{first.config['training']['epochs']}"))
    return [*of_seeds(run.seed for run in first.runs), *differing(pairs)]


def of_tested_films(table: str, name: str | None, ours: str) -> list[Difference]:
    """Which films were learnt from and tested on; always said, because the paper's lists are not public."""
    paper = protocol()["films"][table].get(name or "", "not in the paper")
    return [Difference("films", str(paper), ours)]


def of_detection(result: Result) -> list[Difference]:
    """A detector: adaptation, score and threshold."""
    paper, fitted = protocol()["detection"], result.config["fitted"][0]
    adapt = fitted.get("adapt", {})
    lesions, slm = adapt.get("lesions", {}), load_config("paper").lesions.model_dump()
    other = [key for key in slm if key != "views" and key in lesions and lesions[key] != slm[key]]
    pairs: list[tuple[str, Any, Any]] = [
        ("score", paper["score"], f"{result.method}, chosen on drawn lesions"),
        (
            "threshold",
            paper["threshold"],
            f"{100 * result.config['false_alarms']:g} % false alarms on held-out normal films",
        ),
        ("epochs of adaptation", paper["epochs"], adapt.get("epochs", "?")),
        ("batch of adaptation", 64, adapt.get("batch_size", "?")),
        ("learning rate of adaptation", _short(1e-4), _short(adapt.get("learning_rate", "?"))),
        ("weight of the token lesion classifier", "0", _short(adapt.get("lesion", "?"))),
        (
            "lesions while adapting",
            ", ".join(f"{key} {_short(slm[key])}" for key in other),
            ", ".join(f"{key} {_short(lesions[key])}" for key in other),
        ),
    ]
    return [*of_seeds(run.seed for run in result.runs), *differing(pairs)]


def _ratios(percents: Iterable[float]) -> str:
    return " / ".join(f"{percent:g}" for percent in percents) + " %"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

"""From what the steps wrote to paper against ours: tables of numbers, figures, and differences of protocol.

Differences are computed from what the steps wrote, not from what was intended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from afire.config import Config
from afire.errors import UserError
from afire.files import read_json
from afire.settings import load_config, validate
from afire.studies.ablation_grid import TABLES as ABLATION_TABLES
from afire.studies.reproduce_plan import FIGURES, TABLES, Request, is_pretrained_once, plan, run_of
from afire.studies.reproduce_sets import OURS, TITLES, Column, Target, column, protocol
from afire.studies.steps import Outcome
from afire.tasks.results import Estimate, Result, read_result
from afire.tasks.settings import load_task_config
from afire.training.run_folder import CONFIG, DATA

PROBE = {"auc": "AUC", "accuracy": "ACC", "f1": "F1"}
DETECTION = {"accuracy": "ACC", "auc": "AUC", "f1": "F1"}
_FOLDS = "folds"
_SECTIONS = ("image", "lesions", "encoder", "head", "decoder", "prototypes", "losses", "training")
# How a step is computed, and what has a line of its own.
_LEFT_OUT = {"encoder.size", "encoder.gradient_checkpointing", "training.precision", "training.compile"}
_LEFT_OUT |= {"training.batch_size", "training.accumulate", "training.shard"}
_TRAINING = ("learning_rate", "weight_decay", "batch_size", "patience")


@dataclass(frozen=True)
class Difference:
    """One setting in which the two differ."""

    setting: str
    paper: str
    ours: str


@dataclass(frozen=True)
class Row:
    """A row: published numbers and ours by column, as shares of 1; either may lack some."""

    name: str
    paper: Mapping[str, float] = field(default_factory=dict)
    ours: Mapping[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """A table: where the paper has it, the columns' titles, and the rows."""

    title: str
    source: str
    columns: Mapping[str, str]
    rows: list[Row]


@dataclass(frozen=True)
class TargetReport:
    """Everything about one target. ``figures`` are paths without endings; ``unfinished`` says why nothing is here.

    ``pretraining`` are differences of the pre-training that several targets share, ``differences`` its own.
    """

    target: Target
    blocks: list[Block] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    pretraining: list[Difference] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unfinished: str = ""

    @property
    def title(self) -> str:
        return TITLES[self.target]


def collect(request: Request, outcome: Outcome, reasons: Mapping[Target, str]) -> list[TargetReport]:
    """A report for each requested target, whether it could be run, was finished, or not."""
    readers = {
        "table1": lambda: _ablation(request, "table1"),
        "table2": lambda: _transfer(request),
        "table3": lambda: _detection(request),
        "table4": lambda: _ablation(request, "table4"),
        "fig-tsne": lambda: _figures(request, "fig-tsne", ("tsne", "landmarks")),
        "fig-cam": lambda: _figures(request, "fig-cam", ("gradcam",)),
        "fig-restore": lambda: _figures(request, "fig-restore", ("restorations",)),
    }
    reports = []
    for target in TITLES:
        if target in reasons:
            reports.append(TargetReport(target, unfinished=f"not possible: {reasons[target]}"))
        elif target in request.targets:
            reason = _unfinished(request, target, outcome)
            reports.append(TargetReport(target, unfinished=reason) if reason else readers[target]())
    return reports


def _unfinished(request: Request, target: Target, outcome: Outcome) -> str:
    alone = replace(request, targets=(target,))
    for step in plan(alone):
        if step.name not in outcome.seconds:
            reason = outcome.failed.get(step.name) or outcome.skipped.get(step.name) or "not run yet"
            return f"step {step.name}: {reason}"
    return ""


def _ablation(request: Request, table: Target) -> TargetReport:
    numbers = read_json(request.out / TABLES / f"{table}.json")
    members = [row for row in numbers["rows"] if table in row["tables"]]
    rows = [
        Row(
            f"{row['tables'][table]}. {row['title']}",
            {name: row[f"paper_{name}"] for name in PROBE if f"paper_{name}" in row},
            {name: _estimate(row, name) for name in PROBE},
        )
        for row in sorted(members, key=lambda row: int(row["tables"][table]))
    ]
    title = "Linear probe on the mean teacher token" + (
        "; the paper's numbers are of ChildCXR" if request.dataset.name != "childcxr" else ""
    )
    block = Block(title, ABLATION_TABLES[table], PROBE, rows)
    study = read_json(request.out / "ablate" / "study.json")
    seeds = {seed for row in members for seed in row["seeds"]}
    films = study["films"]
    tested = f"probe on {films['train']:,} / {films['val']:,} / {films['test']:,} films of {study['data']['name']}"
    about = [Difference("films of the probe", "ChildCXR: 5,232 to train on, 624 to test on", tested)]
    caution = [numbers["facts"]["caution"]] if "caution" in numbers["facts"] else []
    notes = [*caution, *numbers["notes"]]
    return TargetReport(
        table,
        [block],
        [*about, *study_differences(study, seeds)],
        figures=[request.out / FIGURES / table],
        notes=notes,
    )


def _estimate(row: Mapping[str, Any], name: str) -> Estimate:
    values = {key: row[f"{name}_{key}"] for key in ("mean", "sd", "low", "high")}
    return _plain_estimate({**values, "values": row["values"][name]})


def _transfer(request: Request) -> TargetReport:
    blocks: list[Block] = []
    differing: list[Difference] = []
    dataset = request.dataset
    for task, kind, metrics in (
        ("finetune", "classify", {"auc": "mean AUC"}),
        ("segment", "segment", {"dice": "Dice over all films", "dice_positive": "Dice over films with a mask"}),
    ):
        if not getattr(dataset, kind):
            continue
        ratios, folds = _ratios(request, task), _folds(request, task)
        theirs = column("table2", dataset.column(kind))
        blocks.append(_transfer_block(task, metrics, ratios, folds, theirs))
        recipe = dataset.classify[1] if kind == "classify" and dataset.classify[0] == "--recipe" else None
        recipe = "nih14" if recipe == "quick" else recipe
        result = next(iter(ratios.values()))
        films = ratios[max(ratios)].runs[0].films
        tested = (
            f"{result.data['name']}: {films['train']:,} / {films['val']:,} / {films['test']:,} (train / val / test)"
        )
        targets = f"{len(result.labels)} labels" if task == "finetune" else "masks"
        differing += [
            Difference(f"{task}: {difference.setting}", difference.paper, difference.ours)
            for difference in (
                *tested_films("table2", dataset.column(kind), f"{tested}, {targets}"),
                *supervised_differences(ratios, folds, recipe),
            )
        ]
    return TargetReport("table2", blocks, [*differing, *_repeats(request)], _pretraining(request))


def _ratios(request: Request, task: str) -> dict[float, Result]:
    """Results by the share of the labels, in (0, 1]."""
    fractions = request.scale.fractions
    folder = request.out / task
    return {
        percent / 100: read_result(folder / f"{percent:g}pct" if len(fractions) > 1 else folder)
        for percent in fractions
    }


def _folds(request: Request, task: str) -> Result | None:
    return read_result(request.out / f"{task}-folds") if request.scale.folds else None


def _transfer_block(
    task: str, metrics: Mapping[str, str], ratios: Mapping[float, Result], folds: Result | None, theirs: Column | None
) -> Block:
    columns = {f"{100 * share:g}": f"{100 * share:g} %" for share in ratios}
    if folds is not None:
        ours, paper = len({run.fold for run in folds.runs}), int(protocol()["folds"])
        columns[_FOLDS] = f"{ours} folds" if ours == paper else f"folds ({paper}; {ours})"
    published = dict(theirs.rows) if theirs is not None else {}
    paper_row = published.pop(OURS, {})
    rows = []
    for number, (metric, title) in enumerate(metrics.items()):
        values = {f"{100 * share:g}": result.metrics[metric] for share, result in ratios.items()}
        values |= {_FOLDS: folds.metrics[metric]} if folds is not None else {}
        rows.append(Row(f"AFiRe, {title}", paper_row if number == 0 else {}, values))
    rows += [Row(name, numbers) for name, numbers in published.items()]
    title = {"finetune": "Fine-tuning of all weights", "segment": "Segmentation"}[task]
    return Block(title, _source(theirs), columns, rows)


def _source(theirs: Column | None) -> str:
    return f"{theirs.source}, {theirs.title}" if theirs is not None else "not in the paper"


def _detection(request: Request) -> TargetReport:
    folder = request.out / "detect" / "result"
    result, numbers = read_result(folder), read_json(folder / "detect.json")
    theirs = column("table3", request.dataset.column("table3"))
    published = dict(theirs.rows) if theirs is not None else {}
    rows = [Row(f"AFiRe, {result.method}", published.pop(OURS, {}), {name: result.metrics[name] for name in DETECTION})]
    for line in numbers["rows"]:
        if line["name"] == numbers["best_trivial"]:
            beside = {name: _plain_estimate(line["metrics"][name]) for name in DETECTION}
            rows.append(Row(f"best trivial detector: {line['name']}", {}, beside))
    rows += [Row(name, values) for name, values in published.items()]
    films, counts = result.runs[0].films, numbers["films"]
    fitting_films = sum(count for subset, count in films.items() if subset != "test")
    tested = (
        f"{fitting_films:,} normal films to fit, choose and calibrate on; "
        f"{counts['normal']:,} normal and {counts['abnormal']:,} abnormal ones to test on"
    )
    differing = [
        *tested_films("table3", request.dataset.column("table3"), tested),
        *detection_differences(result),
        *_repeats(request),
    ]
    block = Block("Detection from normal films", _source(theirs), DETECTION, rows)
    return TargetReport("table3", [block], differing, _pretraining(request), notes=list(result.notes))


def _plain_estimate(raw: Mapping[str, Any]) -> Estimate:
    return Estimate(
        _number(raw["mean"]), _number(raw["sd"]), _number(raw["low"]), _number(raw["high"]), _numbers(raw["values"])
    )


def _numbers(raw: Sequence[float | None]) -> list[float]:
    return [_number(value) for value in raw]


def _number(value: float | None) -> float:
    """What JSON writes as null is a number that does not exist."""
    return math.nan if value is None else float(value)


def _figures(request: Request, target: Target, kinds: Sequence[str]) -> TargetReport:
    stems = [request.out / FIGURES / kind for kind in kinds]
    differing: list[Difference] = []
    papers = {
        "tsne": "1,000 films of MIMIC-CXR-JPG, 12 combinations of labels",
        "landmarks": "9 places; films not stated",
        "gradcam": "films of NIH with boxes",
        "restorations": "films not stated",
    }
    for kind, stem in zip(kinds, stems, strict=True):
        record = read_json(stem.with_name(f"{stem.name}.json"))
        data, classes = record["data"], record.get("classes")
        ours = f"{data['films']:,} {data['part']} films of {data['name']}"
        ours += f", {len(classes)} combinations of labels" if classes else ""
        differing.append(Difference(kind, papers[kind], ours))
    return TargetReport(target, [], differing, _pretraining(request), stems)


def _repeats(request: Request) -> list[Difference]:
    """Whether every repetition has a pre-training of its own, as the paper repeats each experiment."""
    return shared_pretraining(len(request.scale.seeds)) if is_pretrained_once(request) else []


def _pretraining(request: Request) -> list[Difference]:
    try:
        return pretraining_differences(run_of(request))
    except UserError:  # weights of another kind say less about themselves
        return [Difference("pre-training", "the paper's", f"the weights {run_of(request)}, which do not say how")]


def unequal(pairs: Iterable[tuple[str, Any, Any]]) -> list[Difference]:
    """Those whose texts are not the same."""
    return [Difference(name, str(paper), str(ours)) for name, paper, ours in pairs if str(paper) != str(ours)]


def pretraining_differences(run: Path) -> list[Difference]:
    """A pre-training run against the paper's: films, steps, and every setting of the method."""
    config = load_config(file=run / CONFIG)
    data = read_json(run / DATA)
    return [*film_differences(int(data["used"]), str(data["source"])), *setting_differences(config)]


def film_differences(films: int, source: str) -> list[Difference]:
    """The films of the pre-training."""
    paper = protocol()["pretraining"]
    theirs, ours = f"{paper['films']:,} normal films of {paper['data']}", f"{films:,} normal films of {source}"
    return unequal([("pre-training films", theirs, ours)])


def setting_differences(config: Config) -> list[Difference]:
    """Settings of the method against the preset ``paper``, a line for each section; in one step: films of all GPUs."""
    paper = load_config("paper")
    theirs, ours = paper.model_dump(), config.model_dump()
    differences = []
    for section in _SECTIONS:
        keys = [key for key in theirs[section] if f"{section}.{key}" not in _LEFT_OUT]
        changed_keys = [key for key in keys if theirs[section][key] != ours[section][key]]
        if changed_keys:
            texts = (
                ", ".join(f"{key} {_short(side[section][key])}" for key in changed_keys) for side in (theirs, ours)
            )
            differences.append(Difference(section, *texts))
    steps = paper.training.batch_size, config.training.batch_size
    return [*differences, *unequal([("films in a step", *steps)])]


def study_differences(study: Mapping[str, Any], seeds: Iterable[int]) -> list[Difference]:
    """An ablation: each trial has a pre-training of its own, on the normal training films of the set itself."""
    base = validate({**study["base"], "seed": 0}, Config)
    films = film_differences(int(study["films"]["normal"]), str(study["data"]["name"]))
    return [*films, *setting_differences(base), *seed_differences(seeds)]


def seed_differences(seeds: Iterable[int]) -> list[Difference]:
    return unequal([("seeds", protocol()["seeds"], len(set(seeds)))])


def shared_pretraining(seeds: int) -> list[Difference]:
    """One pre-training behind all seeds: their spread is that of what follows, and smaller than the paper's."""
    if seeds == 1:
        return []  # the number of seeds is listed already
    return [Difference("pre-trainings", f"{protocol()['seeds']}, one for each seed", f"1, the same for {seeds} seeds")]


def supervised_differences(
    ratios: Mapping[float, Result], folds: Result | None, recipe: str | None
) -> list[Difference]:
    """Fine-tuning or segmentation: seeds, labelling ratios, folds, and the recipe's training against the paper's."""
    paper, result = protocol(), next(iter(ratios.values()))
    pairs: list[tuple[str, Any, Any]] = [
        ("labelling ratios", _percents(paper["fractions"]), _percents(100 * share for share in ratios)),
        ("folds", paper["folds"], len({run.fold for run in folds.runs}) if folds is not None else "none"),
    ]
    if recipe is not None and result.task == "finetune":
        theirs = load_task_config("finetune", recipe).training.model_dump()
        ours = result.config["training"]
        pairs += [(key.replace("_", " "), _short(theirs[key]), _short(ours[key])) for key in _TRAINING]
    pairs.append(("most epochs", "not stated, patience 10", f"{result.config['training']['epochs']}"))
    return [*seed_differences(run.seed for run in result.runs), *unequal(pairs)]


def tested_films(table: str, name: str | None, ours: str) -> list[Difference]:
    """Which films were trained and tested on; always listed, because the paper's lists are not public."""
    paper = protocol()["films"][table].get(name or "", "not in the paper")
    return [Difference("films", str(paper), ours)]


def detection_differences(result: Result) -> list[Difference]:
    """A detector: adaptation, score and threshold."""
    paper, fitted = protocol()["detection"], result.config["fitted"][0]
    adapt = fitted.get("adapt", {})
    lesions, slm = adapt.get("lesions", {}), load_config("paper").lesions.model_dump()
    changed_keys = [key for key in slm if key != "views" and key in lesions and lesions[key] != slm[key]]
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
            ", ".join(f"{key} {_short(slm[key])}" for key in changed_keys),
            ", ".join(f"{key} {_short(lesions[key])}" for key in changed_keys),
        ),
    ]
    return [*seed_differences(run.seed for run in result.runs), *unequal(pairs)]


def _percents(percents: Iterable[float]) -> str:
    return " / ".join(f"{percent:g}" for percent in percents) + " %"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

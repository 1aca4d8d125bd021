"""From a target, a table or figure of the paper, to its steps. Steps that targets share have one name, run once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afire.config import Config
from afire.data.pack import is_pack
from afire.errors import UserError
from afire.files import read_json
from afire.settings import load_config
from afire.studies.recorded import PlannedStep, is_done, read_step, step_hashes, step_path
from afire.studies.reproduce_sets import TARGETS, Dataset, Scale, Target
from afire.weights.open import SEED

FIGURES, TABLES, PACKS = "figures", "tables", "packs"


@dataclass(frozen=True)
class Request:
    """What a user asked for. ``data`` is a pack or a manifest, ``root`` the folder as downloaded; one of them, or none
    on the phantom. ``pretrain_data`` are other films to pre-train on, ``weights`` runs that are there already."""

    out: Path
    dataset: Dataset
    scale: Scale
    targets: tuple[Target, ...]
    data: Path | None = None
    root: Path | None = None
    pretrain_data: Path | None = None
    weights: Path | None = None
    device: str = "auto"
    jobs: int | None = None


def config_of(request: Request) -> Config:
    """The settings of the pre-training."""
    return load_config(request.scale.preset, None, request.scale.settings.get("pretrain", ()))


def pack_of(request: Request) -> Path:
    """The pack that all steps read."""
    return (
        request.data if request.data is not None and is_pack(request.data) else _own_pack(request, request.dataset.name)
    )


def _own_pack(request: Request, name: str) -> Path:
    """A pack that a step makes; its folder carries the set's name, because results quote it."""
    return request.out / PACKS / name


def weights_of(request: Request) -> str:
    """The weights as commands over seeds take them: ``{seed}`` in the path is each seed's own pre-training."""
    if request.weights is not None:
        return str(request.weights)
    return str(request.out / _pretraining_name(request, SEED))


def run_of(request: Request, seed: int | None = None) -> Path:
    """The pre-training run that the steps of a seed start from; those without seeds take the first."""
    return Path(weights_of(request).replace(SEED, str(request.scale.seeds[0] if seed is None else seed)))


def is_pretrained_once(request: Request) -> bool:
    """Whether all seeds start from one pre-training: one that was given, or that an earlier version began here."""
    return SEED not in weights_of(request)


def _pretraining_name(request: Request, seed: int | str) -> str:
    """Of the step and of its folder. Where an earlier version pre-trained once for all seeds, that is kept."""
    return "pretrain" if step_path(request.out, "pretrain").exists() else f"pretrain-{seed}"


def possible_targets(targets: Iterable[Target], dataset: Dataset) -> tuple[tuple[Target, ...], dict[Target, str]]:
    """Targets that the set allows, and why not the others."""
    reasons = {target: reason for target in targets if (reason := dataset.missing(target))}
    return tuple(target for target in TARGETS if target in set(targets) and target not in reasons), reasons


def check_films(request: Request) -> None:
    """Explain what to download when the films are missing, and refuse a pack of another size."""
    dataset = request.dataset
    if dataset.name != "phantom" and request.data is None and request.root is None:
        raise UserError(
            f"the films of {dataset.title} are needed: download {dataset.download}, then give --root FOLDER, or run "
            f"`afire data build {dataset.name} --root FOLDER --out {dataset.name}.parquet` and give "
            f"--data {dataset.name}.parquet."
        )
    runs = [run_of(request, seed) for seed in request.scale.seeds] if request.weights is not None else []
    paths = [(request.data, "--data"), (request.root, "--root"), *((run, "--weights") for run in runs)]
    for path, option in paths:
        if path is not None and not path.exists():
            raise UserError(f"{option} {path} does not exist; check the path.")
    size = config_of(request).image.size
    for path in (request.data, request.pretrain_data):
        if path is not None and is_pack(path):
            packed = int(read_json(path / "pack.json")["settings"]["size"])
            if packed != size:
                raise UserError(
                    f"{path} holds films of {packed} px, and the preset {request.scale.preset} takes {size}; pack them "
                    f"again with `afire data pack --size {size}`, or add --set image.size={packed} or another --preset."
                )


def with_finished(request: Request, out: Path) -> tuple[Request, dict[str, float]]:
    """The request with the targets that earlier starts finished here, and the seconds of their steps."""
    seconds: dict[str, float] = {}
    targets = list(request.targets)
    for target in possible_targets(TARGETS, request.dataset)[0]:
        steps = plan(replace(request, targets=(target,)))
        hashes, records = step_hashes(steps, out), {step.name: read_step(out, step.name) for step in steps}
        if target not in targets and all(is_done(step, records[step.name], hashes[step.name]) for step in steps):
            targets.append(target)
            seconds |= {name: record.seconds for name, record in records.items() if record is not None}
    return replace(request, targets=tuple(targets)), seconds


def plan(request: Request) -> list[PlannedStep]:
    """All steps of the targets, in an order in which each comes after those it needs."""
    recipes = {
        "table1": lambda: _ablation(request, "table1"),
        "table2": lambda: _transfer(request),
        "table3": lambda: _detection(request),
        "table4": lambda: _ablation(request, "table4"),
        "fig-tsne": lambda: _maps(request),
        "fig-cam": lambda: _cams(request),
        "fig-restore": lambda: _restorations(request),
    }
    planned: dict[str, PlannedStep] = {}
    for target in request.targets:
        for step in recipes[target]():
            planned.setdefault(step.name, step)
    return list(planned.values())


def _films(request: Request) -> list[PlannedStep]:
    """The pack, from wherever the films come."""
    out, dataset, scale = request.out, request.dataset, request.scale
    if request.data is not None and is_pack(request.data):
        return []
    steps: list[PlannedStep] = []
    if dataset.name == "phantom":
        drawing_arguments = ("--count", str(scale.films), "--size", str(scale.drawn_size), "--seed", "0")
        steps.append(PlannedStep("films", ("data", "phantom", *drawing_arguments, "--out", str(out / "phantom"))))
        manifest = out / "phantom" / "manifest.parquet"
    elif request.data is not None:
        manifest = request.data
    else:
        manifest = out / f"{dataset.name}.parquet"
        arguments: tuple[str, ...] = (
            "data",
            "build",
            dataset.name,
            "--root",
            str(request.root),
            "--out",
            str(manifest),
        )
        steps.append(PlannedStep("films", arguments))
    return [*steps, _pack("pack", manifest, pack_of(request), request, tuple(step.name for step in steps))]


def _pack(name: str, manifest: Path, pack: Path, request: Request, needs: tuple[str, ...] = ()) -> PlannedStep:
    image = config_of(request).image
    arguments: tuple[str, ...] = (
        "data",
        "pack",
        "--data",
        str(manifest),
        "--out",
        str(pack),
        "--size",
        str(image.size),
    )
    for option in ("fit", "voi"):  # one that was not set is the same in both commands
        arguments += (f"--{option}", getattr(image, option)) if option in image.model_fields_set else ()
    skip = () if request.dataset.name == "phantom" else ("--on-error", "skip")
    return PlannedStep(name, (*arguments, *skip), needs, inputs=() if needs else (manifest,))


def _pretraining(request: Request, seeds: Sequence[int] = ()) -> list[PlannedStep]:
    """The films, and a pre-training on normal ones for each of ``seeds``; without any the first, for a figure."""
    steps = _films(request)
    if request.weights is not None:
        return steps
    source, inputs, needs = pack_of(request), _outside(request), _names(steps, "pack")
    if request.pretrain_data is not None:
        source, inputs, needs = request.pretrain_data, (request.pretrain_data,), ()
        if not is_pack(request.pretrain_data):
            source = _own_pack(request, request.pretrain_data.stem)
            step = _pack("pretrain-pack", request.pretrain_data, source, request)
            steps, inputs, needs = [*steps, step], (), (step.name,)
    planned: dict[str, PlannedStep] = {}
    for seed in seeds or request.scale.seeds[:1]:
        name, out = _pretraining_name(request, seed), run_of(request, seed)
        arguments: tuple[str, ...] = ("pretrain", "--data", str(source), "--out", str(out), "--preset")
        arguments += (request.scale.preset, *request.scale.set_arguments("pretrain"), "--seed", str(seed))
        config_file, machine = out / "config.yaml", _device(request)
        step = PlannedStep(name, arguments, needs, ("--resume",), config_file, inputs=inputs, machine=machine)
        planned.setdefault(name, step)
    return [*steps, *planned.values()]


def _ablation(request: Request, table: str) -> list[PlannedStep]:
    """Trials of both tables lie in one study, so that the full method is trained once; each table is kept apart."""
    out, scale = request.out, request.scale
    steps = _films(request)
    study = out / "ablate"
    arguments: tuple[str, ...] = ("ablate", "--data", str(pack_of(request)), "--out", str(study), "--rows", table)
    arguments += ("--seeds", _commas(scale.seeds), "--preset", scale.preset)
    arguments += scale.set_arguments("pretrain", "ablate")
    machine = (*_device(request), *(("--jobs", str(request.jobs)) if request.jobs else ()))
    copies = [(study / "table.json", out / TABLES / f"{table}.json")]
    copies += [(study / f"ablation.{kind}", out / FIGURES / f"{table}.{kind}") for kind in ("png", "pdf")]
    needs, inputs = _names(steps, "pack"), _outside(request)[:1] if not steps else ()
    return [*steps, PlannedStep(table, arguments, needs, keeps=tuple(copies), inputs=inputs, machine=machine)]


def _transfer(request: Request) -> list[PlannedStep]:
    """All labelling ratios and seeds, and the folds, of every kind of task that the set has labels for."""
    steps = _pretraining(request, request.scale.seeds)
    if request.dataset.classify:
        steps += [_learn(request, "finetune", False), *_folded(request, "finetune")]
    if request.dataset.segment:
        steps += [_learn(request, "segment", False), *_folded(request, "segment")]
    return steps


def _folded(request: Request, task: str) -> list[PlannedStep]:
    return [_learn(request, task, True)] if request.scale.folds else []


def _learn(request: Request, task: str, folds: bool) -> PlannedStep:
    """Fine-tuning or segmentation, over ratios or over folds."""
    scale, dataset = request.scale, request.dataset
    name = f"{task}-folds" if folds else task
    recipe = dataset.classify if task == "finetune" else dataset.segment
    if task == "finetune" and scale.quick_recipe:
        recipe = _quick(recipe)
    arguments: tuple[str, ...] = (task, "--weights", weights_of(request), "--data", str(pack_of(request)))
    arguments += ("--out", str(request.out / name), *recipe, *scale.set_arguments(task))
    # Folds are five tests of all films already; the ratios are what is repeated over seeds.
    seeds = scale.seeds[:1] if folds else scale.seeds
    repeats = ("--folds", str(scale.folds)) if folds else ("--fraction", _commas(scale.fractions))
    arguments += (*repeats, "--seeds", _commas(seeds))
    inputs, machine = _outside(request), _device(request)
    return PlannedStep(name, arguments, _base(request, seeds), ("--resume",), inputs=inputs, machine=machine)


def _detection(request: Request) -> list[PlannedStep]:
    """A detector for each seed, then all of them as one row."""
    out, scale = request.out, request.scale
    steps = _pretraining(request, scale.seeds)
    models = {seed: out / "detect" / f"seed-{seed}" for seed in scale.seeds}
    inputs, machine = _outside(request), _device(request)
    for seed, model in models.items():
        arguments: tuple[str, ...] = ("detect", "fit", "--weights", str(run_of(request, seed)))
        arguments += ("--data", str(pack_of(request)), "--out", str(model), "--seed", str(seed))
        arguments += (*request.dataset.detect, *scale.set_arguments("detect"))
        name, needs, complete = f"detect-{seed}", _base(request, (seed,)), model / "detector.json"
        steps.append(
            PlannedStep(name, arguments, needs, ("--resume",), complete=complete, inputs=inputs, machine=machine)
        )
    model_arguments = [argument for model in models.values() for argument in ("--model", str(model))]
    arguments = (
        "detect",
        "eval",
        *model_arguments,
        "--data",
        str(pack_of(request)),
        "--out",
        str(out / "detect" / "result"),
    )
    needs = tuple(f"detect-{seed}" for seed in scale.seeds)
    arguments += request.dataset.detect
    return [*steps, PlannedStep("detect-eval", arguments, needs, ("--force",), inputs=inputs, machine=machine)]


def _maps(request: Request) -> list[PlannedStep]:
    """Classes of films and nine places, beside random weights of the same network."""
    return [
        *_pretraining(request),
        *(_figure(request, kind, _beside_random(request)) for kind in ("tsne", "landmarks")),
    ]


def _beside_random(request: Request) -> tuple[str, ...]:
    shape = (
        ("--preset", request.scale.preset, *request.scale.set_arguments("pretrain")) if request.weights is None else ()
    )
    return ("--weights", f"AFiRe={run_of(request)}", *(("--weights", "random", *shape) if shape else ()))


def _cams(request: Request) -> list[PlannedStep]:
    """Of the classifier that Table 2 fine-tunes with all labels."""
    several = len(request.scale.fractions) > 1
    result = request.out / "finetune" / (f"{max(request.scale.fractions):g}pct" if several else "")
    steps = [*_pretraining(request, request.scale.seeds), _learn(request, "finetune", False)]
    return [*steps, _figure(request, "gradcam", ("--weights", f"AFiRe={result}"), ("finetune",))]


def _restorations(request: Request) -> list[PlannedStep]:
    return [*_pretraining(request), _figure(request, "restorations", ("--weights", str(run_of(request))))]


def _figure(request: Request, kind: str, weights: tuple[str, ...], needs: tuple[str, ...] = ()) -> PlannedStep:
    stem = request.out / FIGURES / kind
    arguments: tuple[str, ...] = (
        "figure",
        kind,
        *weights,
        "--data",
        str(pack_of(request)),
        "--out",
        str(stem),
        *_device(request),
    )
    return PlannedStep(kind, arguments, needs or _base(request), ("--force",), inputs=_outside(request))


def _base(request: Request, seeds: Sequence[int] = ()) -> tuple[str, ...]:
    """What a step on the pre-trained weights of ``seeds`` needs, or of the first seed."""
    own_pack = () if request.data is not None and is_pack(request.data) else ("pack",)
    names = [_pretraining_name(request, seed) for seed in seeds or request.scale.seeds[:1]]
    return (*own_pack, *(dict.fromkeys(names) if request.weights is None else ()))


def _outside(request: Request) -> tuple[Path, ...]:
    """What a step reads that no step wrote."""
    packs = (request.data,) if request.data is not None and is_pack(request.data) else ()
    runs = [run_of(request, seed) for seed in request.scale.seeds] if request.weights is not None else []
    return (*packs, *dict.fromkeys(runs))


def _quick(recipe: tuple[str, ...]) -> tuple[str, ...]:
    """The recipe ``quick`` with the labels of the set's own."""
    if recipe[0] != "--recipe":
        return ("--recipe", "quick", *recipe)
    from afire.tasks.settings import load_task_config

    return ("--recipe", "quick", "--labels", ",".join(load_task_config("finetune", recipe[1]).labels))


def _names(steps: Sequence[PlannedStep], name: str) -> tuple[str, ...]:
    return tuple(step.name for step in steps if step.name == name)


def _device(request: Request) -> tuple[str, ...]:
    return () if request.device == "auto" else ("--device", request.device)


def _commas(values: Iterable[float]) -> str:
    return ",".join(f"{value:g}" for value in values)

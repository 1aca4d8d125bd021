"""What a walk may do, and how often. A rule is a step that can be taken in some worlds."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from tests.sequences import hostile, using
from tests.sequences.films import Source, lay_out
from tests.sequences.walk import BATCH, FITS, Pretraining, Walk, settings
from tests.sequences.world import Data, Made, SplitFile, Weights, World

_EVERY_STEP = settings("run.checkpoint_minutes=1e-9")


@dataclass(frozen=True)
class Rule:
    """A step, how often it is drawn, and what the world must hold for it."""

    step: Callable[[Walk], None]
    weight: float
    possible: Callable[[World], object] = lambda world: True


# Films


def new_films(walk: Walk) -> None:
    """A folder of films and its manifest, which knows them and their patients."""
    world, rng = walk.world, walk.rng
    source = lay_out(rng, world.folder, walk.name("films"), spoilt=rng.random() < 0.15)
    world.sources.append(source)
    walk.shell.note(f"films as {source.layout} in {source.folder}, {len(source.unreadable)} unreadable")
    if source.layout == "phantom":
        manifest = f"{source.folder}/manifest.parquet"
        world.data.append(Data(manifest, source, manifest))
        return
    if source.layout == "folder" and rng.random() < 0.2:
        world.data.append(Data(source.folder, source, "", plain=True))
    _build(walk, source)


def _build(walk: Walk, source: Source) -> None:
    options = [walk.typed(word) if word == f"{source.folder}.csv" else word for word in source.build]
    words = ["data", "build", *options, "--root", walk.typed(source.folder)]
    out = f"{walk.name('manifest')}.{walk.pick(['parquet', 'csv'])}"
    walk.succeed(words, out)
    data = Data(out, source, out, tuple(words))
    walk.world.data.append(data)
    table = walk.world.table(data)
    walk.must(set(table["image"]) == set(source.films), f"{out} lists other films than there are")
    if source.knows_patients:
        table = table[~table["image"].isin(source.unreadable)]  # a header that cannot be read names nobody
        true = [source.films[str(image)].patient for image in table["image"]]
        pairs = set(zip(true, table["patient"], strict=True))
        walk.must(len(pairs) == len(set(true)) == table["patient"].nunique(), f"{out} confuses patients")


def split_films(walk: Walk) -> None:
    """Patients stay together, fractions lie inside each other, and another split does not replace this one."""
    data = walk.pick([data for data in walk.world.data if data.manifest])
    listed = (walk.world.table(data)["split"] == "train").any()
    kinds = ["--test 0.2", "--test 0.3", "--folds 3", *(["", "--development"] if listed else [])]
    kind, seed = walk.pick(kinds), walk.rng.randrange(3)
    words = f"data split --data {walk.typed(data.path)} --val {walk.pick([0.1, 0.2, 0.3])} {kind}".split()
    words += walk.maybe(0.3, "--fractions 30,60,100")
    out = walk.name("splits")
    walk.succeed([*words, "--seed", str(seed)], out)
    walk.world.made.append(Made(out, "split", (*words, "--seed", str(seed))))
    for file in sorted((walk.world.folder / out).glob("*.json")):
        split = SplitFile(f"{out}/{file.name}", data)
        _check_patients(walk, split)
        if "pct" not in file.name:
            walk.world.splits.append(split)
            _check_nested(walk, file)
    if kind.startswith("--test") and walk.rng.random() < 0.2:
        walk.run(
            [*words, "--seed", str(seed + 1)], out
        )  # refused, or by chance the same split: files stay as they were


def _check_patients(walk: Walk, split: SplitFile) -> None:
    films, owner = split.data.source.films, dict[str, str]()
    for subset in ("train", "val", "test"):
        for image in walk.world.subset(split.data, split, subset)["image"].astype(str):
            film = films[image]
            patient = film.patient if split.data.knows_patients and film.readable else image
            walk.must(owner.setdefault(patient, subset) == subset, f"{split.path} has a patient in two subsets")


def _check_nested(walk: Walk, file: Path) -> None:
    smaller = [file.with_name(f"{file.stem}-{percent}pct.json") for percent in (60, 30)]
    files = [file, *(file for file in smaller if file.exists())]
    patients = [set(json.loads(file.read_text())["patients"]["train"]) for file in files]
    walk.must(all(few <= many for many, few in pairwise(patients)), f"fractions of {file.name} are not nested")


def pack_films(walk: Walk) -> None:
    """`afire data pack`; sometimes killed on the way and run again. Films that cannot be read are named."""
    source = walk.pick([data for data in walk.world.data if data.fit is None])
    fit, out, bad = walk.pick(FITS), walk.name("pack"), source.source.unreadable
    skip = walk.maybe(0.5, "--on-error skip")
    words = f"data pack --data {walk.typed(source.path)} --size 32 --bits {walk.pick([8, 16])} --fit {fit}".split()
    words += ["--workers", "1", *skip]
    killed = walk.rng.random() < 0.2
    if killed:
        walk.kill(words, out, walk.pick(["", "images.npy.part", "journal.jsonl"]))
    expect = [2] if bad and not skip else [0]
    ended = walk.run(words, out, keeps=bool(bad), replaces=killed, expect=expect)
    if ended.code == 2:
        walk.must(any(name in ended.message for name in bad), f"no bad film is named: {ended.message}")
        return
    told = json.loads((walk.world.folder / out / "pack.json").read_text())["skipped"]
    walk.must(set(told) == set(bad), f"{out} skipped {sorted(told)}, but {sorted(bad)} cannot be read")
    manifest = f"{out}/manifest.parquet"
    walk.world.data.append(Data(out, source.source, manifest, tuple(words), fit, bool(bad), source.plain))
    if killed:
        walk.repeat("pack", words, out)


def join_films(walk: Walk) -> None:
    """Two sets as one: all their films, and nobody is in both."""
    first, second = walk.rng.sample([data for data in walk.world.data if data.manifest and data.fit is None], 2)
    words = ["data", "join", *(word for data in (first, second) for word in ("--data", walk.typed(data.path)))]
    out = f"{walk.name('joined')}.parquet"
    ended = walk.run(words, out)
    walk.must(ended.code == 0 or "are called" in ended.message, f"two sets are not joined: {ended.message}")
    if ended.code == 0:
        table = walk.world.table(Data(out, first.source, out))
        walk.must(len(table) == len(first.source.films) + len(second.source.films), f"{out} lost films")
        walk.must(not table.groupby("patient")["meta:source"].nunique().gt(1).any(), f"{out} has one patient in both")
        walk.world.made.append(Made(out, "manifest", tuple(words)))


def repeat_something(walk: Walk) -> None:
    """Whatever was made before, made again."""
    world = walk.world
    things = [("pack" if data.fit else "manifest", data.words, data.path) for data in world.data]
    things += [(weights.kind, weights.words, weights.path) for weights in [*world.runs, *world.detectors]]
    things += [(made.kind, made.words, made.path) for made in world.made]
    kind, words, path = walk.pick([thing for thing in things if thing[1]])
    world.made.append(Made(walk.repeat(kind, words, path), kind, ()))


# Pre-training


def pretrain(walk: Walk) -> None:
    asked, out = walk.pretraining(), walk.name("run")
    if walk.run(asked.words, out, expect=[0] if _can_train(walk, asked) else [0, 2]).code == 0:
        _remember(walk, out, asked)


def _can_train(walk: Walk, asked: Pretraining) -> bool:
    """Whether it cannot but work: enough films, and no weights of another shape to start from."""
    readable = {film.digest for film in asked.data.source.films.values() if film.readable}
    return len(walk.world.training_films(asked.data, asked.split) & readable) >= 2 * BATCH and asked.start is None


def _remember(walk: Walk, out: str, asked: Pretraining) -> None:
    seen = walk.world.training_films(asked.data, asked.split)
    behind = asked.start.seen if asked.start is not None else frozenset()
    everything = None if behind is None else seen | behind
    run = Weights(out, "run", tuple(asked.words), asked.data, everything, asked.fit, asked.method, start=asked.start)
    walk.world.runs.append(run)


def pretrain_on_twin(walk: Walk) -> None:
    """A run on another pack of the same films and settings, or on a copy of it, ends with the same weights."""
    run = walk.pick([run for run in walk.world.runs if run.data.fit])
    twin, out = walk.name("pack"), walk.name("run")
    if walk.rng.random() < 0.5:
        walk.succeed(run.data.words, twin)
    else:
        twin = f"moved/{twin}"
        shutil.copytree(walk.world.folder / run.data.path, walk.world.folder / twin)
        walk.shell.note(f"copy {run.data.path} to {twin}")
    walk.succeed([walk.typed(twin) if word == walk.typed(run.data.path) else word for word in run.words], out)
    walk.must_be_equal("run", run.path, out)
    walk.world.data.append(replace(run.data, path=twin, manifest=f"{twin}/manifest.parquet", words=()))


def killed_pretraining(walk: Walk) -> None:
    """A run that is killed, perhaps with a truncated checkpoint, and resumed ends as one that was not."""
    asked = walk.pretraining()
    if not _can_train(walk, asked):
        return
    words = [*asked.words, *_EVERY_STEP]
    whole, out = walk.name("run"), walk.name("killed")
    walk.succeed(words, whole)
    config = walk.world.folder / out / "config.yaml"
    files = ["", "config.yaml", "metrics.jsonl", "checkpoints/step-00000001", "checkpoints/step-00000002"]
    for _ in range(walk.rng.randint(1, 2)):
        how = walk.pick([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
        moment, resume = walk.pick(files), ["--resume"] if config.exists() else []
        if walk.kill([*words, *resume], out, "" if resume else moment, how) == 0:
            break
    if walk.rng.random() < 0.3:
        hostile.damage_newest_checkpoint(walk, out)
    walk.succeed([*words, *(["--resume"] if config.exists() else [])], out, replaces=True)
    walk.must_be_equal("run", whole, out)
    _remember(walk, whole, asked._replace(words=words))


def resume_finished(walk: Walk) -> None:
    """Nothing is left to do, and no weight changes."""
    run, kept = walk.pick(walk.world.runs), walk.name("kept")
    shutil.copytree(walk.world.folder / run.path, walk.world.folder / kept)
    walk.shell.note(f"copy {run.path} to {kept}")
    walk.succeed([*run.words, "--resume"], run.path, replaces=True)
    walk.must_be_equal("run", run.path, kept)
    shutil.rmtree(walk.world.folder / kept)


def killed_anything(walk: Walk) -> None:
    """A command without --resume that is killed: run again, with --force where it is told to, it ends as ever."""
    world = walk.world
    things = [*world.bundles, *(made for made in world.made if made.kind in ("result", "report") and made.words)]
    thing = walk.pick(things)
    out = walk.name("killed")
    walk.kill(thing.words, out, "")
    ended = walk.run(thing.words, out, replaces=True, keeps=True)
    if ended.code == 2:
        walk.must("--force" in ended.message, f"a killed command cannot be run again: {ended.message}")
        walk.succeed([*thing.words, "--force"], out, replaces=True)
    walk.must_be_equal(thing.kind, thing.path, out)


def _any_result(world: World) -> bool:
    return any(made.kind == "result" and made.words for made in world.made)


def _any_pack(world: World) -> bool:
    return any(data.fit and data.words and not data.plain for data in world.data)


RULES = [
    Rule(new_films, 0.6, lambda world: len(world.sources) < 3),
    Rule(split_films, 1.5, lambda world: any(data.manifest for data in world.data)),
    Rule(pack_films, 2, lambda world: any(data.fit is None for data in world.data)),
    Rule(join_films, 0.3, lambda world: sum(bool(data.manifest and data.fit is None) for data in world.data) > 1),
    Rule(repeat_something, 2, lambda world: world.made or world.runs or any(data.words for data in world.data)),
    Rule(pretrain, 3),
    Rule(pretrain_on_twin, 0.7, lambda world: any(run.data.words and run.data.fit for run in world.runs)),
    Rule(killed_pretraining, 1.2),
    Rule(killed_anything, 0.7, lambda world: world.bundles or _any_result(world)),
    Rule(resume_finished, 0.4, lambda world: world.runs),
    Rule(using.probe, 2),
    Rule(using.learn, 0.4, lambda world: world.runs),
    Rule(using.embed, 1, lambda world: world.runs),
    Rule(using.compare_results, 0.5, _any_result),
    Rule(using.check_data, 0.4),
    Rule(using.fit_detector, 2.5, lambda world: world.runs),
    Rule(using.killed_fit, 0.5, lambda world: world.runs),
    Rule(using.evaluate_detector, 1.5, lambda world: world.detectors),
    Rule(using.run_detector, 1.5, lambda world: world.detectors),
    Rule(using.other_test_films, 1, lambda world: any(map(using.has_drawn_test_films, world.detectors))),
    Rule(using.export_bundle, 1.5, lambda world: world.runs),
    Rule(using.export_format, 0.3, lambda world: world.runs),
    Rule(using.verify_bundle, 0.05, lambda world: world.bundles),
    Rule(hostile.wrong_path, 0.6),
    Rule(hostile.wrong_setting, 0.6),
    Rule(hostile.wrong_pack, 0.7, lambda world: any(data.fit for data in world.data)),
    Rule(hostile.wrong_split, 0.5, lambda world: len(world.sources) > 1 and world.splits),
    Rule(hostile.wrong_choice, 0.6),
    Rule(hostile.resume_with_other_settings, 0.5, lambda world: world.runs),
    Rule(hostile.out_is_taken, 0.6, lambda world: world.runs),
    Rule(hostile.out_is_something_else, 0.8, lambda world: world.runs),
    Rule(hostile.out_is_a_file, 0.5, lambda world: world.runs),
    Rule(hostile.resume_damaged, 0.5, lambda world: world.runs),
    Rule(hostile.second_process, 0.5, lambda world: world.runs or _any_pack(world)),
    Rule(hostile.resume_on_changed_film, 0.5, lambda world: any(run.data.fit is None for run in world.runs)),
    Rule(hostile.pack_changed_film, 0.5, _any_pack),
    Rule(hostile.damaged, 2.5, lambda world: world.runs or world.splits or any(data.words for data in world.data)),
]

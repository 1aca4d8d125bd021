"""Steps that should not be taken: wrong words, wrong places, damaged files. Each is refused, and nothing is lost."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.sequences.using import SMALL_RANDOM
from tests.sequences.walk import FITS, Walk, settings
from tests.sequences.world import Data, Weights, World

_WRONG_SETTINGS = (
    *("training.batch_size=0", "training.batch_size=7000", "training.accumulate=3", "training.epochs=none"),
    *("encoder.width=18", "encoder.heads=3", "encoder.patch_size=5", "image.channels=2", "image.size=31"),
    *("nonsense=1", "training=3", "training.epoch=2", "head", "=", "lesions.count_min=9", "losses.temperature=0"),
    *("seed=-1", "seed=x", "training.precision=fp4", "encoder.drop_path=1", "image.fit=stretch", "encoder.size=huge"),
    *("method=unknown", "options.unknown=1", "run.keep_checkpoints=0", "training.learning_rate=-1", "image: 3"),
)


def _cut(rng: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(max(1, path.stat().st_size))])


def _flip(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


DAMAGE: dict[str, Callable[[random.Random, Path], object]] = {
    "delete": lambda rng, path: path.unlink(),
    "cut short": _cut,
    "flip a bit of": _flip,
    "empty": lambda rng, path: path.write_bytes(b""),
    "write rubbish into": lambda rng, path: path.write_bytes(b"[1, 2]\n"),
}


def wrong_path(walk: Walk) -> None:
    """A path that does not exist, wherever one is taken."""
    data = walk.pick(walk.world.data)
    gone, path, films = walk.typed("gone"), walk.typed(data.path), walk.typed(data.source.folder)
    weights = walk.typed(walk.pick(walk.world.runs).path) if walk.world.runs else "random"
    command = _one_of(
        walk,
        f"""
        data split --data {gone}
        data pack --data {gone}
        data check --data {gone}
        data build folder --root {gone}
        data build csv --root {films} --csv {gone}
        pretrain --data {gone} --preset tiny
        pretrain --data {path} --split {gone} --preset tiny
        pretrain --data {path} --config {gone}
        pretrain --data {path} --init {gone} --preset tiny
        probe --weights {gone} --data {path}
        probe --weights {weights} --data {gone}
        embed --weights {gone} --data {path}
        detect fit --weights {gone} --data {path}
        detect fit --weights {weights} --data {gone}
        detect eval --model {gone} --data {path}
        detect run {films} --model {gone}
        export {gone}
        compare {gone} {gone}
        finetune --weights {gone} --data {path}
        segment --weights {weights} --data {gone}
        """,
    )
    message = walk.refused(command.split(), _file_for(command, walk.name("nothing")))
    walk.must("gone" in message or weights == "random", f"what is missing is not named: {message}")


def _file_for(command: str, out: str) -> str:
    """A name for --out: some commands write a file."""
    return f"{out}.parquet" if command.startswith(("embed", "data build", "data join")) else out


def wrong_setting(walk: Walk) -> None:
    walk.refused([*walk.pretraining().words, *settings(walk.pick(_WRONG_SETTINGS))], walk.name("nothing"))


def wrong_pack(walk: Walk) -> None:
    """A pack that is not what settings or weights say."""
    world = walk.world
    pack = walk.pick([data for data in world.data if data.fit])
    path = walk.typed(pack.path)
    other = walk.pick([fit for fit in FITS if fit != pack.fit])
    commands = [
        ["pretrain", "--data", path, *walk.network("afire"), *settings("image.size=64")],
        ["pretrain", "--data", path, *walk.network("mae"), "--method", "mae", *settings(f"image.fit={other}")],
    ]
    for weights in [*world.runs, *world.bundles]:
        if weights.fit != pack.fit:
            commands.append(["probe", "--weights", walk.typed(weights.path), "--data", path, "--no-cache"])
            commands.append(["detect", "fit", "--weights", walk.typed(weights.path), "--data", path])
    for model in world.detectors:
        if model.fit != pack.fit:
            commands.append(["detect", "eval", "--model", walk.typed(model.path), "--data", path])
    walk.refused(walk.pick(commands), walk.name("nothing"))


def wrong_split(walk: Walk) -> None:
    """A split of other films."""
    world = walk.world
    pairs = [(split, data) for split in world.splits for data in world.data if split.is_foreign_to(data)]
    if pairs:
        split, data = walk.pick(pairs)
        where = f"--data {walk.typed(data.path)} --split {walk.typed(split.path)}".split()
        commands = [
            ["pretrain", *where, *walk.network("afire")],
            ["probe", "--weights", "sharpness", *where],
            ["detect", "fit", "--weights", "random", *where, *SMALL_RANDOM],
            ["data", "check", *where, "--workers", "1"],
        ]
        walk.refused(walk.pick(commands), walk.name("nothing"))


def wrong_choice(walk: Walk) -> None:
    """Labels, scores, rates, folds and seeds that are not possible."""
    world = walk.world
    path = walk.typed(walk.pick(world.data).path)
    trivial = f"probe --weights sharpness --data {path}"
    fit = f"detect fit --weights random --data {path} {' '.join(SMALL_RANDOM)}"
    if world.runs:
        fit = f"detect fit --weights {walk.typed(walk.pick(world.runs).path)} --data {path}"
    command = _one_of(
        walk,
        f"""
        {trivial} --labels Unicorn
        {trivial} --seeds 1,1
        {trivial} --seeds x
        {trivial} --folds 1000
        {trivial} --fraction 0
        data split --data {path} --test 1.5
        data split --data {path} --test 0.6 --val 0.6
        data split --data {path} --folds 1
        data split --data {path} --fractions 50,x
        data split --data {path} --test 0.2 --fractions 50,0
        {fit} --set false_alarms=0.0001
        {fit} --score unicorn
        {fit} --method unicorn
        {fit} --set held_out=2
        {fit} --set lesions.views=2
        export {path}
        data join --data {path}
        """,
    )
    walk.refused(command.split(), _file_for(command, walk.name("nothing")))


def resume_with_other_settings(walk: Walk) -> None:
    run = walk.pick(walk.world.runs)
    shared = ["training.epochs=9", "seed=77", "encoder.depth=3"]
    changed = walk.pick([*shared, *(["losses.temperature=3"] if run.method == "afire" else [])])
    message = walk.refused([*run.words, *settings(changed), "--resume"], run.path)
    walk.must(changed.partition("=")[0] in message, f"{changed} is not named: {message}")


def _commands(world: World) -> list[tuple[str, ...]]:
    """Commands that have worked, whose --out is a folder."""
    things = [*world.runs, *world.detectors, *world.bundles, *world.made, *(data for data in world.data if data.fit)]
    return [thing.words for thing in things if thing.words and (world.folder / thing.path).is_dir()]


def out_is_taken(walk: Walk) -> None:
    """The same command to the place where its result is: refused, and nothing is changed."""
    world = walk.world
    things = [*world.runs, *world.detectors, *world.bundles, *world.made]
    thing = walk.pick([thing for thing in things if thing.words and thing.kind not in ("split", "manifest")])
    walk.refused(thing.words, thing.path)


def out_is_something_else(walk: Walk) -> None:
    """An --out that holds something of another kind: the command may be refused or write beside it, never over it."""
    world = walk.world
    things: list[str] = [thing.path for thing in [*world.runs, *world.detectors, *world.bundles, *world.made]]
    things += [data.path for data in world.data if data.fit] + [source.folder for source in world.sources]
    target = walk.pick([path for path in things if (world.folder / path).is_dir()])
    copied = walk.name("taken")
    shutil.copytree(world.folder / target, world.folder / copied)
    walk.shell.note(f"copy {target} to {copied}")
    walk.run(walk.pick(_commands(world)), copied)
    shutil.rmtree(world.folder / copied)


def out_is_a_file(walk: Walk) -> None:
    """--out is a file, or below one."""
    (walk.world.folder / "file").write_text("mine")
    walk.shell.note("write `file`")
    walk.refused(walk.pick(_commands(walk.world)), walk.pick(["file", "file/below", "file/below/it"]))


def damage_newest_checkpoint(walk: Walk, run: str) -> None:
    """As a full disk or a broken one leaves it."""
    folders = sorted((walk.world.folder / run / "checkpoints").glob("step-*"))
    if folders:
        _damage(walk, walk.pick(sorted(folders[-1].iterdir())), walk.pick(["delete", "cut short", "flip a bit of"]))


def _damage(walk: Walk, file: Path, how: str) -> None:
    walk.shell.note(f"{how} {file.relative_to(walk.world.folder)}")
    DAMAGE[how](walk.rng, file)


def damaged(walk: Walk) -> None:
    """A file of something is gone, cut or altered: whoever uses it says so, or does not need it."""
    world = walk.world
    things = [(weights.kind, weights.path) for weights in [*world.runs, *world.detectors, *world.bundles]]
    things += [("pack" if data.fit else "manifest", data.path) for data in world.data if data.words]
    things += [("split", split.path) for split in world.splits]
    things += [("result", made.path) for made in world.made if made.kind == "result"]
    kind, path = walk.pick(things)
    copied = walk.name("damaged") + Path(path).suffix
    whole, spoilt = world.folder / path, world.folder / copied
    (shutil.copytree if whole.is_dir() else shutil.copy)(whole, spoilt)
    walk.shell.note(f"copy {path} to {copied}")
    files = sorted(file for file in spoilt.rglob("*") if file.is_file()) if whole.is_dir() else [spoilt]
    file = walk.pick(files)
    before = file.read_bytes()
    _damage(walk, file, walk.pick(sorted(DAMAGE)))
    altered = not file.exists() or file.read_bytes() != before
    command = _users_of(walk, kind, walk.typed(copied))
    out = _file_for(command, walk.name("used"))
    expect = [2] if kind == "bundle" and altered else [0, 1, 2] if "data check" in command else [0, 2]
    walk.run(command.split(), out, expect=expect)
    (shutil.rmtree if whole.is_dir() else Path.unlink)(spoilt) if spoilt.exists() else None


def _users_of(walk: Walk, kind: str, path: str) -> str:
    """A command that reads something of this kind."""
    data: Data = walk.pick(walk.world.data)
    films, folder = walk.typed(data.path), walk.typed(data.source.folder)
    network = " ".join(walk.network("afire"))
    probe = "probe --seeds 0 --no-cache --labels abnormal"
    result = walk.typed(walk.pick([made.path for made in walk.world.made if made.kind == "result"] or ["none"]))
    users = {
        "run": f"""
            {probe} --weights {path} --data {films}
            embed --weights {path} --data {films}
            detect fit --weights {path} --data {films}
            pretrain --data {films} --init {path} {network}
            export {path}
        """,
        "detector": f"""
            detect run {folder} --model {path} --no-pictures
            detect eval --model {path} --data {films} --bootstrap 20
            {probe} --weights {path} --data {films}
            export {path}
        """,
        "bundle": f"""
            embed --weights {path} --data {films}
            export {path}
            export {path} --format hf
        """,
        "pack": f"""
            pretrain --data {path} {network}
            pretrain --data {path} {network} --set run.on_bad_film=stop
            {probe} --weights sharpness --data {path}
            data split --data {path} --test 0.3
            data check --data {path} --workers 1
        """,
        "manifest": f"""
            pretrain --data {path} {network}
            data split --data {path} --test 0.3
            data pack --data {path} --size 32 --workers 1 --on-error skip
        """,
        "split": f"""
            pretrain --data {films} --split {path} {network}
            {probe} --weights sharpness --data {films} --split {path}
        """,
        "result": f"compare {path} {result}",
    }
    return _one_of(walk, users[kind])


def _one_of(walk: Walk, commands: str) -> str:
    """A line of several."""
    return walk.pick(commands.strip().splitlines()).strip()


def resume_damaged(walk: Walk) -> None:
    """A run with a damaged file is resumed to its end, or refused."""
    world = walk.world
    run, copied = walk.pick(world.runs), walk.name("damaged")
    shutil.copytree(world.folder / run.path, world.folder / copied)
    walk.shell.note(f"copy {run.path} to {copied}")
    _damage(
        walk,
        walk.pick(sorted(file for file in (world.folder / copied).rglob("*") if file.is_file())),
        walk.pick(sorted(DAMAGE)),
    )
    walk.run([*run.words, "--resume"], copied, replaces=True, keeps=True)
    shutil.rmtree(world.folder / copied)


def second_process(walk: Walk) -> None:
    """A command on a folder that another process is writing is refused, and the other ends as if it had been alone."""
    world = walk.world
    things = [(run.kind, run.words, run.path, "config.yaml") for run in world.runs]
    things += [("pack", data.words, data.path, "begun.json") for data in world.data if data.fit and data.words]
    kind, words, path, file = walk.pick([thing for thing in things if thing[1]])
    out = walk.name("shared")
    written = world.folder / out / file
    with walk.shell.stopped(*words, "--out", walk.typed(out), out=out, when=written.exists) as held:
        if held:
            more = walk.pick([[], ["--resume"], ["--resume", "--force"]]) if kind == "run" else []
            message = walk.refused([*words, *more], out)
            walk.must("another process is writing" in message, f"it was not said that {out} is in use: {message}")
    walk.must_be_equal(kind, path, out)


@contextmanager
def _other_bytes(walk: Walk, data: Data, film: str) -> Iterator[None]:
    """For the block, the file of ``film`` has the bytes of another film of its kind."""
    folder = walk.world.folder / data.source.folder
    file, before = folder / film, (folder / film).read_bytes()
    status = file.stat()
    others = [name for name, other in data.source.films.items() if other.readable and name.endswith(file.suffix)]
    different = [name for name in others if (folder / name).read_bytes() != before]
    file.write_bytes((folder / walk.pick(different)).read_bytes() if different else before + bytes(8))
    walk.shell.note(f"another film in the place of {data.source.folder}/{film}")
    try:
        yield
    finally:
        file.write_bytes(before)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        walk.shell.note(f"{data.source.folder}/{film} is as it was")


def resume_on_changed_film(walk: Walk) -> None:
    """A run on loose films names the film that is another one now, and goes on when it is back."""
    world = walk.world
    run = walk.pick([run for run in world.runs if run.data.fit is None])
    copied = walk.name("copied")
    shutil.copytree(world.folder / run.path, world.folder / copied)
    walk.shell.note(f"copy {run.path} to {copied}")
    film, resume = walk.pick(_trained_on(walk, run)), [*run.words, "--resume"]
    with _other_bytes(walk, run.data, film):
        message = walk.refused(resume, copied)
        walk.must(film in message, f"{film} is not named: {message}")
    walk.succeed(resume, copied, replaces=True)
    walk.must_be_equal("run", run.path, copied)
    shutil.rmtree(world.folder / copied)


def _trained_on(walk: Walk, run: Weights) -> list[str]:
    """Names of the films in the run's own record; what it started from may have seen others."""
    keys = (walk.world.folder / run.path / "films.txt").read_text()
    return sorted(name for name, film in run.data.source.films.items() if f"file:{film.digest[:24]}" in keys)


def pack_changed_film(walk: Walk) -> None:
    """The same pack again, over films of which one is another now: it becomes the pack of these films."""
    world = walk.world
    packs = [data for data in world.data if data.fit and data.words and not data.plain]
    data, copied, fresh = walk.pick(packs), walk.name("copied"), walk.name("fresh")
    shutil.copytree(world.folder / data.path, world.folder / copied)
    walk.shell.note(f"copy {data.path} to {copied}")
    film = walk.pick(sorted(name for name, film in data.source.films.items() if film.readable))
    with _other_bytes(walk, data, film):
        walk.succeed(data.words, copied, replaces=True)
        walk.succeed(data.words, fresh)
    walk.must_be_equal("pack", copied, fresh)
    walk.succeed(data.words, copied, replaces=True)
    walk.must_be_equal("pack", copied, data.path)
    for folder in (copied, fresh):
        shutil.rmtree(world.folder / folder)

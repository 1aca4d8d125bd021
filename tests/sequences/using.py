"""Steps that use what was trained: tasks, detection, export. Results must be repeatable and say what is true."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

import afire
from afire.detect import DETECTORS
from afire.detect.base import load_detector
from tests.sequences.films import Source, with_other_films
from tests.sequences.walk import Walk, settings
from tests.sequences.world import Data, Made, Weights

SMALL_RANDOM = [
    *("--preset", "tiny"),
    *settings("image.size=32", "encoder.width=16", "encoder.depth=1", "encoder.heads=2", "encoder.patch_size=8"),
]
_CLOSE = 1e-3  # to a threshold: a film that calibrated the detector may be the threshold itself


def probe(walk: Walk) -> None:
    """The result says which test films the weights have seen, whatever form the films come in."""
    world = walk.world
    data = walk.pick(world.data)
    own = [*world.runs, *world.bundles, *world.detectors]
    weights = walk.pick(own) if own and walk.rng.random() < 0.7 else None
    other = walk.pick(["random", "area", "sharpness", "metadata"])
    split = walk.split_for(data)
    words = ["probe", "--weights", walk.typed(weights.path) if weights else other, "--data", walk.typed(data.path)]
    words += ["--seeds", walk.pick(["0", "0,1"]), *(SMALL_RANDOM if weights is None and other == "random" else [])]
    words += ["--split", walk.typed(split.path)] if split else walk.maybe(0.15, "--folds 2")
    words += walk.maybe(0.8, "--labels abnormal") + walk.maybe(0.3, "--method knn") + walk.maybe(0.15, "--fraction 50")
    words += walk.maybe(0.1, "--network student") + walk.maybe(0.1, "--pool class")
    words += ["--cache", str(walk.cache)] if walk.cache else ["--no-cache"]
    out = walk.name("probe")
    if walk.run(words, out).code == 0:
        world.made.append(Made(out, "result", tuple(words)))
        _check_result(walk, out, data, weights)


def _check_result(walk: Walk, out: str, data: Data, weights: Weights | None) -> None:
    table = pd.read_parquet(walk.world.folder / out / "predictions.parquet")
    for _, run in table.groupby("run"):
        walk.must(not run["image"].duplicated().any(), f"{out} judges a film twice in a run")
    if weights is None:
        return
    tests = [walk.world.digests(data, run) for _, run in table[table["part"] == "test"].groupby("run")]
    worst = max(tests, key=lambda films: len(films & (weights.seen or frozenset())))
    told = json.loads((walk.world.folder / out / "result.json").read_text())["seen"]
    walk.must_say(told["pretraining"], worst, weights.seen)


def learn(walk: Walk) -> None:
    """`afire finetune` or `afire segment`, for a moment."""
    world = walk.world
    weights, data = walk.pick(world.runs), walk.pick(world.data)
    split, task = walk.split_for(data), walk.pick(["finetune --labels abnormal", "segment"])
    words = f"{task} --weights {walk.typed(weights.path)} --data {walk.typed(data.path)} --seeds 0".split()
    words += settings("training.epochs=1", "training.batch_size=8", "training.min_epoch_steps=2", "bootstrap=20")
    words += ["--split", walk.typed(split.path)] if split else []
    out = walk.name("learned")
    if walk.run(words, out).code == 0:
        world.made.append(Made(out, "result", tuple(words)))
        _check_result(walk, out, data, weights)


def embed(walk: Walk) -> None:
    """Features of a run; those of a bundle made of it are the same."""
    weights = walk.pick([*walk.world.runs, *walk.world.bundles])
    fitting = [data for data in walk.world.data if data.fit in (None, weights.fit)]
    if not fitting:
        return
    data = walk.pick(fitting)
    words = ["embed", "--data", walk.typed(data.path), "--weights"]
    out = f"{walk.name('features')}.{walk.pick(['parquet', 'npz'])}"
    if walk.run([*words, walk.typed(weights.path)], out, expect=[0] if data.reads_all else [2]).code == 2:
        return
    walk.world.made.append(Made(out, "features", (*words, walk.typed(weights.path))))
    if weights.kind == "bundle" and weights.start is not None and weights.start.kind == "run":
        other = walk.name("features") + Path(out).suffix
        walk.succeed([*words, walk.typed(weights.start.path)], other)
        walk.must_be_equal("features", out, other)


def compare_results(walk: Walk) -> None:
    results = [made.path for made in walk.world.made if made.kind == "result"]
    chosen = walk.rng.sample(results, min(len(results), 2))
    out = walk.name("comparison")
    if walk.run(["compare", *map(walk.typed, chosen), *walk.maybe(0.5, "--allow-different-splits")], out).code == 0:
        walk.world.made.append(Made(out, "comparison", ()))


def check_data(walk: Walk) -> None:
    data, out = walk.pick(walk.world.data), walk.name("audit")
    ended = walk.run(f"data check --data {walk.typed(data.path)} --workers 1".split(), out, expect=[0, 1])
    walk.must(ended.code == 1 or data.reads_all, "the audit finds nothing wrong with films that cannot be read")
    walk.world.made.append(Made(out, "audit", ()))
    walk.shell.run("data", "stats", "--data", walk.typed(data.path), expect=[0])


# Detection


def _fit_words(walk: Walk) -> tuple[list[str], Weights] | None:
    """A `detect fit` without its --out, and the detector it would make."""
    world = walk.world
    weights = walk.pick([*world.runs, *world.runs, *world.bundles]) if walk.rng.random() < 0.85 else None
    fitting = [data for data in world.data if weights is None or data.fit in (None, weights.fit)]
    if not fitting:
        return None
    data = walk.pick(fitting)
    split, method = walk.split_for(data), walk.pick(sorted(DETECTORS))
    start = walk.typed(weights.path) if weights else "random"
    words = f"detect fit --weights {start} --data {walk.typed(data.path)} --method {method}".split()
    words += settings("false_alarms=0.35", f"held_out={walk.pick([0.3, 0.5])}", f"seed={walk.rng.randrange(2)}")
    words += settings(f"adapt.epochs={walk.pick([0, 1])}") if method == "afire" else []
    words += settings("train.epochs=2") if "train" in DETECTORS[method].Settings.model_fields else []
    words += [] if weights else [*SMALL_RANDOM, *settings("training.epochs=1", "training.batch_size=8")]
    words += ["--split", walk.typed(split.path)] if split else []
    fit = weights.fit if weights else data.fit or "squash"
    fitted, behind = world.detection_films(data, split), weights.seen if weights else frozenset()
    seen = None if behind is None else behind | fitted
    return words, Weights("", "detector", tuple(words), data, seen, fit, method, fitted, split, weights)


def fit_detector(walk: Walk) -> None:
    asked = _fit_words(walk)
    if asked is not None:
        words, detector = asked
        out = walk.name("detector")
        if walk.run(words, out).code == 0:
            walk.world.detectors.append(replace(detector, path=out))


def killed_fit(walk: Walk) -> None:
    """A fit that is killed and resumed ends as one that was not."""
    asked = _fit_words(walk)
    if asked is None:
        return
    words, detector = asked
    whole, out = walk.name("detector"), walk.name("killed")
    if walk.run(words, whole).code == 0:
        walk.world.detectors.append(replace(detector, path=whole))
        done = (
            walk.kill(words, out, walk.pick(["", "adapt/config.yaml", "adapt/checkpoints", "model.safetensors"])) == 0
        )
        finished = done or (walk.world.folder / out / "detector.json").exists()
        if not finished:
            walk.succeed([*words, "--resume"], out, replaces=True)
        walk.must_be_equal("detector", whole, out)


def evaluate_detector(walk: Walk) -> None:
    """Refused on films that fitted the detector, in whatever form they come."""
    world = walk.world
    model, data = walk.pick(world.detectors), walk.pick(world.data)
    split = walk.split_for(data)
    words = f"detect eval --model {walk.typed(model.path)} --data {walk.typed(data.path)} --bootstrap 20".split()
    words += ["--split", walk.typed(split.path)] if split else walk.maybe(0.3, "--protocol all")
    out = walk.name("detection")
    if walk.run(words, out).code == 2:
        return
    walk.must(data.fit in (None, model.fit), f"{model.path} was fitted on films of fit {model.fit}")
    tested = world.digests(data, pd.read_parquet(world.folder / out / "predictions.parquet"))
    known = len(tested & (model.fitted or frozenset()))
    walk.must(not known, f"{model.path} was tested on {known} films that fitted it")
    told = json.loads((world.folder / out / "result.json").read_text())["seen"]
    walk.must_say(told["fit"], tested, model.fitted)
    walk.must_say(told["pretraining"], tested, frozenset() if model.start is None else model.start.seen)
    world.made.append(Made(out, "result", tuple(words)))


def run_detector(walk: Walk) -> None:
    """Every film once, with the score that Python gives; also after a kill."""
    world = walk.world
    model, source = walk.pick(world.detectors), walk.pick(world.sources)
    folder = f"{source.folder}/images" if source.layout == "phantom" else source.folder
    words = f"detect run {walk.typed(folder)} --model {walk.typed(model.path)} --workers 1".split()
    words += ["--batch", walk.pick(["5", "32"]), *walk.maybe(0.7, "--no-pictures")]
    out = walk.name("report")
    walk.succeed(words, out)
    _check_report(walk, out, model, source)
    world.made.append(Made(out, "report", tuple(words)))
    if walk.rng.random() < 0.4:
        killed = walk.name("report")
        walk.kill(words, killed, walk.pick(["", "results.jsonl"]))
        begun = (world.folder / killed / "results.jsonl").exists()
        walk.succeed([*words, *(["--resume"] if begun else [])], killed, replaces=True)
        walk.must_be_equal("report", out, killed)


def _check_report(walk: Walk, out: str, model: Weights, source: Source) -> None:
    table = pd.read_csv(walk.world.folder / out / "results.csv", dtype={"file": str})
    table["film"] = [f"images/{name}" if source.layout == "phantom" else name for name in table["file"]]
    walk.must(sorted(table["film"]) == sorted(source.films), f"{out} does not have every film once")
    unreadable = table["film"][table["status"] == "unreadable"]
    walk.must(sorted(unreadable) == sorted(source.unreadable), f"{out} calls {list(unreadable)} unreadable")
    scored = table[table["status"] == "scored"].head(8)
    if len(scored) == 0:
        return
    detector = walk.world.folder / model.path
    found = afire.load(detector, device="cpu").detect(
        [walk.world.folder / source.folder / film for film in scored["film"]]
    )
    walk.must(np.allclose(found.score, scored["score"], rtol=1e-4, atol=1e-4), f"{out} has other scores than Python")
    clear = np.abs(found.score - load_detector(detector).threshold) > _CLOSE
    walk.must(list(found.alarm[clear]) == list(scored["alarm"][clear]), f"{out} flags other films than Python")


def has_drawn_test_films(detector: Weights) -> bool:
    """Whether its test films are a phantom's, which are easily replaced by others."""
    return detector.split is not None and detector.data.source.layout == "phantom"


def other_test_films(walk: Walk) -> None:
    """Weights and thresholds do not change when test films do: nobody has looked at them."""
    world = walk.world
    detector = walk.pick([model for model in world.detectors if has_drawn_test_films(model)])
    assert detector.split is not None
    test = world.subset(detector.split.data, detector.split, "test")["image"].astype(str)
    source = with_other_films(walk.rng, world.folder, detector.data.source, walk.name("films"), list(test))
    walk.shell.note(
        f"copy {detector.data.source.folder} to {source.folder}, with other pixels in {len(test)} test films"
    )
    world.sources.append(source)
    old, new = (f"{folder}/manifest.parquet" for folder in (detector.data.source.folder, source.folder))
    if detector.data.fit:
        old, new = detector.data.path, _packed_again(walk, detector.data, {walk.typed(old): walk.typed(new)})
    out = walk.name("detector")
    walk.succeed([walk.typed(new) if word == walk.typed(old) else word for word in detector.words], out)
    models = [load_detector(world.folder / path) for path in (detector.path, out)]
    thresholds, hashes = ({getattr(model, name) for model in models} for name in ("threshold", "weights_hash"))
    walk.must(len(thresholds) == 1, f"the threshold of {out} is another, with other test films: {thresholds}")
    walk.must(len(hashes) == 1, f"the weights of {out} are others, with other test films")


def _packed_again(walk: Walk, pack: Data, renamed: dict[str, str]) -> str:
    out = walk.name("pack")
    words = pack.words or next(data.words for data in walk.world.data if data.source is pack.source and data.words)
    walk.succeed([renamed.get(word, word) for word in words], out)
    return out


# Export


def export_bundle(walk: Walk) -> None:
    """A bundle gives the outputs of what it was made of."""
    world = walk.world
    weights = walk.pick([*world.runs, *world.detectors])
    own = [model for model in world.detectors if model.start == weights and "adapt.epochs=1" not in model.words]
    detector = walk.pick(own) if own and walk.rng.random() < 0.5 else None
    words = ["export", walk.typed(weights.path), *(["--detector", walk.typed(detector.path)] if detector else [])]
    out = walk.name("bundle")
    if walk.run(words, out).code == 2:
        return
    bundle = Weights(out, "bundle", tuple(words), weights.data, None, weights.fit, weights.method, start=weights)
    world.bundles.append(bundle)
    source = weights.data.source
    films = [world.folder / source.folder / name for name, film in source.films.items() if film.readable][:6]
    _check_same_outputs(walk, [weights.path, out], films, detects=weights.kind == "detector")
    if detector is not None:
        _check_same_outputs(walk, [detector.path, out], films, detects=True)


def _check_same_outputs(walk: Walk, paths: Sequence[str], films: Sequence[Path], detects: bool) -> None:
    first, second = (afire.load(walk.world.folder / path, device="cpu") for path in paths)
    if "alone" not in repr(first) + repr(second):  # some detectors have networks of their own and encode nothing
        same = bool((first.embed(films) == second.embed(films)).all())
        walk.must(same, f"{' and '.join(paths)} embed films differently")
    if detects:
        ours, theirs = first.detect(films), second.detect(films)
        for name in ("score", "p_value", "heatmap"):
            same = np.array_equal(getattr(ours, name), getattr(theirs, name))
            walk.must(same, f"{' and '.join(paths)} give another {name}")


def export_format(walk: Walk) -> None:
    """Other libraries; the command itself compares their outputs with ours."""
    weights = walk.pick([*walk.world.runs, *walk.world.bundles])
    out = walk.name("format")
    words = ["export", walk.typed(weights.path), "--format", walk.pick(["hf", "hf", "torch"])]
    if walk.run(words, out).code == 0:
        walk.world.made.append(Made(out, "format", ()))


def verify_bundle(walk: Walk) -> None:
    walk.shell.run("verify", walk.typed(walk.pick(walk.world.bundles).path), expect=[0])

"""The study behind docs/results.md: one pre-training per seed and method on ChildCXR and NIH normals, then every task.

    python benchmarks/study.py --data DATA --out study          # DATA holds childcxr, nih and shenzhen
    python benchmarks/study.py --data DATA --out study --plan   # only print the commands

Every step is an `afire` command; finished steps are skipped, interrupted ones continue with --resume, so a kill loses
little. Settings come from study.yaml. `compare/` holds the tables, from which benchmarks/study_tables.py makes those of
the page.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from steps import ENVIRONMENT, is_finished, merged

from afire.studies.steps import Command, Ended, Step, log_steps, run_steps

HERE = Path(__file__).parent
SETS = ("childcxr", "nih", "shenzhen")
SHARES = {"childcxr": ("--val", "0.2"), "nih": ("--val", "0.2"), "shenzhen": ("--test", "0.4", "--val", "0.25")}
PIXELS = 128
TRIVIAL = ("metadata", "area", "sharpness")
RESUMABLE = ("pretrain", "finetune", "segment", "detect fit")


@dataclass(frozen=True)
class Planned:
    """One command. It is finished when ``marker`` exists, and may start when all of ``needs`` are finished."""

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...]
    marker: str  # relative to the study's folder

    @property
    def resumable(self) -> bool:
        return any(" ".join(self.words).startswith(kind) for kind in RESUMABLE)


def steps(data: Path, plan: dict[str, Any], pixels: int = PIXELS) -> Iterator[Planned]:
    """All steps in an order in which they can run."""
    for name in SETS:
        kind = "lungmasks" if name == "shenzhen" else name
        build = ("data", "build", kind, "--root", str(data / name), "--out", f"{name}.parquet")
        yield Planned(f"build-{name}", build, (), f"{name}.parquet")
        split = ("data", "split", "--data", f"{name}.parquet", *SHARES[name], "--out", f"splits/{name}")
        yield Planned(f"split-{name}", split, (f"build-{name}",), f"splits/{name}/split.json")
        yield _pack(name, f"build-{name}", pixels)
    join = ["data", "join", "--out", "both.parquet"]
    for name in ("childcxr", "nih"):
        join += ["--data", f"{name}.parquet", "--split", f"splits/{name}/split.json"]
    yield Planned("join", tuple(join), ("split-childcxr", "split-nih"), "both.parquet")
    yield _pack("both", "join", pixels)
    split = ("data", "split", "--data", "packs/both", "--out", "splits/both")
    yield Planned("split-both", split, ("pack-both",), "splits/both/split.json")
    starts = [Start("random", "random weights", "random", _network(plan), ())]
    for name, method in plan["methods"].items():
        yield from _pretrain(name, method["settings"], plan)
        needs = tuple(f"pretrain-{name}-{seed}" for seed in plan["seeds"])
        starts.append(Start(name, method["title"], f"runs/{name}-{{seed}}", (), needs))
    for task in (_probe, _finetune, _segment, _detect):  # task by task: a study that is stopped has whole tables
        for start in starts:
            yield from task(start, plan)
    yield from _comparisons(plan)


def _pack(name: str, needs: str, pixels: int) -> Planned:
    words = ("data", "pack", "--data", f"{name}.parquet", "--out", f"packs/{name}", "--size", str(pixels))
    return Planned(f"pack-{name}", words, (needs,), f"packs/{name}/pack.json")


def _pretrain(name: str, settings: dict[str, Any], plan: dict[str, Any]) -> Iterator[Planned]:
    changes = _flat(merged(merged(plan["schedule"], plan["chosen"]), settings))
    for seed in plan["seeds"]:
        run = f"runs/{name}-{seed}"
        words: tuple[str, ...] = ("pretrain", "--data", "packs/both", "--split", "splits/both/split.json")
        words += ("--preset", plan["preset"], *_sets(changes), "--seed", str(seed), "--out", run)
        yield Planned(f"pretrain-{name}-{seed}", words, ("split-both",), f"{run}/summary.json")


@dataclass(frozen=True)
class Start:
    """Weights that every task begins with."""

    name: str
    title: str
    weights: str
    network: tuple[str, ...]  # settings for random weights; a run brings its own
    needs: tuple[str, ...]

    def words(self, place: str) -> tuple[str, ...]:
        data = ("--data", f"packs/{place}", "--split", f"splits/{place}/split.json")
        return ("--weights", self.weights, *self.network, *data)

    def ready(self, place: str) -> tuple[str, ...]:
        return (*self.needs, f"pack-{place}", f"split-{place}")


def _probe(start: Start, plan: dict[str, Any]) -> Iterator[Planned]:
    out = f"results/probe-{start.name}"
    words = ("probe", *start.words("childcxr"), *_seeds(plan, "probe"), "--labels", "abnormal")
    words += ("--fraction", "1,10,100", "--no-cache", "--out", out, *(("--name", start.title) if start.title else ()))
    yield Planned(f"probe-{start.name}", words, start.ready("childcxr"), f"{out}/100pct/result.json")
    if start.name == "random":
        for trivial in TRIVIAL:
            yield from _probe(Start(trivial, "", trivial, (), ()), plan)


def _finetune(start: Start, plan: dict[str, Any]) -> Iterator[Planned]:
    """All labels, and few of them, for which an epoch has more than one step."""
    for kind, fractions, marker in (("finetune", "100", ""), ("finetune-few", "1,10", "10pct/")):
        out = f"results/{kind}-{start.name}"
        words = ("finetune", *start.words("nih"), "--recipe", "nih14", "--fraction", fractions)
        words += (*_seeds(plan, kind), *_sets(plan[kind]), "--name", start.title, "--out", out)
        yield Planned(f"{kind}-{start.name}", words, start.ready("nih"), f"{out}/{marker}result.json")


def _segment(start: Start, plan: dict[str, Any]) -> Iterator[Planned]:
    out = f"results/segment-{start.name}"
    words = ("segment", *start.words("shenzhen"), "--recipe", "lungs", *_seeds(plan, "segment"))
    words += (*_sets(plan["segment"]), "--name", start.title, "--out", out)
    yield Planned(f"segment-{start.name}", words, start.ready("shenzhen"), f"{out}/result.json")


def _detect(start: Start, plan: dict[str, Any]) -> Iterator[Planned]:
    """On each set a detector for each seed, and one evaluation of them all."""
    for place in SETS:
        models: list[str] = []
        for seed in plan["seeds"]:
            out = f"detectors/{place}-{start.name}-{seed}"
            scratch = start.weights == "random"
            epochs = f"training.epochs={plan['scratch'][place]}" if scratch else f"adapt.epochs={plan['adapt'][place]}"
            words = tuple(word.replace("{seed}", str(seed)) for word in start.words(place))
            words = ("detect", "fit", *words, "--seed", str(seed), "--set", epochs, "--out", out)
            yield Planned(f"fit-{place}-{start.name}-{seed}", words, start.ready(place), f"{out}/detector.json")
            models += ["--model", out]
        out = f"results/detect-{place}-{start.name}"
        fitted = tuple(f"fit-{place}-{start.name}-{seed}" for seed in plan["seeds"])
        words = ("detect", "eval", *models, *start.words(place)[-4:], "--name", start.title, "--out", out)
        yield Planned(f"eval-{place}-{start.name}", words, fitted, f"{out}/result.json")


def _comparisons(plan: dict[str, Any]) -> Iterator[Planned]:
    """Tables of each task: random weights first, which the others are compared with."""
    names = ("random", *plan["methods"])
    for task in ("probe", "finetune", "finetune-few", "segment", *(f"detect-{place}" for place in SETS)):
        rows = [f"{task}-{name}" for name in (*names, *(TRIVIAL if task == "probe" else ()))]
        words = ("compare", *[f"results/{row}" for row in rows], "--out", f"compare/{task}")
        needs = tuple(row.replace("detect-", "eval-") for row in rows)
        yield Planned(f"compare-{task}", words, needs, f"compare/{task}/comparison.md")


def _network(plan: dict[str, Any]) -> tuple[str, ...]:
    """The chosen network and image, for weights that no run has made."""
    changes = [text for text in _flat(plan["chosen"]) if text.startswith(("encoder", "image"))]
    return ("--preset", plan["preset"], *_sets(changes))


def _seeds(plan: dict[str, Any], task: str) -> tuple[str, str]:
    return "--seeds", ",".join(map(str, plan["task_seeds"].get(task, plan["seeds"])))


def _flat(settings: dict[str, Any]) -> list[str]:
    return [f"{section}.{key}={json.dumps(v)}" for section, values in settings.items() for key, v in values.items()]


def _sets(changes: list[str]) -> tuple[str, ...]:
    return tuple(word for change in changes for word in ("--set", change.replace('"', "")))


class StudyStep(Step):
    """A command of the study, in its folder; ``times.jsonl`` tells what every start of it took."""

    def __init__(self, planned: Planned, out: Path) -> None:
        self.planned, self.out = planned, out
        self.name, self.needs = planned.name, planned.needs
        self.log = out / "logs" / f"{planned.name}.log"
        self.time = ""

    def is_done(self) -> bool:
        marker = self.out / self.planned.marker
        return is_finished(marker) if marker.name == "summary.json" else marker.exists()

    def is_begun(self) -> bool:
        return self.planned.resumable and self.log.exists()

    def command(self, slot: int) -> Command:
        words = (*self.planned.words, *(("--resume",) if self.is_begun() else ()))
        lock = self.out / "locks" / self.name
        return Command(words, self.log, lock, folder=self.out, environment=ENVIRONMENT)

    def ended(self, how: Ended) -> bool:
        minutes = how.processor_seconds / 60
        with (self.out / "times.jsonl").open("a", encoding="utf-8") as times:
            times.write(json.dumps({"step": self.name, "core_minutes": round(minutes, 2), "code": how.code}) + "\n")
        self.time = f"{minutes:.1f} core-minutes in {how.seconds / 60:.1f}"
        return how.code == 0 and self.is_done()

    def summary(self) -> str:
        return f"done; {self.time}"


def run_study(planned: list[Planned], out: Path, jobs: int) -> int:
    """Run the steps side by side, each once, in the order of their needs; an exit code."""
    out.mkdir(parents=True, exist_ok=True)
    outcome = run_steps([StudyStep(step, out) for step in planned], log_steps(len(planned)), jobs=jobs)
    if outcome.signal:
        return 128 + outcome.signal
    return 1 if outcome.failed or outcome.skipped else 0


def main() -> int:
    words = argparse.ArgumentParser(description="Run the study of docs/results.md.")
    words.add_argument("--data", type=Path, required=True, help="folder with childcxr, nih and shenzhen")
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--config", type=Path, default=HERE / "study.yaml")
    words.add_argument("--only", default="", help="beginnings of names of steps, by commas, and what they need")
    words.add_argument("--jobs", type=int, default=2)
    words.add_argument("--plan", action="store_true")
    given = words.parse_args()
    plan = yaml.safe_load(given.config.read_text(encoding="utf-8"))
    todo = list(steps(given.data.resolve(), plan))
    if given.only:
        wanted = {step.name for step in todo if step.name.startswith(tuple(given.only.split(",")))}
        for step in reversed(todo):  # needs come before what needs them
            wanted |= set(step.needs) if step.name in wanted else set()
        todo = [step for step in todo if step.name in wanted]
    if given.plan:
        for step in todo:
            print("afire", shlex.join(step.words))
        return 0
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return run_study(todo, given.out, given.jobs)


if __name__ == "__main__":
    sys.exit(main())

"""A recorded search for pre-training settings, evaluated only on films of the official training lists.

    afire data join --data childcxr.parquet --data nih.parquet --out both.parquet
    afire data pack --data both.parquet --out packs/both-128 --size 128          # and 192
    afire data split --data packs/both-128 --development --test 0.3 --out splits/both
    python benchmarks/search.py --packs packs/both- --split splits/both/development.json --out search

Each candidate of search.yaml is trained by `afire pretrain` on the development split's normal training films, with the
same number of films, or fewer if a step costs more, and evaluated on its held-out films: probes of ChildCXR with 1 and
10 % of the labels and of NIH's common findings, and detection without adaptation on both. A kill loses no finished
candidate. The table goes to OUT/search.json and OUT/search.md.
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from steps import ENVIRONMENT, is_finished, merged

from afire.report.table import number, table_of
from afire.studies.steps import Command, Ended, Event, Report, Step, log_steps, run_steps

HERE = Path(__file__).parent
SETS = ("childcxr", "nih")
FRACTIONS = (0.01, 0.1)
FEWEST_POSITIVES = 20  # of a NIH finding in the judged part; below, its AUC is noise
DRAWS = (0, 1, 2)  # of the labelled films
JUDGED = "judged.json"  # what is written last


@dataclass(frozen=True)
class Candidate:
    name: str
    title: str
    settings: dict[str, Any]
    pixels: int
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.name}-seed{self.seed}"


def arguments() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(description="Search settings on development films.")
    words.add_argument("--packs", required=True, help="packs of the joined sets without the pixels: packs/both-")
    words.add_argument("--split", type=Path, required=True)
    words.add_argument("--out", type=Path, required=True)
    words.add_argument("--candidates", type=Path, default=HERE / "search.yaml")
    words.add_argument("--only", default="", help="names of candidates, by commas")
    words.add_argument("--seeds", default="0")
    words.add_argument("--jobs", type=int, default=2)
    words.add_argument("--set", action="append", default=[], help="a setting for all, as in afire pretrain")
    words.add_argument("--judge", type=Path, help=argparse.SUPPRESS)  # a finished candidate, in a process of its own
    return words


def main() -> None:
    given = arguments().parse_args()
    if given.judge:
        judge(given.judge, Path(given.packs), given.split)
        return
    plan = yaml.safe_load(given.candidates.read_text(encoding="utf-8"))
    names = given.only.split(",") if given.only else list(plan["candidates"])
    seeds = [int(seed) for seed in given.seeds.split(",")]
    todo = [_candidate(plan, name, seed) for seed in seeds for name in names]
    given.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    trainings = [Train(candidate, plan, given) for candidate in todo]
    steps: list[Step] = [step for training in trainings for step in (training, Judge(training))]
    run_steps(steps, _tabulate(given.out, log_steps(len(steps))), jobs=given.jobs)


def _tabulate(out: Path, log: Report) -> Report:
    """The log, and the table anew with every candidate that is judged."""

    def report(event: Event) -> None:
        log(event)
        if isinstance(event.step, Judge) and event.kind in ("done", "before"):
            write_table(out)

    return report


def _candidate(plan: dict[str, Any], name: str, seed: int) -> Candidate:
    found = plan["candidates"][name]
    return Candidate(name, found["title"], found["settings"], found.get("pixels", 128), seed)


class Train(Step):
    """Pre-training of a candidate; ``seconds.json`` adds up the processor seconds of all its starts."""

    def __init__(self, candidate: Candidate, plan: dict[str, Any], given: argparse.Namespace) -> None:
        self.candidate, self.plan, self.given = candidate, plan, given
        self.name, self.folder = f"train {candidate.folder}", Path(given.out) / candidate.folder

    def is_done(self) -> bool:
        return (self.folder / JUDGED).exists() or is_finished(self.folder / "run" / "summary.json")

    def is_begun(self) -> bool:
        return (self.folder / "run" / "config.yaml").exists()

    def command(self, slot: int) -> Command:
        candidate, plan, given, folder = self.candidate, self.plan, self.given, self.folder
        folder.mkdir(parents=True, exist_ok=True)
        settings = folder / "settings.yaml"
        changes = merged(plan["base"], candidate.settings)
        settings.write_text(yaml.safe_dump(changes, sort_keys=False), encoding="utf-8")
        about = {"name": candidate.name, "title": candidate.title, "seed": candidate.seed}
        (folder / "candidate.json").write_text(json.dumps(about))
        words = ["pretrain", "--data", f"{given.packs}{candidate.pixels}", "--split", given.split]
        words += ["--preset", plan["preset"], "--config", settings, "--seed", candidate.seed, "--out", folder / "run"]
        words += ["--set", "run.picture_epochs=0", "--set", "run.keep_checkpoints=1"]
        words += [*[word for text in given.set for word in ("--set", text)], *(["--resume"] if self.is_begun() else [])]
        return Command([str(word) for word in words], folder / "log.txt", folder, environment=ENVIRONMENT)

    def ended(self, how: Ended) -> bool:
        file = self.folder / "seconds.json"
        earlier = json.loads(file.read_text()) if file.exists() else 0.0
        file.write_text(json.dumps(round(earlier + how.processor_seconds, 1)))
        return how.code == 0 and self.is_done()


class Judge(Step):
    """Probes and detection of a trained candidate: this file with ``--judge``, in a process of its own."""

    def __init__(self, train: Train) -> None:
        self.train, self.name, self.needs = train, f"judge {train.candidate.folder}", (train.name,)

    def is_done(self) -> bool:
        return (self.train.folder / JUDGED).exists()

    def command(self, slot: int) -> Command:
        given, folder = self.train.given, self.train.folder
        pack = f"{given.packs}{self.train.candidate.pixels}"
        words = ["--packs", pack, "--split", str(given.split), "--out", str(given.out), "--judge", str(folder)]
        return Command(words, folder / "log.txt", folder, module=str(HERE / "search.py"), environment=ENVIRONMENT)


def judge(folder: Path, pack: Path, split_file: Path) -> None:
    """Probe and detect with a trained candidate on the held-out development films of each set."""
    import tempfile

    from afire.data.pack import open_films
    from afire.data.splits import make_split, read_split
    from afire.detect.fit import unadapted
    from afire.detect.localise import score_films
    from afire.settings import load_config
    from afire.studies.ablation_grid import SCORES, detection_rows
    from afire.tasks.metrics import auc
    from afire.tasks.probe import ProbeTask, run_probe
    from afire.training.batches import normal_training_rows
    from afire.weights import open_weights

    logging.basicConfig(level=logging.WARNING)
    run = folder / "run"
    image = load_config(file=run / "config.yaml").image
    films = open_films(pack, None, image.size, image.fit, image.voi)
    whole = read_split(split_file)
    whole.rows(films.manifest)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in SETS:
            own = {p: [one for one in who if one.startswith(f"{name}:")] for p, who in whole.patients.items()}
            split = make_split(films.manifest, own, whole.scope, {**whole.method, "set": name})
            test = split.rows(films.manifest)["test"]
            if name == "nih":
                table = films.manifest.table.iloc[test]
                labels = [label for label in films.manifest.labels if table[f"label:{label}"].sum() >= FEWEST_POSITIVES]
                task = ProbeTask(str(run), pack, [0], split=split, labels=labels, cache=Path(cache))
                [(_, (result, _))] = list(run_probe(task))
                found["nih probe"] = result.metrics["auc"].mean
            else:
                task = ProbeTask(str(run), pack, DRAWS, split=split, labels=["abnormal"], cache=Path(cache))
                for fraction, (result, _) in run_probe(task, FRACTIONS):
                    found[f"{name} probe {100 * fraction:g} %"] = result.metrics["auc"].mean
            normal, _ = normal_training_rows(films.manifest, split)
            rows, abnormal = detection_rows(films, test)
            scores, _ = score_films(unadapted(open_weights(run), films, normal), films, rows, "test films")
            found |= {f"{name} detect {kind}": auc(scores[kind], abnormal) for kind in SCORES if kind in scores}
    summary = json.loads((run / "summary.json").read_text())
    seconds = json.loads((folder / "seconds.json").read_text())
    facts = {"found": found, "seconds": seconds, "health": summary["health"], "losses": summary["losses"]}
    (folder / JUDGED).write_text(json.dumps(facts, indent=2))


def criterion(found: dict[str, float]) -> dict[str, float]:
    """Three numbers of equal weight: few-label ChildCXR probe, NIH probe, detection by each set's best score."""
    probe = sum(found[f"childcxr probe {100 * fraction:g} %"] for fraction in FRACTIONS) / len(FRACTIONS)
    detection = [max(value for key, value in found.items() if key.startswith(f"{name} detect")) for name in SETS]
    parts = {"childcxr probe": probe, "nih probe": found["nih probe"], "detection": sum(detection) / len(SETS)}
    return {**parts, "mean": sum(parts.values()) / len(parts)}


def write_table(out: Path) -> None:
    """All judged candidates, best first, as JSON and Markdown."""
    rows = []
    for path in sorted(out.glob(f"*/{JUDGED}")):
        facts, who = json.loads(path.read_text()), json.loads((path.parent / "candidate.json").read_text())
        rows.append({**who, "criterion": criterion(facts["found"]), **facts})
    rows.sort(key=lambda row: -row["criterion"]["mean"])
    (out / "search.json").write_text(json.dumps(rows, indent=1))
    header = ["candidate", "seed", "ChildCXR probe, 1 and 10 %", "NIH probe", "detection", "mean", "core-minutes"]
    lines = [
        [row["title"], str(row["seed"]), *map(number, row["criterion"].values()), number(row["seconds"] / 60, 1)]
        for row in rows
    ]
    (out / "search.md").write_text(table_of(header, lines).markdown() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

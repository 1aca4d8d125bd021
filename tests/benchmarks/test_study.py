"""The search and the study behind the results page: what they run, in which order, and what they make of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import search  # noqa: E402
import study  # noqa: E402
import study_tables  # noqa: E402
from steps import merged  # noqa: E402

from afire.settings import changed, load_config  # noqa: E402
from afire.studies.steps import Ended  # noqa: E402
from afire.tasks.metrics import auc  # noqa: E402
from afire.tasks.results import Result, RunResult, estimate, write_result  # noqa: E402

PLAN = yaml.safe_load((ROOT / "benchmarks" / "study.yaml").read_text(encoding="utf-8"))
SEARCHES = {
    name: yaml.safe_load((ROOT / "benchmarks" / f"{name}.yaml").read_text(encoding="utf-8"))
    for name in ("search", "search_long")
}


def test_every_step_comes_after_what_it_needs_and_pretraining_sees_training_films_only() -> None:
    known: set[str] = set()
    for step in study.steps(Path("data"), PLAN):
        assert set(step.needs) <= known and step.name not in known
        known.add(step.name)
        if step.words[0] == "pretrain":
            assert step.words[step.words.index("--split") + 1] == "splits/both/split.json"
        elif step.words[0] not in ("data", "compare"):
            assert "--split" in step.words
    assert {f"pretrain-{name}-{seed}" for name in PLAN["methods"] for seed in PLAN["seeds"]} <= known


@pytest.mark.parametrize(
    ("which", "name"), [(which, name) for which in SEARCHES for name in SEARCHES[which]["candidates"]]
)
def test_candidates_are_settings(which: str, name: str) -> None:
    plan = SEARCHES[which]
    found = plan["candidates"][name]
    config = changed(load_config(plan["preset"]), merged(plan["base"], found["settings"]))
    assert config.image.size == found.get("pixels", 128)


@pytest.mark.parametrize("name", PLAN["methods"])
def test_methods_are_settings(name: str) -> None:
    settings = merged(merged(PLAN["schedule"], PLAN["chosen"]), PLAN["methods"][name]["settings"])
    by_words = load_config(
        PLAN["preset"], overrides=[word for word in study._sets(study._flat(settings)) if "=" in word]
    )
    assert by_words == changed(load_config(PLAN["preset"]), settings)


# Stands in for afire: makes its marker, or fails; notes that it was called.
PROGRAM = """
import pathlib, sys
name, marker = sys.argv[-2:]
with open("called", "a") as stream:
    stream.write(name + chr(10))
if pathlib.Path("fails").exists() and pathlib.Path("fails").read_text() == name:
    sys.exit(3)
pathlib.Path(marker).write_text("{}")
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def replaced(command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", PROGRAM, *command[-2:]], **options)

    monkeypatch.setattr("afire.studies.steps.subprocess.Popen", replaced)


def chain() -> list[study.Planned]:
    needs: dict[str, tuple[str, ...]] = {"a": (), "b": ("a",), "c": ("b",), "d": ("a",), "e": ("c", "d")}
    return [study.Planned(name, (name, f"{name}.json"), need, f"{name}.json") for name, need in needs.items()]


def called(folder: Path) -> list[str]:
    return (folder / "called").read_text().split()


@pytest.mark.usefixtures("stand_in")
def test_a_study_runs_each_step_once_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "fails").write_text("c")
    assert study.run_study(chain(), tmp_path, 2) == 1 and sorted(called(tmp_path)) == ["a", "b", "c", "d"]
    (tmp_path / "fails").unlink()
    assert study.run_study(chain(), tmp_path, 2) == 0 and called(tmp_path)[4:] == ["c", "e"]
    assert study.run_study(chain(), tmp_path, 2) == 0 and len(called(tmp_path)) == 6
    times = [json.loads(line) for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert sorted(one["step"] for one in times) == ["a", "b", "c", "c", "d", "e"]
    assert [one["code"] for one in times if one["step"] == "c"] == [3, 0]


def test_a_stopped_pretraining_is_not_finished(tmp_path: Path) -> None:
    step = study.StudyStep(study.Planned("pretrain-x-0", ("pretrain",), (), "summary.json"), tmp_path)
    for status, done in (("stopped", False), ("finished", True)):
        (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
        assert step.is_done() is done


def test_a_candidate_is_trained_then_judged(tmp_path: Path) -> None:
    words = ["--packs", "p-", "--split", "s.json", "--out", str(tmp_path)]
    given = search.arguments().parse_args(words)
    training = search.Train(search.Candidate("x", "x", {}, 128, 0), SEARCHES["search"], given)
    judge = search.Judge(training)
    assert (
        judge.needs == (training.name,) and not training.is_begun() and "--resume" not in training.command(0).arguments
    )
    (training.folder / "run").mkdir()
    (training.folder / "run" / "config.yaml").touch()
    assert training.command(0).arguments[-1] == "--resume"
    for _ in range(2):
        training.ended(Ended(143, 9.0, 60.0, stopped=True))
    assert json.loads((training.folder / "seconds.json").read_text()) == 120 and not training.is_done()
    command = judge.command(0)
    assert (
        command.module.endswith("search.py")
        and search.arguments().parse_args(command.arguments).judge == training.folder
    )
    (training.folder / "judged.json").write_text("{}")
    assert training.is_done() and judge.is_done()


def test_the_search_ranks_by_the_mean_of_three(tmp_path: Path) -> None:
    def found(probe: float, nih: float, detect: float) -> dict[str, Any]:
        low = {"childcxr detect gaussian": 0.5, "nih detect gaussian": 0.5}
        tops = {"childcxr detect surprise": detect, "nih detect surprise": 0.4}
        return {"childcxr probe 1 %": probe - 0.1, "childcxr probe 10 %": probe + 0.1, "nih probe": nih, **low, **tops}

    for name, values in {"worse": found(0.8, 0.6, 0.7), "better": found(0.8, 0.6, 0.9)}.items():
        folder = tmp_path / f"{name}-seed0"
        folder.mkdir()
        (folder / "candidate.json").write_text(json.dumps({"name": name, "title": name, "seed": 0}))
        judged = {"found": values, "seconds": 120, "health": ["green", ""], "losses": {}}
        (folder / "judged.json").write_text(json.dumps(judged))
    search.write_table(tmp_path)
    rows = json.loads((tmp_path / "search.json").read_text())
    assert [row["name"] for row in rows] == ["better", "worse"]
    assert rows[0]["criterion"]["detection"] == pytest.approx(0.7)  # the best score of each set: 0.9 and 0.5
    assert rows[0]["criterion"]["mean"] == pytest.approx(0.7)
    assert "| better | 0 | 0.800 | 0.600 | 0.700 | 0.700 | 2.0 |" in (tmp_path / "search.md").read_text()


def write_study(folder: Path, auc_of: dict[str, float]) -> None:
    """Probe results of made-up scores, one film a patient, two seeds; a score of 1 keeps the order of the truth."""
    generator = np.random.default_rng(0)
    truth = np.tile([0, 1], 60)
    noise = generator.normal(size=(2, 120))
    for name, strength in auc_of.items():
        frames, runs = [], []
        for seed in (0, 1):
            scores = strength * truth + noise[seed]
            frame = pd.DataFrame({"run": f"seed{seed}", "part": "test", "image": [f"{i}.png" for i in range(120)]})
            frame["patient"] = frame["image"]
            frames.append(frame.assign(**{"truth:abnormal": truth, "score:abnormal": scores}))
            metrics = {"auc": auc(scores, truth == 1), "accuracy": 0.5, "f1": 0.5}
            chosen = {"threshold": {"abnormal": 0.0}}
            runs.append(RunResult(f"seed{seed}", seed, None, "s", "w", {"test": 120}, chosen, metrics))
        metrics_of = {key: estimate([run.metrics[key] for run in runs]) for key in ("auc", "accuracy", "f1")}
        result = Result(
            *("probe", "linear", name, {"name": "x", "hash": "h"}, "s", "t", {"name": name, "hash": "w"}),
            *(["abnormal"], 1.0, {}, runs, metrics_of, {"abnormal": metrics_of}, {}, []),
        )
        write_result(folder / "results" / f"probe-{name}" / "100pct", result, pd.concat(frames, ignore_index=True))


def test_tables_name_the_difference_to_random_weights(tmp_path: Path) -> None:
    write_study(tmp_path, {"random": 0.2, "afire": 2.0, **dict.fromkeys(study.TRIVIAL, 0.2)})
    [found] = study_tables.rows_of(tmp_path, "probe", ["random", "afire"])
    lines = study_tables.table(found, ("auc", "accuracy", "f1")).markdown().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(row) for row in cells}) == 1
    names = [row[0] for row in cells[2:]]
    assert names == ["random", "afire", "*metadata only*", "*original area only*", "*sharpness only*"]
    ours = cells[3]
    gained = found.entries[1].result.metrics["auc"].mean - found.entries[0].result.metrics["auc"].mean
    assert gained > 0.2 and ours[4].startswith(f"+{gained:.3f} (+") and ours[5]
    assert cells[2][4:] == ["", ""] and cells[4][4].startswith("+0.000")
    numbers = study_tables.numbers_of({"probe": [found]})["probe 100 %"]
    assert numbers["test films"] == 120 and len(numbers["results"]["afire"]["auc"]["values"]) == 2
    study_tables.draw({"probe": [found]}, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 5000


def test_core_minutes_of_all_starts_of_a_step_add_up(tmp_path: Path) -> None:
    lines = [{"step": "a", "core_minutes": 1.5}, {"step": "b", "core_minutes": 1}, {"step": "a", "core_minutes": 2}]
    (tmp_path / "times.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert study_tables._times(tmp_path) == {"a": 3.5, "b": 1}


def test_the_results_page_has_every_mean_of_the_study() -> None:
    """After a study: ``python benchmarks/study_tables.py --study STUDY --json benchmarks/study.json``."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    numbers = json.loads((ROOT / "benchmarks" / "study.json").read_text(encoding="utf-8"))
    tasks = {task: part for task, part in numbers.items() if task != "core-minutes"}
    assert len(tasks) >= 10
    for task, part in tasks.items():
        for name, metrics in part["results"].items():
            means = [f"{one['mean']:.3f} ± {one['sd']:.3f}" for one in metrics.values()]
            assert any(line.startswith(f"| {name} | {' | '.join(means)} |") for line in page), (task, name, means)

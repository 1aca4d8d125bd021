"""From what steps write to rows of paper against ours: results are written here as the commands would.

Differences of protocol come from what was run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from afire.config import Config
from afire.files import write_json, write_text
from afire.settings import load_config, to_yaml
from afire.studies.reproduce_collect import (
    Difference,
    TargetReport,
    collect,
    pretraining_differences,
    seed_differences,
    setting_differences,
)
from afire.studies.reproduce_plan import Request, plan, possible_targets
from afire.studies.reproduce_sets import DATASETS, PAPER, TARGETS, Target
from afire.studies.steps import Outcome
from afire.tasks.results import Result, RunResult, estimate, to_json, write_result
from afire.tasks.settings import load_task_config


def result(task: str, metrics: dict[str, list[float]], config: dict[str, Any], folds: bool = False) -> Result:
    count = len(next(iter(metrics.values())))
    films = {"train": 700, "val": 100, "test": 200}
    runs = [
        RunResult(
            str(n), 0 if folds else n, n if folds else None, "s", "w", films, {}, {k: v[n] for k, v in metrics.items()}
        )
        for n in range(count)
    ]
    return Result(
        task=task,
        method="chosen score",
        name="AFiRe",
        data={"name": "films", "hash": "h", "size": 224},
        split_hash="s",
        test_hash="t",
        weights={"name": "w", "hash": "w", "report": ""},
        labels=["Mass", "Nodule"],
        fraction=1.0,
        config=config,
        runs=runs,
        metrics={name: estimate(values) for name, values in metrics.items()},
        per_label={},
        environment={},
        command=[],
        notes=["a note"],
    )


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    """NIH at the paper's scale, with the run of its pre-training."""
    targets, _ = possible_targets(TARGETS, DATASETS["nih"])
    write_text(tmp_path / "pretrain-0" / "config.yaml", to_yaml(load_config("paper")))
    write_json(tmp_path / "pretrain-0" / "data.json", {"used": 50, "films": 90, "source": "films", "hash": "h"})
    return Request(tmp_path, DATASETS["nih"], PAPER, targets, root=tmp_path)


def report(request: Request, target: Target, **outcome: Any) -> TargetReport:
    alone = replace(request, targets=(target,))
    done = {step.name: 1.0 for step in plan(alone)}
    (only,) = collect(alone, Outcome(**{"seconds": done, **outcome}), {})
    assert only.target == target
    return only


def settings(target: TargetReport) -> dict[str, tuple[str, str]]:
    return {difference.setting: (difference.paper, difference.ours) for difference in target.differences}


def test_transfer(request_: Request, tmp_path: Path) -> None:
    config = load_task_config("finetune", "nih14", overrides=["training.batch_size=64"]).model_dump()
    for percent, values in ((1, [0.6, 0.62, 0.64]), (10, [0.7, 0.7, 0.7]), (100, [0.8, 0.8, 0.8])):
        write_result(
            tmp_path / "finetune" / f"{percent}pct", result("finetune", {"auc": values}, config), pd.DataFrame()
        )
    folds = result("finetune", {"auc": [0.8, 0.9]}, config, folds=True)
    write_result(tmp_path / "finetune-folds", folds, pd.DataFrame())
    collected = report(request_, "table2")
    (block,) = collected.blocks
    assert list(block.columns.values()) == ["1 %", "10 %", "100 %", "folds (5; 2)"]
    ours = block.rows[0]
    assert ours.paper == pytest.approx({"1": 0.632, "10": 0.761, "100": 0.832, "folds": 0.845})
    assert ours.ours["1"].mean == pytest.approx(0.62) and ours.ours["folds"].mean == pytest.approx(0.85)
    assert {row.name for row in block.rows[1:]} >= {"DINO", "PCRL"} and not any(row.ours for row in block.rows[1:])
    differing = settings(collected)
    assert differing["finetune: folds"] == ("5", "2") and differing["finetune: batch size"] == ("128", "64")
    assert "finetune: seeds" not in differing and "finetune: labelling ratios" not in differing
    assert collected.pretraining[0].ours == "50 normal films of films" and "pre-trainings" not in differing
    write_text(tmp_path / "given" / "config.yaml", to_yaml(load_config("paper")))
    write_json(tmp_path / "given" / "data.json", {"used": 50, "films": 90, "source": "films", "hash": "h"})
    once = report(replace(request_, weights=tmp_path / "given"), "table2")
    assert settings(once)["pre-trainings"] == ("3, one for each seed", "1, the same for 3 seeds")


def test_detection(request_: Request, tmp_path: Path) -> None:
    metrics = {"auc": [0.7, 0.8, 0.9], "accuracy": [0.6, 0.6, 0.6], "f1": [0.5, 0.5, 0.5]}
    adapt = {"epochs": 4, "batch_size": 64, "learning_rate": 1e-4, "lesion": 1.0, "lesions": {"haze": 0.5}}
    config = {"false_alarms": 0.1, "fitted": [{"adapt": adapt}], "protocol": "official"}
    folder = tmp_path / "detect" / "result"
    write_result(folder, result("detect", metrics, config), pd.DataFrame())
    trivial = {name: to_json(vars(estimate([0.55]))) for name in metrics}
    numbers = {"films": {"normal": 20, "abnormal": 30}, "best_trivial": "blur"}
    write_json(folder / "detect.json", {**numbers, "rows": [{"name": "blur", "metrics": trivial}]})
    collected = report(request_, "table3")
    rows = collected.blocks[0].rows
    assert rows[0].paper == pytest.approx({"accuracy": 0.668, "auc": 0.682, "f1": 0.604})
    assert rows[0].ours["auc"].mean == pytest.approx(0.8) and rows[1].name == "best trivial detector: blur"
    differing = settings(collected)
    assert differing["lesions while adapting"] == ("haze 0", "haze 0.5")
    assert "batch of adaptation" not in differing and "20 normal and 30 abnormal" in differing["films"][1]
    assert collected.notes == ["a note"]


def test_ablation(request_: Request, tmp_path: Path) -> None:
    def row(name: str, place: int, paper: float, ours: float) -> dict[str, Any]:
        numbers = {f"{m}_{part}": ours for m in ("auc", "accuracy", "f1") for part in ("mean", "sd")}
        numbers |= {f"{m}_{part}": None for m in ("auc", "accuracy", "f1") for part in ("low", "high")}
        published = {f"paper_{m}": paper for m in ("auc", "accuracy", "f1")}
        values = {m: [ours] for m in ("auc", "accuracy", "f1")}
        return {"title": name, "tables": {"table1": place}, "seeds": [0], "values": values, **numbers, **published}

    rows = [row("second", 2, 0.8, 0.6), row("full", 1, 0.9, 0.7), {"tables": {"ours": 1}}]
    write_json(tmp_path / "tables" / "table1.json", {"rows": rows, "facts": {"caution": "look out"}, "notes": ["n"]})
    base = load_config("paper", overrides=["training.epochs=5"]).model_dump(exclude={"seed", "run"})
    films = {"normal": 50, "train": 70, "val": 10, "test": 20}
    write_json(tmp_path / "ablate" / "study.json", {"base": base, "data": {"name": "films"}, "films": films})
    collected = report(request_, "table1")
    assert [row.name for row in collected.blocks[0].rows] == ["1. full", "2. second"]
    assert collected.blocks[0].rows[1].paper["auc"] == 0.8 and collected.blocks[0].rows[1].ours["f1"].mean == 0.6
    assert collected.notes == ["look out", "n"] and collected.figures == [tmp_path / "figures" / "table1"]
    differing = settings(collected)
    assert differing["training"] == ("epochs 800", "epochs 5") and differing["seeds"] == ("3", "1")
    assert not collected.pretraining  # its trials have pre-trainings of their own


def test_what_is_not_finished_says_why(request_: Request) -> None:
    assert report(request_, "table3", seconds={}, failed={"pack": "no such film. (exit code 2)"}).unfinished == (
        "step films: not run yet"
    )
    done = {"films": 1.0}
    collected = report(request_, "table3", seconds=done, failed={"pack": "no such film. (exit code 2)"})
    assert collected.unfinished == "step pack: no such film. (exit code 2)" and not collected.blocks
    impossible = collect(replace(request_, targets=()), Outcome(), {"fig-cam": "it has no boxes"})
    assert [target.unfinished for target in impossible] == ["not possible: it has no boxes"]


def write_run(folder: Path, config: Config, films: int, source: str, processes: int) -> Path:
    write_text(folder / "config.yaml", to_yaml(config))
    write_json(folder / "data.json", {"used": films, "films": films, "source": source, "hash": "h"})
    write_json(folder / "summary.json", {"processes": processes})
    return folder


def test_the_papers_own_run_differs_in_nothing(tmp_path: Path) -> None:
    assert pretraining_differences(write_run(tmp_path, load_config("paper"), 81117, "MIMIC-CXR-JPG", 8)) == []
    assert seed_differences([0, 1, 2]) == []


def test_each_difference_has_both_sides(tmp_path: Path) -> None:
    config = load_config("paper", overrides=["training.epochs=100", "encoder.drop_path=0.1", "training.batch_size=128"])
    differences = pretraining_differences(write_run(tmp_path, config, 1349, "childcxr", 2))
    assert differences == [
        Difference("pre-training films", "81,117 normal films of MIMIC-CXR-JPG", "1,349 normal films of childcxr"),
        Difference("encoder", "drop_path 0", "drop_path 0.1"),
        Difference("training", "epochs 800", "epochs 100"),
        Difference("films in a step", "512", "128"),
    ]


def test_how_a_step_is_computed_is_no_difference() -> None:
    config = load_config(
        "paper", overrides=["training.precision=fp32", "encoder.gradient_checkpointing=true", "training.accumulate=8"]
    )
    assert setting_differences(config) == []
    assert seed_differences([0, 0]) == [Difference("seeds", "3", "1")]

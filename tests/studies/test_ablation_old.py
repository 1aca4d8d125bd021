"""Studies that an earlier version began, when trials were called cells, are read and gone on with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afire.config import Config
from afire.files import read_json, write_json
from afire.studies.ablation_grid import TRIAL, Trial, choose_rows, open_study, plan_trials
from afire.studies.ablation_run import Workers, run_trials

OLD = Path(__file__).parents[1] / "fixtures" / "v0" / "ablation"
Settings = Callable[..., Config]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """``full`` was finished there, ``long`` stopped in its fourth epoch of 24."""
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def planned(old: Path, base: Config) -> tuple[Any, list[Trial]]:
    study = open_study(old / "pack", old / "study", base, labels=["abnormal"])
    return study, plan_trials(study, choose_rows(str(old / "long.yaml")), [0])


@pytest.mark.slow
def test_a_begun_study_goes_on(old: Path, smallest: Settings) -> None:
    study, (full, long) = planned(old, smallest())
    assert (full.state(), long.state()) == ("finished", "begun") and full.folder.parent.name == "cells"
    before = (long.folder / "run" / "metrics.jsonl").read_text()
    outcome = run_trials(study, [long], Workers(1, 1, "cpu"), lambda _: None)
    assert list(outcome.seconds) == ["long, seed 0"], outcome.failed
    assert (long.folder / TRIAL).exists() and long.folder.parent.name == "cells"
    after = (long.folder / "run" / "metrics.jsonl").read_text()
    assert after.startswith(before) and len(after) > len(before)  # gone on with, not begun anew


def test_a_setting_that_came_since_changes_nothing(old: Path, smallest: Settings) -> None:
    """A version without ``lesions.fade`` gave its trials other keys; they are known by their settings."""
    (folder,) = (old / "study" / "cells").glob("full-*")
    folder = folder.rename(folder.with_name("full-seed0-0123456789ab"))
    for path, section, key in (
        (folder / "request.json", "config", "0123456789ab"),
        (folder / "cell.json", "config", "0123456789ab"),
        (old / "study" / "study.json", "base", None),
    ):
        record = read_json(path)
        del record[section]["lesions"]["fade"]
        write_json(path, record | ({"key": key} if key else {}))
    _, (full, _) = planned(old, smallest())
    assert full.folder == folder and full.state() == "finished"

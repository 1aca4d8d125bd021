"""Trials: shared where settings come out the same, kept apart where anything that decides them differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from afire.config import Config
from afire.errors import UserError
from afire.files import write_json
from afire.studies.ablation_grid import TRIAL, begin_study, choose_rows, open_study, plan_trials
from afire.studies.ablation_trial import CLOCK, TrialClock
from tests.studies.conftest import draw_pack

Settings = Callable[..., Config]


def test_rows_of_the_same_settings_share_their_trials(packed: Path, smallest: Settings, tmp_path: Path) -> None:
    study = open_study(packed, tmp_path / "out", smallest())
    trials = plan_trials(study, choose_rows("head-shared,views-1,no-category"), [0, 1])
    assert [(trial.rows, trial.seed) for trial in trials] == [
        (("full", "head-shared", "views-1"), 0),
        (("no-category",), 0),
        (("full", "head-shared", "views-1"), 1),
        (("no-category",), 1),
    ]
    assert len({trial.key for trial in trials}) == 4


def test_a_trial_keeps_its_folder_whichever_row_asks(packed: Path, smallest: Settings, tmp_path: Path) -> None:
    study = open_study(packed, tmp_path / "out", smallest("head.form=per_position"))
    rows = choose_rows("head-shared,clusters-64")
    first = next(trial for trial in plan_trials(study, rows, [0]) if "head-shared" in trial.rows)
    first.folder.mkdir(parents=True)
    renamed = choose_rows("head-shared")
    again = next(trial for trial in plan_trials(study, renamed[::-1], [0]) if "head-shared" in trial.rows)
    assert again.folder == first.folder


def test_seeds_must_differ(packed: Path, smallest: Settings, tmp_path: Path) -> None:
    study = open_study(packed, tmp_path / "out", smallest())
    for seeds in ([], [1, 1]):
        with pytest.raises(UserError, match="--seeds needs"):
            plan_trials(study, choose_rows("full"), seeds)


def test_another_base_or_other_films_are_refused(packed: Path, smallest: Settings, tmp_path: Path) -> None:
    out = tmp_path / "out"
    begin_study(open_study(packed, out, smallest()))
    open_study(packed, out, smallest("seed=3", "run.checkpoint_minutes=1"))  # neither decides what the study is
    with pytest.raises(UserError, match=r"training\.epochs was 1, is 2.*choose another --out"):
        open_study(packed, out, smallest("training.epochs=2"))
    with pytest.raises(UserError, match=r"data\.hash was"):
        open_study(draw_pack(tmp_path / "other", 48), out, smallest())


def test_trials_without_a_study_and_files_are_refused(packed: Path, smallest: Settings, tmp_path: Path) -> None:
    (tmp_path / "out" / "trials").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no study\.json"):
        open_study(packed, tmp_path / "out", smallest())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="needs a folder"):
        open_study(packed, tmp_path / "file", smallest())
    with pytest.raises(UserError, match=r"32 px, but image\.size is 64"):
        open_study(packed, tmp_path / "new", smallest("image.size=64"))


def test_a_truncated_or_foreign_trial_is_not_finished(packed: Path, smallest: Settings, tmp_path: Path) -> None:
    trial = plan_trials(open_study(packed, tmp_path / "out", smallest()), choose_rows("full"), [0])[0]
    trial.folder.mkdir(parents=True)
    assert trial.state() == "to run"
    (trial.folder / TRIAL).write_text('{"format": 1, "key"')
    assert trial.result() is None
    write_json(trial.folder / TRIAL, {"format": 1, "key": "another"})
    assert trial.result() is None
    write_json(trial.folder / TRIAL, {"format": 1, "key": trial.key})
    assert trial.state() == "finished"


def test_time_adds_up_over_starts(tmp_path: Path) -> None:
    write_json(tmp_path / CLOCK, {"train": 100.0})
    clock = TrialClock(tmp_path)
    with pytest.raises(RuntimeError), clock.stage("train"):
        raise RuntimeError
    with clock.stage("probe"):
        pass
    again = TrialClock(tmp_path).seconds()
    assert 100 <= again["train"] < 101 and 0 <= again["probe"] < 1
    (tmp_path / CLOCK).write_text("{")
    assert TrialClock(tmp_path).seconds() == {}


def test_time_is_written_while_a_stage_runs(tmp_path: Path) -> None:
    import time

    with TrialClock(tmp_path, between_writes=0.01).stage("train"):
        deadline = time.monotonic() + 10
        while not (tmp_path / CLOCK).exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)

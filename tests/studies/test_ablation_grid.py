"""Each row changes what it says and nothing else; trials are shared where their settings come out the same.

Studies that an earlier version began are read and gone on with.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from afire.config import Config
from afire.errors import UserError
from afire.files import read_json, write_json
from afire.settings import load_config
from afire.studies.ablation_grid import (
    FOLDER,
    FULL,
    TABLES,
    TRIAL,
    Trial,
    begin_study,
    choose_rows,
    known_rows,
    open_study,
    plan_trials,
)
from afire.studies.ablation_run import Workers, run_trials
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


ROWS = known_rows()
# The paper's numbers of each table, in its order: AUC / ACC / F1.
TABLE1 = [
    ("full", 89.4, 83.8, 84.5),
    ("anatpaste", 88.9, 83.2, 83.6),
    ("no-prototypes", 83.1, 75.8, 79.7),
    ("no-contrast", 76.9, 67.2, 75.9),
    ("no-category", 87.7, 79.8, 78.4),
    ("no-structure", 84.5, 74.9, 76.9),
    ("no-restoration", 86.2, 80.8, 81.5),
]
TABLE4 = [
    ("full", 89.4, 83.8, 84.5),
    ("feature-contrast", 84.8, 81.6, 80.9),
    ("no-mask-token", 85.7, 80.4, 81.2),
    ("abnormal-consistency", 77.9, 70.4, 72.4),
]
# Rows that say on top of `small` what it says already; they share the trials of the full method.
SAME_AS_SMALL = {"full", "head-shared", "similarity-corrected", "clusters-64", "views-1"}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in settings.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return values


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_row_changes_what_it_says(name: str) -> None:
    row, base = ROWS[name], load_config("small")
    changed = flat(row.config(base, seed=5).model_dump())
    before = flat(base.model_dump()) | {"seed": 5}
    stated = flat(row.settings)
    assert {key: changed[key] for key in stated} == stated
    assert {key for key in changed if changed[key] != before.get(key)} == {
        k for k in stated if stated[k] != before.get(k)
    }
    assert (name in SAME_AS_SMALL) == (changed == before)


def test_there_are_27_rows_each_with_a_place_of_its_own() -> None:
    assert len(ROWS) == 27
    for table in TABLES:
        places = sorted(row.tables[table] for row in ROWS.values() if table in row.tables)
        assert places == list(range(1, len(places) + 1)), table


@pytest.mark.parametrize(("table", "published"), [("table1", TABLE1), ("table4", TABLE4)])
def test_the_published_numbers_are_those_of_the_paper(table: str, published: list[tuple[Any, ...]]) -> None:
    rows = choose_rows(table)
    assert [(row.name, *(row.paper.model_dump().values() if row.paper else ())) for row in rows] == published


def test_the_full_method_is_always_first_and_no_row_comes_twice() -> None:
    names = [row.name for row in choose_rows("no-category,table1,no-category")]
    assert names[0] == FULL and names[1] == "no-category" and len(names) == len(set(names)) == 7


def test_a_misspelt_row_is_met_with_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean no-category"):
        choose_rows("no-categry")


def test_a_row_of_ones_own_may_not_take_a_name(tmp_path: Path) -> None:
    file = tmp_path / "no-category.yaml"
    file.write_text("title: mine\nsettings: {losses: {category: 0.5}}\n")
    with pytest.raises(UserError, match="rename the file"):
        choose_rows(str(file))
    own = tmp_path / "half.yaml"
    file.rename(own)
    assert [row.name for row in choose_rows(str(tmp_path))] == [FULL, "half"]


def test_a_change_that_does_not_fit_names_its_row(tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text("title: odd\nsettings: {encoder: {patch_size: 15}}\n")
    row = choose_rows(str(file))[1]
    with pytest.raises(UserError, match=r"^row odd: .*15"):
        row.config(load_config("small"), 0)


def test_the_rows_are_where_a_checkout_shows_them() -> None:
    shown = Path(__file__).parents[2] / "configs" / "ablations"
    assert shown.resolve() == FOLDER.resolve()


# Studies of an earlier version, which called its trials cells.
OLD = Path(__file__).parents[1] / "fixtures" / "v0" / "ablation"


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

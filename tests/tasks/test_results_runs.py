"""What a seed may change, and what it must not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from afire.data.manifest import Manifest, make_manifest
from afire.data.splits import official_split
from afire.errors import UserError
from afire.tasks.results import joint_hash, plan_runs, split_hash
from afire.tasks.results import test_hash as hash_of_test


def manifest(listed: bool = True, count: int = 200, digests: list[str] | None = None) -> Manifest:
    index = np.arange(count)
    table = pd.DataFrame(
        {
            "image": [f"{i}.png" for i in index],
            "patient": [f"p{i // 2}" for i in index],
            "normal": (index // 2 % 3 > 0).astype(float),
            "meta:pixel_digest": digests or [f"d{i}" for i in index],
        }
    )
    if listed:
        table["split"] = np.where(index < 150, "train", "test")
    return make_manifest(table, Path("films"))


@pytest.mark.parametrize("listed", [True, False])
def test_test_films_never_depend_on_the_seed_but_validation_does(listed: bool) -> None:
    films = manifest(listed)
    runs = plan_runs(films, None, [0, 1, 2])
    assert [run.name for run in runs] == ["seed-0", "seed-1", "seed-2"]
    assert len({tuple(run.rows["test"]) for run in runs}) == 1
    assert len({tuple(run.rows["val"]) for run in runs}) == 3
    for run in runs:
        everything = np.concatenate(list(run.rows.values()))
        assert len(np.unique(everything)) == len(everything) == len(films)
        patients = [set(films.table["patient"].iloc[rows]) for rows in run.rows.values()]
        assert not (patients[0] & patients[1] or patients[0] & patients[2] or patients[1] & patients[2])
    assert split_hash(runs) == split_hash(plan_runs(films, None, [0, 1, 2]))
    assert split_hash(runs) != split_hash(plan_runs(films, None, [0, 1]))
    assert hash_of_test(films, runs) == hash_of_test(films, plan_runs(films, None, [7]))


def test_a_split_file_fixes_all_parts_and_fractions_are_drawn_by_seed() -> None:
    films = manifest()
    split = official_split(films, 0.2)
    whole = plan_runs(films, split, [0, 1])
    assert whole[0].rows["train"].tolist() == whole[1].rows["train"].tolist()
    assert split_hash(whole) == split.hash
    tenth = plan_runs(films, split, [0, 1], fraction=0.1)
    assert len(tenth[0].rows["train"]) == pytest.approx(12, abs=2)
    assert set(tenth[0].rows["train"]) < set(whole[0].rows["train"])
    assert set(tenth[0].rows["train"]) != set(tenth[1].rows["train"])
    assert tenth[0].rows["val"].tolist() == whole[0].rows["val"].tolist()


def test_folds_test_every_film_once_for_each_seed() -> None:
    runs = plan_runs(manifest(), None, [0, 1], folds=4)
    assert [run.name for run in runs][:5] == [
        "seed-0-fold-0",
        "seed-0-fold-1",
        "seed-0-fold-2",
        "seed-0-fold-3",
        "seed-1-fold-0",
    ]
    assert sorted(np.concatenate([run.rows["test"] for run in runs[:4]])) == list(range(200))


def test_copies_under_two_patients_stay_in_one_part() -> None:
    """Carving validation from train must not make a leak that the data does not have."""
    digests = [f"d{i}" for i in range(200)]
    for first in range(0, 140, 4):
        digests[first + 2] = digests[first]  # a copy under the next patient
    films = manifest(digests=digests)
    for run in plan_runs(films, None, [0, 1, 2, 3]):
        subset_of = {row: subset for subset, rows in run.rows.items() for row in rows}
        assert all(subset_of[first] == subset_of[first + 2] for first in range(0, 140, 4))


def test_leaks_and_impossible_wishes_are_messages() -> None:
    digests = [f"d{i}" for i in range(200)]
    digests[199] = digests[0]
    with pytest.raises(UserError, match=r"0.png in train is 199.png in test"):
        plan_runs(manifest(digests=digests), None, [0])
    films = manifest()
    with pytest.raises(UserError, match="--folds and --split exclude each other"):
        plan_runs(films, official_split(films), [0], folds=3)
    with pytest.raises(UserError, match="each only once"):
        plan_runs(films, None, [0, 0])
    with pytest.raises(UserError, match="no val films"):
        plan_runs(films, official_split(films, 0.0), [0])


def test_joint_hash_is_the_hash_itself_where_all_agree() -> None:
    assert joint_hash(["a", "a"]) == "a"
    assert joint_hash(["a", "b"]) != joint_hash(["b", "a"])

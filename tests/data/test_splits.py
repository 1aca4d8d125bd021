"""Splits: by patient always, nested fractions, stratified, and a hash that means the films."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afire.data.manifest import Manifest, make_manifest, write_manifest
from afire.data.splits import (
    Split,
    development_split,
    fold_splits,
    fraction_of,
    make_split,
    official_split,
    random_split,
    read_split,
    write_split,
)
from afire.errors import UserError
from tests import commands


def films(patients: int, seed: int = 0, official: bool = False, rare: int = 4) -> Manifest:
    """Patients with one to five films each, a common finding, a rare one, and normals."""
    rng = np.random.default_rng(seed)
    rows = []
    for patient in range(patients):
        common, uncommon = rng.random() < 0.3, patient < rare
        for film in range(int(rng.integers(1, 6))):
            rows.append(
                {
                    "image": f"{patient:05d}_{film}.png",
                    "patient": f"p{patient}",
                    "split": ("test" if patient % 5 == 0 else "train") if official else "",
                    "normal": float(not (common or uncommon)),
                    "label:Common": float(common),
                    "label:Rare": float(uncommon),
                }
            )
    return make_manifest(pd.DataFrame(rows), Path())


def patients_of(manifest: Manifest, split: Split, part: str) -> set[str]:
    return set(manifest.table["patient"].iloc[split.rows(manifest)[part]])


@settings(max_examples=40, deadline=None)
@given(count=st.integers(5, 120), seed=st.integers(0, 50), test=st.floats(0.1, 0.5), val=st.floats(0.05, 0.3))
def test_no_patient_is_ever_in_two_parts(count: int, seed: int, test: float, val: float) -> None:
    manifest = films(count, seed)
    for split in [random_split(manifest, val, test, seed), *fold_splits(manifest, 3, val, seed)]:
        parts = [patients_of(manifest, split, part) for part in ("train", "val", "test")]
        assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
        assert set.union(*parts) == set(manifest.table["patient"])


def test_shares_are_met_in_films() -> None:
    manifest = films(400)
    split = random_split(manifest, val_share=0.1, test_share=0.2, seed=1)
    shares = {part: count / len(manifest) for part, count in split.films.items()}
    assert shares["test"] == pytest.approx(0.2, abs=0.01)
    assert shares["val"] == pytest.approx(0.1, abs=0.01)


def test_fractions_are_nested_and_stratified() -> None:
    manifest = films(2000, rare=100)
    whole = random_split(manifest, seed=3)
    small, middle = (fraction_of(whole, manifest, share, seed=3) for share in (0.01, 0.1))
    train = [patients_of(manifest, split, "train") for split in (small, middle, whole)]
    assert train[0] < train[1] < train[2]
    assert patients_of(manifest, small, "test") == patients_of(manifest, whole, "test")
    rate = [manifest.table.iloc[split.rows(manifest)["train"]] for split in (middle, whole)]
    for label in ("label:Common", "label:Rare"):
        assert rate[0][label].mean() == pytest.approx(rate[1][label].mean(), rel=0.25)


def test_folds_test_every_film_once_and_are_stratified() -> None:
    manifest = films(500, rare=50)
    splits = fold_splits(manifest, 5, seed=2)
    tested = np.concatenate([split.rows(manifest)["test"] for split in splits])
    assert sorted(tested) == list(range(len(manifest)))
    rare = set(manifest.table["patient"][manifest.table["label:Rare"] == 1])
    per_fold = [len(rare & patients_of(manifest, split, "test")) for split in splits]
    assert max(per_fold) - min(per_fold) <= 2
    sizes = [split.films["test"] for split in splits]
    assert max(sizes) - min(sizes) <= 0.05 * len(manifest)


def test_as_many_folds_as_patients() -> None:
    splits = fold_splits(films(6), 6, val_share=0.2)
    assert all(len(split.patients["test"]) == 1 for split in splits)


def test_official_lists_are_kept_and_validation_comes_from_train() -> None:
    manifest = films(200, official=True)
    split = official_split(manifest, val_share=0.1)
    rows = split.rows(manifest)
    listed = manifest.table["split"].to_numpy()
    assert set(listed[rows["test"]]) == {"test"} and len(rows["test"]) == (listed == "test").sum()
    assert set(listed[rows["val"]]) == {"train"} == set(listed[rows["train"]])
    assert len(rows["val"]) / (listed == "train").sum() == pytest.approx(0.1, abs=0.02)


def test_a_development_split_never_holds_an_official_test_film() -> None:
    manifest = films(80, official=True)
    split = development_split(manifest, val_share=0.1, test_share=0.25, seed=3)
    parts = split.rows(manifest)
    used = np.concatenate(list(parts.values()))
    listed = manifest.table["split"].to_numpy()
    assert set(listed[used]) <= {"train", "val"}
    assert len(used) == len(set(used)) == (listed != "test").sum()
    assert 0.15 < len(parts["test"]) / len(used) < 0.35 and len(parts["val"]) > 0
    assert development_split(manifest, seed=4).hash != split.hash
    with pytest.raises(UserError, match="no official training and test films"):
        development_split(films(20))


def test_films_without_an_official_split_are_left_out() -> None:
    manifest = films(100, official=True)
    table = manifest.table.copy()
    table.loc[table.index[:7], "split"] = ""
    split = official_split(make_manifest(table, Path()))
    assert sum(split.films.values()) == len(table) - 7


def test_an_official_split_that_leaks_patients_is_refused() -> None:
    manifest = films(30, official=True)
    table = manifest.table.copy()
    table.loc[table["image"] == "00005_0.png", "split"] = "train"
    if (table["patient"] == "p5").sum() == 1:
        pytest.skip("this seed gave the patient one film")
    with pytest.raises(UserError, match="patient p5: test and train"):
        official_split(make_manifest(table, Path()))


def test_deterministic_and_independent_of_row_order() -> None:
    manifest = films(150)
    shuffled = make_manifest(manifest.table.sample(frac=1, random_state=0), Path())
    assert random_split(manifest, seed=4).hash == random_split(shuffled, seed=4).hash
    assert random_split(manifest, seed=4).hash != random_split(manifest, seed=5).hash


def test_a_split_round_trips_and_refuses_other_films(tmp_path: Path) -> None:
    manifest = films(50)
    split = random_split(manifest)
    write_split(split, tmp_path / "split.json")
    again = read_split(tmp_path / "split.json")
    assert again == split
    fewer = make_manifest(manifest.table.iloc[1:], Path())
    with pytest.raises(UserError, match="does not fit this manifest"):
        again.rows(fewer)


def test_broken_split_files_are_one_message(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"format": 1, "hash": "x"}))
    with pytest.raises(UserError, match=r"split\.json is damaged or not written by afire"):
        read_split(path)
    write_split(random_split(films(40)), path)
    path.write_text(path.read_text().replace('"scope": "all"', '"scope": "ail"'))
    with pytest.raises(UserError, match="damaged or not written by afire"):
        read_split(path)
    path.write_text("{}")
    with pytest.raises(UserError, match="not a split file"):
        read_split(path)


def test_impossible_requests_are_messages() -> None:
    manifest = films(10)
    with pytest.raises(UserError, match="nothing to train on"):
        random_split(manifest, val_share=0.6, test_share=0.5)
    with pytest.raises(UserError, match="folds are not possible"):
        fold_splits(manifest, 11)
    with pytest.raises(UserError, match="label fraction"):
        fraction_of(random_split(manifest), manifest, 0.0)
    with pytest.raises(UserError, match="lists no training films"):
        official_split(manifest)
    with pytest.raises(UserError, match="would be in"):
        make_split(manifest, {"train": ["p1"], "test": ["p1"]}, "all", {})


def test_another_split_is_not_replaced(tmp_path: Path) -> None:
    write_manifest(films(40), tmp_path / "films.csv")
    words = ("data", "split", "--data", tmp_path / "films.csv", "--test", "0.3", "--out", tmp_path)
    commands.run(*words)
    before = (tmp_path / "split.json").read_bytes()
    commands.run(*words)
    refused = commands.run(*words, "--seed", "1", expect=2)
    assert "holds another split" in refused.stderr and (tmp_path / "split.json").read_bytes() == before


def test_a_fraction_that_cannot_be_leaves_no_file(tmp_path: Path) -> None:
    write_manifest(films(40), tmp_path / "films.csv")
    words = ("data", "split", "--data", tmp_path / "films.csv", "--test", "0.3", "--out", tmp_path / "splits")
    commands.run(*words, "--fractions", "50,0", expect=2)
    assert not (tmp_path / "splits").exists()

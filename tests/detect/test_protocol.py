"""Which films are tested, and that a detector does not know them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from afire.data.keys import Seen, remember_films
from afire.data.manifest import Manifest, make_manifest
from afire.data.pack import PackedFilms
from afire.data.sources.chexpert import build_chexpert
from afire.data.splits import random_split
from afire.detect import protocol
from afire.detect.fit import detection_subsets
from afire.detect.protocol import (
    balanced_by_view,
    check_unseen,
    chexpert_split,
    pa_only,
    plan_test,
    seen_in_pretraining,
)
from afire.errors import UserError
from tests.data.sources.test_chexpert import HEADER, SET


def test_the_manifests_own_lists(films: PackedFilms) -> None:
    table = films.manifest.table
    test = plan_test(films.manifest)
    assert test.protocol == "official" and (table["split"].iloc[test.rows] == "test").all() and len(test.rows) == 30
    assert np.array_equal(test.truth, 1 - table["normal"].iloc[test.rows])
    assert (table["split"].iloc[test.normals] == "train").all() and (table["normal"].iloc[test.normals] == 1).all()


def test_a_split_file_and_a_drawn_split(films: PackedFilms) -> None:
    split = random_split(films.manifest, seed=4)
    test = plan_test(films.manifest, split)
    assert np.array_equal(test.rows, split.rows(films.manifest)["test"])
    unlisted = Manifest(films.manifest.table.assign(split=""), films.manifest.root)
    drawn = plan_test(unlisted)
    assert drawn.split is not None and "seed 0" in drawn.message and len(drawn.rows) == pytest.approx(24, abs=2)
    assert np.array_equal(plan_test(unlisted).rows, drawn.rows)


def test_films_without_a_label_are_not_tested(films: PackedFilms) -> None:
    table = films.manifest.table.copy()
    table.loc[[100, 101], "normal"] = np.nan
    test = plan_test(Manifest(table, films.manifest.root))
    assert 100 not in test.rows and len(test.rows) == 28
    everything = plan_test(Manifest(table, films.manifest.root), protocol="all")
    assert len(everything.rows) == 118 and len(everything.normals) == 0


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_one_class_is_refused(films: PackedFilms, value: float) -> None:
    table = films.manifest.table.copy()
    table.loc[table["split"] == "test", "normal"] = value
    with pytest.raises(UserError, match="no test film is labelled"):
        plan_test(Manifest(table, films.manifest.root))


def test_a_patient_in_two_parts_is_refused(films: PackedFilms) -> None:
    table = films.manifest.table.copy()
    table.loc[[0, 119], "patient"] = "same"
    with pytest.raises(UserError, match="more than one subset"):
        plan_test(Manifest(table, films.manifest.root))


def test_known_films_and_patients_are_refused(films: PackedFilms, tmp_path: Path) -> None:
    test = plan_test(films.manifest).rows
    assert check_unseen(tmp_path, films, test).answer == "unknown", "there is no record"
    with pytest.raises(UserError, match="more than one subset"):
        check_unseen(tmp_path, films, test[::2], test[1::2])  # two films a patient
    assert seen_in_pretraining(tmp_path, films, test, from_random=True).answer == "none"
    assert seen_in_pretraining(tmp_path, films, test, from_random=False).answer == "unknown"
    remember_films(tmp_path / "pretrain", films, test[:7])
    assert seen_in_pretraining(tmp_path, films, test, from_random=False) == Seen(30, 7)
    remember_films(tmp_path, films, np.arange(20))
    assert check_unseen(tmp_path, films, test) == Seen(30)
    remember_films(tmp_path, films, test[:3])
    with pytest.raises(UserError, match="3 of the 30 test films were used to fit"):
        check_unseen(tmp_path, films, test)


def miniature(root: Path, patients: int = 40) -> Manifest:
    """CheXpert with the real header: each patient has a PA and an AP film; every third PA film is normal."""
    lines = []
    for number in range(patients):
        normal = number % 3 == 0
        labels = ["1.0" if normal else "", "", "" if normal else "1.0", *[""] * 11]
        for view, position in ((1, "PA"), (2, "AP")):
            path = f"{SET}/train/patient{number:05d}/study1/view{view}_frontal.jpg"
            lines.append(f"{path},Female,60,Frontal,{position},{','.join(labels)}")
    valid = f"{SET}/valid/patient64541/study1/view1_frontal.jpg,Male,73,Frontal,PA" + ",0.0" * 2 + ",1.0" + ",0.0" * 11
    for line in [*lines, valid]:
        film = root / line.split(",")[0]
        film.parent.mkdir(parents=True, exist_ok=True)
        film.write_text(line)  # no two alike: copies count as one patient
    (root / SET / "train.csv").write_text(HEADER + "\n".join(lines) + "\n")
    (root / SET / "valid.csv").write_text(HEADER + valid + "\n")
    return build_chexpert(root / SET)


def test_chexpert_as_in_squid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CHEXPERT_FILMS", 4)
    manifest = miniature(tmp_path)
    test = plan_test(manifest, protocol="chexpert250")
    table = manifest.table
    assert test.truth.sum() == 4 and len(test.truth) == 8
    assert (table["view"].iloc[test.rows] == "PA").all() and (table["split"].iloc[test.rows] == "train").all()
    assert table["patient"].iloc[test.rows].is_unique
    assert test.split is not None and test.split.hash == chexpert_split(pa_only(manifest)).hash
    trained = set(table["patient"].iloc[test.normals])
    assert not trained & set(table["patient"].iloc[test.rows]) and "patient64541" not in trained
    assert (table["view"].iloc[test.normals] == "PA").all()
    shuffled = make_manifest(table.sample(frac=1, random_state=1), manifest.root)
    again = plan_test(shuffled, protocol="chexpert250")
    assert set(shuffled.table["image"].iloc[again.rows]) == set(table["image"].iloc[test.rows]), "whatever the order"


def test_chexpert_fits_on_pa_normals_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CHEXPERT_FILMS", 4)
    monkeypatch.setattr(protocol, "_VAL_SHARE", 0.5)
    narrowed = pa_only(miniature(tmp_path, patients=120))
    parts = detection_subsets(narrowed, chexpert_split(narrowed), seed=0)
    used = narrowed.table.iloc[np.concatenate([parts.fit, parts.held_out])]
    assert (used["view"] == "PA").all() and (used["normal"] == 1).all()


def test_a_set_that_is_not_chexpert_is_a_sentence(films: PackedFilms) -> None:
    with pytest.raises(UserError, match="is this CheXpert"):
        plan_test(films.manifest, protocol="chexpert250")
    with pytest.raises(UserError, match="leave out --split"):
        plan_test(films.manifest, random_split(films.manifest), protocol="chexpert250")
    assert pd.isna(pa_only(films.manifest).table["normal"]).all(), "no film here has a view"


def test_views_are_balanced_within_each_view(films: PackedFilms) -> None:
    rng = np.random.default_rng(0)
    views = np.where(rng.random(120) < 0.3 + 0.4 * (films.manifest.table["normal"] == 0), "AP", "PA")
    manifest = Manifest(films.manifest.table.assign(view=views), films.manifest.root)
    whole = plan_test(manifest, protocol="all")
    test = balanced_by_view(manifest, whole)
    for view in ("AP", "PA"):
        of_view = views[test.rows] == view
        normal, abnormal = (int((of_view & (test.truth == value)).sum()) for value in (0, 1))
        in_all = [int(((views[whole.rows] == view) & (whole.truth == value)).sum()) for value in (0, 1)]
        assert normal == abnormal == min(in_all)
    assert set(test.rows) < set(whole.rows) and "views balanced" in test.message
    assert np.array_equal(test.rows, balanced_by_view(manifest, whole).rows)
    assert np.array_equal(test.truth, 1 - manifest.table["normal"].to_numpy()[test.rows])


def test_films_without_a_view_cannot_be_balanced(films: PackedFilms) -> None:
    manifest = Manifest(films.manifest.table.assign(view=""), films.manifest.root)
    with pytest.raises(UserError, match="no view has normal and abnormal test films"):
        balanced_by_view(manifest, plan_test(manifest))

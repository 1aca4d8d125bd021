"""Subsets by patient: nothing crosses, test films stay out, copies count as one patient."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from afire.data.manifest import Manifest
from afire.data.pack import DIGEST, PackedFilms
from afire.data.splits import official_split
from afire.detect.base import Subsets
from afire.detect.fit import detection_subsets
from afire.errors import UserError


def rows(subsets: Subsets) -> list[np.ndarray]:
    return [subsets.fit, subsets.choose, subsets.calibrate]


def test_patients_never_cross_and_only_normal_training_films_are_used(films: PackedFilms) -> None:
    table = films.manifest.table
    subsets = detection_subsets(films.manifest, None, seed=0, held_out=0.4)
    patients = [set(table["patient"].iloc[subset]) for subset in rows(subsets)]
    assert sum(map(len, patients)) == len(set.union(*patients))
    used = table.iloc[np.concatenate(rows(subsets))]
    assert (used["normal"] == 1).all() and (used["split"] == "train").all()
    assert len(used) == ((table["normal"] == 1) & (table["split"] == "train")).sum(), "none is left lying"


def test_the_seed_decides(films: PackedFilms) -> None:
    first, again, other = (detection_subsets(films.manifest, None, seed, 0.4) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(rows(first), rows(again), strict=True))
    assert not np.array_equal(first.fit, other.fit)


def test_a_split_brings_its_validation_films(films: PackedFilms) -> None:
    split = official_split(films.manifest, 0.4, seed=3)
    subsets = detection_subsets(films.manifest, split, seed=0)
    val = split.rows(films.manifest)["val"]
    assert set(subsets.held_out) == {row for row in val if films.manifest.table["normal"].iloc[row] == 1}
    assert split.hash[:12] in subsets.held_out_by


def test_copies_under_two_names_stay_together(films: PackedFilms) -> None:
    table = films.manifest.table.copy()
    normal = np.flatnonzero((table["normal"] == 1) & (table["split"] == "train"))
    table.loc[normal, DIGEST] = pd.Series([f"copy{place % 12}" for place in range(len(normal))], index=normal)
    subsets = detection_subsets(Manifest(table, films.manifest.root), None, seed=0, held_out=0.4)
    digests = [set(table[DIGEST].iloc[subset]) for subset in rows(subsets)]
    assert sum(map(len, digests)) == len(set.union(*digests))


def test_too_few_normals_are_refused(films: PackedFilms) -> None:
    with pytest.raises(UserError, match="needs at least"):
        detection_subsets(films.manifest, None, seed=0, held_out=0.02)

"""Each check: a set that has it, and one that has not; negatives among positives, sets of negatives, and neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from afire.data.audit import checks, copies
from afire.data.audit.checks import Polarity, chest_template, judge_polarity
from afire.data.audit.collect import as_table
from afire.data.audit.copies import NearPair
from afire.data.audit.measure import Finding, Measurement, rank_thumb
from afire.data.manifest import Manifest
from tests.data.audit.drawing import draw_chest


def table(count: int = 4, **columns: Any) -> pd.DataFrame:
    base: dict[str, Any] = {"image": [f"{n}.png" for n in range(count)], "patient": [f"p{n}" for n in range(count)]}
    return pd.DataFrame({**base, "split": "", "view": "", "normal": np.nan, **columns})


def measured(*films: dict[str, Any]) -> pd.DataFrame:
    base = {"width": 200, "height": 200, "contrast": 0.2}
    rows = [Measurement(f"{n}.png", **{**base, "pixels": f"own {n}", **film}) for n, film in enumerate(films)]
    return as_table(rows)


def kinds(findings: Any) -> dict[str, Finding]:
    return {finding.kind: finding for finding in findings}


def test_unreadable_films_are_an_error_with_the_reason() -> None:
    (finding,) = checks.check_readable(measured({}, {"error": "1.png is truncated."}))
    assert (finding.level, finding.films, finding.notes) == ("error", [1], ("1.png is truncated.",))
    assert list(checks.check_readable(measured({}, {}))) == []


def test_blank_tiny_and_coloured_films_are_warnings() -> None:
    films = measured({}, {"constant": True}, {"contrast": 0.001}, {"width": 40}, {"colour": True})
    found = kinds(checks.check_content(films))
    assert {kind: finding.films for kind, finding in found.items()} == {"blank": [1, 2], "tiny": [3], "coloured": [4]}
    assert {finding.level for finding in found.values()} == {"warning"}
    assert list(checks.check_content(measured({}, {"error": "x", "width": 0}))) == []


def test_a_few_negatives_warn_and_many_are_an_error() -> None:
    agreement = np.full(100, 0.8)
    assert list(checks.check_polarity(Polarity(agreement, 0.7))) == []
    agreement[3], agreement[5] = -0.6, 0.0
    found = kinds(checks.check_polarity(Polarity(agreement, 0.7)))
    assert (found["polarity"].level, found["polarity"].films) == ("warning", [3])
    assert (found["unlike"].level, found["unlike"].films) == ("notice", [5])
    agreement[:60] = -0.6
    assert kinds(checks.check_polarity(Polarity(agreement, 0.7)))["polarity"].level == "error"


def test_files_that_hold_fewer_bits_than_they_say() -> None:
    deep, narrow = {"bits": 16, "file_kind": "png"}, {"bits": 12, "unused_bits": 4, "file_kind": "png"}
    assert list(checks.check_range(measured(deep, {"bits": 8, "file_kind": "jpeg"}))) == []
    (finding,) = checks.check_range(measured(narrow, narrow, {"bits": 8, "file_kind": "jpeg"}))
    assert (finding.level, finding.kind, finding.films) == ("notice", "unused-bits", [0, 1])
    assert "12 bits in 2 films" in finding.message
    (finding,) = checks.check_range(measured(deep, narrow, {**deep, "constant": True}))
    assert (finding.level, finding.films) == ("warning", [1]) and "white differs from film to film" in finding.message


def test_patients_across_splits_are_an_error() -> None:
    films = table(patient=["a", "a", "b", "b"], split=["train", "test", "train", "train"])
    (finding,) = copies.check_patients(Manifest(films, Path()))
    assert (finding.level, finding.kind, finding.groups) == ("error", "patients-across-splits", ((0, 1),))
    assert finding.notes == ("test, train",)


def test_patients_in_one_split_or_without_a_split_are_fine() -> None:
    films = table(patient=["a", "a", "b", "b"], split=["train", "train", "test", ""])
    assert list(copies.check_patients(Manifest(films, Path()))) == []


def test_a_manifest_without_patients_says_that_it_cannot_be_checked() -> None:
    films = table()
    (finding,) = copies.check_patients(Manifest(films.assign(patient=films["image"]), Path()))
    assert (finding.level, finding.kind, finding.films) == ("notice", "no-patients", [])
    some = films.assign(patient=films["image"].where(films.index == 1, "a"))
    (finding,) = copies.check_patients(Manifest(some, Path()))
    assert (finding.level, finding.kind, finding.films) == ("notice", "no-patients", [1])
    assert "1 film has no patient id" in finding.message


def test_identical_films_across_splits_are_an_error_within_one_a_warning() -> None:
    films = measured({"pixels": "x"}, {"pixels": "x"}, {"pixels": "y"}, {"pixels": "y"})
    found = kinds(copies.check_exact(table(split=["train", "test", "train", "train"]), films))
    assert (found["copies-across-splits"].level, found["copies-across-splits"].groups) == ("error", ((0, 1),))
    assert (found["copies"].level, found["copies"].groups) == ("warning", ((2, 3),))
    assert found["copies"].numbers["surplus"] == 1


def test_identical_films_with_other_labels_are_an_error() -> None:
    films = measured({"pixels": "x"}, {"pixels": "x"}, {}, {})
    labels = {"label:A": [1.0, 0.0, 1.0, 0.0]}
    found = kinds(copies.check_exact(table(**labels), films))
    assert found["copies-with-other-labels"].level == "error"
    assert found["copies-with-other-labels"].notes == ("differ in A",)
    unknown = {"label:A": [1.0, np.nan, 1.0, 0.0]}
    assert "copies-with-other-labels" not in kinds(copies.check_exact(table(**unknown), films))


def test_different_and_blank_films_are_not_copies() -> None:
    films = measured({"pixels": "x", "constant": True}, {"pixels": "x", "constant": True}, {}, {"pixels": ""})
    assert list(copies.check_exact(table(), films)) == []


def test_near_copies_across_splits_are_an_error() -> None:
    pairs = [NearPair(0, 1, "mirrored", 0.996), NearPair(2, 3, "copy", 0.994)]
    films = table(split=["train", "val", "train", "train"], patient=["a", "b", "c", "c"])
    found = kinds(copies.check_near(films, pairs))
    assert (found["near-copies-across-splits"].level, found["near-copies-across-splits"].groups) == ("error", ((0, 1),))
    assert found["near-copies-across-splits"].notes == ("mirrored, correlation 0.996",)
    assert (found["near-copies"].level, found["near-copies"].groups) == ("notice", ((2, 3),))
    assert list(copies.check_near(films, [])) == []


def test_near_copies_under_two_patient_ids_or_labels_are_a_warning() -> None:
    pair = [NearPair(0, 1, "copy", 0.995)]
    (strangers,) = copies.check_near(table(), pair)
    assert strangers.level == "warning"
    assert "different patient ids" in strangers.message
    same = ["a", "a", "b", "b"]
    (labels,) = copies.check_near(table(patient=same, **{"label:A": [1.0, 0.0, 0.0, 0.0]}), pair)
    assert labels.level == "warning"
    assert "different labels" in labels.message


def test_constant_empty_and_missing_labels() -> None:
    found = kinds(checks.check_labels(table(**{"label:A": 0.0, "label:B": np.nan, "label:C": [0.0, 1.0, 1.0, 0.0]})))
    assert "Label A is" in found["constant-labels"].message
    assert "Label B is" in found["empty-labels"].message
    assert list(kinds(checks.check_labels(table()))) == ["no-labels"]
    assert list(checks.check_labels(table(**{"label:C": [0.0, 1.0, 1.0, 0.0]}))) == []


def test_a_class_missing_in_a_split_and_rare_ones_are_told() -> None:
    split = ["train"] * 20 + ["test"] * 20
    label = [0.0, 1.0] * 10 + [0.0] * 20
    found = kinds(checks.check_labels(table(40, split=split, **{"label:A": label})))
    assert found["one-class-split"].numbers == {"split": "test", "labels": "A"}
    label[-1] = 1.0
    found = kinds(checks.check_labels(table(40, split=split, **{"label:A": label})))
    assert list(found) == ["rare-labels"]
    assert "A (1)" in found["rare-labels"].message


def test_mixed_views() -> None:
    films = measured({}, {}, {}, {})
    assert list(checks.check_views(table(view=["PA", "PA", "", "PA"]), films)) == []
    (frontal,) = checks.check_views(table(view=["PA", "AP", "", "PA"]), films)
    assert (frontal.level, frontal.numbers["PA"], frontal.numbers["unknown"]) == ("notice", 2, 1)
    (lateral,) = checks.check_views(table(view=["PA", "LATERAL", "PA", "PA"]), films)
    assert lateral.level == "warning"


def test_a_view_that_the_file_contradicts() -> None:
    films = measured({"file_view": "AP"}, {"file_view": "PA"}, {}, {})
    found = kinds(checks.check_views(table(view="PA"), films))
    assert found["view-contradicted"].films == [0]


def thumbs(count: int, likeness: float = 1.0, seed: int = 0) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    return np.stack([rank_thumb(draw_chest(rng, 32, 32, likeness)).ravel() for _ in range(count)])


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_negatives_are_found_whatever_their_share(share: float) -> None:
    ranks = thumbs(200)
    flipped = np.arange(200) < 200 * share
    ranks[flipped] = 255 - ranks[flipped]
    polarity = judge_polarity(ranks, [""] * 200)
    assert polarity.judged_by_anatomy
    assert sorted(polarity.suspects) == np.flatnonzero(flipped).tolist()


def test_what_is_not_a_chest_is_judged_by_the_majority() -> None:
    rng = np.random.default_rng(1)
    common = np.outer(np.sin(np.arange(32) / 3), np.cos(np.arange(32) / 7))
    common -= (common.ravel() @ chest_template()) * chest_template().reshape(32, 32)
    films = [0.5 + 0.1 * (common / common.std() + 0.5 * rng.normal(0, 1, (32, 32))) for _ in range(60)]
    ranks = np.stack([rank_thumb(film.astype(np.float32)).ravel() for film in films])
    ranks[:5] = 255 - ranks[:5]
    polarity = judge_polarity(ranks, [""] * 60)
    assert not polarity.judged_by_anatomy
    assert sorted(polarity.suspects) == [0, 1, 2, 3, 4]


def test_a_film_of_something_else_is_unlike_the_rest() -> None:
    ranks = thumbs(100)
    ranks[17] = np.tile(np.arange(32) * 8, 32)  # dark on one side, bright on the other: a film of something else
    polarity = judge_polarity(ranks, [""] * 100)
    assert 17 in polarity.unlike
    assert len(polarity.suspects) == 0
    assert len(polarity.unlike) <= 2


def test_lateral_films_are_compared_with_lateral_films() -> None:
    frontal, lateral = thumbs(60), 255 - thumbs(60, seed=2)  # laterals here look like negative frontals
    views = ["PA"] * 60 + ["LATERAL"] * 60
    assert len(judge_polarity(np.concatenate([frontal, lateral]), views).suspects) == 0
    assert len(judge_polarity(np.concatenate([frontal, lateral]), [""] * 120).suspects) == 60


def test_few_or_blank_films_are_not_judged() -> None:
    assert len(judge_polarity(255 - thumbs(5), [""] * 5).suspects) == 0
    blank = np.zeros((40, 1024), np.uint8)
    polarity = judge_polarity(blank, [""] * 40)
    assert np.isnan(polarity.agreement).all()
    assert len(polarity.suspects) == len(polarity.unlike) == 0

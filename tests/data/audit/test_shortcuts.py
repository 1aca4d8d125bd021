"""Shortcuts: found when they are there, on films they were not chosen on, and not found by chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from afire.data.audit.checks import check_shortcuts
from afire.data.audit.measure import Feature, film_features
from afire.data.audit.shortcuts import ALL_FILE, EDGE, Shortcut, find_shortcuts, label_columns

COUNT = 400


def make_table(seed: int = 0, split: bool = True, **columns: Any) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    label = (rng.random(COUNT) < 0.5).astype(float)
    where = np.where(np.arange(COUNT) < 250, "train", "test") if split else [""] * COUNT
    table = {"split": where, "patient": [f"p{n // 2}" for n in range(COUNT)], "normal": np.nan, "label:A": label}
    return pd.DataFrame({**table, **columns})


def feature(values: Any, name: str = "width", group: Any = "file") -> Feature:
    return Feature(name, group, pd.Series(values))


def find(table: pd.DataFrame, *features: Feature) -> dict[str, Shortcut]:
    return {one.feature: one for one in find_shortcuts(table, features, np.random.default_rng(0))}


@pytest.mark.parametrize("split", [True, False])
def test_a_planted_shortcut_is_severe_and_noise_is_not(split: bool) -> None:
    table, rng = make_table(split=split), np.random.default_rng(1)
    smaller = feature(-2 * table["label:A"] + rng.normal(0, 1, COUNT))
    found = find(table, smaller, feature(rng.normal(0, 1, COUNT), "noise"))
    assert found["width"].level == "error"
    assert found["width"].direction == "smaller"
    assert found["width"].low < found["width"].auc < found["width"].high
    assert found["width"].judged == ("test" if split else "cross-validated")
    assert found["noise"].level is None
    assert found[ALL_FILE].auc > 0.8


def test_a_shortcut_that_turns_round_on_the_test_films_is_below_one_half() -> None:
    table = make_table()
    sign = np.where(table["split"] == "train", 1, -1)
    found = find(table, feature(sign * table["label:A"] + np.random.default_rng(2).normal(0, 0.3, COUNT)))
    assert found["width"].train_auc > 0.9
    assert found["width"].auc < 0.1
    assert found["width"].level is None


def edges_of(table: pd.DataFrame, told: float) -> Any:
    """Cells along the edges of films, the first of which are brighter by ``told`` deviations where the label is."""
    cells = np.random.default_rng(3).normal(0, 1, (COUNT, 60)).astype(np.float32)
    cells[:, :5] += np.float32(told) * table[["label:A"]].to_numpy(dtype=np.float32)
    return cells


@pytest.mark.parametrize("split", [True, False])
def test_what_the_edge_of_a_film_gives_away_is_a_warning_and_noise_there_is_nothing(split: bool) -> None:
    table = make_table(split=split)
    found = {one.feature: one for one in find_shortcuts(table, (), np.random.default_rng(0), edges_of(table, 1.0))}
    assert found[EDGE].auc > 0.85 and found[EDGE].level == "warning" and found[EDGE].single
    (finding,) = check_shortcuts(list(found.values()))
    assert "without looking at the lungs: edge of the film alone gives AUC 0." in finding.message
    (noise,) = find_shortcuts(table, (), np.random.default_rng(0), edges_of(table, 0.0))
    assert 0.35 < noise.auc < 0.65 and noise.level is None


def test_edges_of_films_that_cannot_be_read_are_left_out_and_change_no_other_interval() -> None:
    table = make_table()
    edges = edges_of(table, 1.0)
    edges[::7] = np.nan
    width = feature(table["label:A"] + np.random.default_rng(4).normal(0, 1, COUNT))
    alone, beside = (find_shortcuts(table, [width], np.random.default_rng(0), each) for each in (None, edges))
    assert beside[:-1] == alone
    assert beside[-1].feature == EDGE
    assert beside[-1].films == sum(row % 7 != 0 for row in range(250, COUNT))


def test_a_category_can_be_a_shortcut() -> None:
    table = make_table()
    view = np.where(table["label:A"] == 1, "AP", "PA").astype(object)
    view[::10] = "PA"
    found = find(table, feature(view, "view"))
    assert found["view"].auc > 0.9
    assert found["view"].direction == ""


def test_several_facts_can_tell_what_none_tells_alone() -> None:
    rng = np.random.default_rng(3)
    one, other = rng.normal(0, 1, COUNT), rng.normal(0, 1, COUNT)
    table = make_table(**{"label:A": (one * other > 0).astype(float)})
    found = find(table, feature(one, "one"), feature(other, "other"))
    assert max(found["one"].auc, found["other"].auc) < 0.65
    assert found[ALL_FILE].auc > 0.85


@pytest.mark.parametrize(("group", "level"), [("pixels", "warning"), ("demographics", "notice"), ("other", "warning")])
def test_only_facts_about_the_file_are_errors(group: str, level: str) -> None:
    table = make_table()
    assert find(table, feature(table["label:A"] * 1.0, group=group))["width"].level == level


def test_a_label_that_few_patients_have_is_not_judged() -> None:
    label = np.zeros(COUNT)
    label[:12] = 1  # twelve films of six patients
    assert find(make_table(**{"label:A": label}), feature(label)) == {}


def test_films_without_the_fact_or_the_label_are_left_out() -> None:
    table = make_table()
    table.loc[::3, "label:A"] = np.nan
    values = table["label:A"].fillna(0.5).to_numpy(copy=True)
    values[1::3] = np.nan
    known = int((table["label:A"].notna() & ~np.isnan(values) & (table["split"] == "test")).sum())
    assert find(table, feature(values))["width"].films == known


def test_normal_is_left_out_when_it_only_negates_a_label() -> None:
    table = make_table()
    assert [name for name, _ in label_columns(table.assign(normal=1 - table["label:A"]))] == ["A"]
    assert [name for name, _ in label_columns(table)] == ["A", "normal"]


def test_messages_name_the_fact_the_number_and_what_to_do() -> None:
    table = make_table()
    found = find_shortcuts(table, [feature(-table["label:A"], "original area")], np.random.default_rng(0))
    (finding,) = check_shortcuts(found)
    assert finding.level == "error"
    for words in (
        "A can be guessed without looking",
        "original area alone (smaller means A)",
        "AUC 1.00",
        "test films",
    ):
        assert words in finding.message
    assert "metadata-only row" in finding.message


def test_mild_shortcuts_share_one_notice() -> None:
    rng = np.random.default_rng(5)
    table = make_table()
    table["label:B"] = (rng.random(COUNT) < 0.5).astype(float)
    features = [feature(0.9 * table[f"label:{name}"] + rng.normal(0, 1, COUNT), f"fact {name}") for name in ("A", "B")]
    findings = list(check_shortcuts(find_shortcuts(table, features, rng)))
    assert [finding.level for finding in findings] == ["notice"]
    assert "A by fact A" in findings[0].message
    assert "B by fact B" in findings[0].message


def measured(count: int, **columns: Any) -> pd.DataFrame:
    facts = {
        "error": [""] * count, "width": range(1, count + 1), "height": [10] * count, "file_bytes": [5] * count,
        "bits": [8] * count, "file_kind": ["png"] * count, "file_view": [""] * count,
        "brightness": [0.5] * count, "contrast": [0.1] * count, "sharpness": [0.01] * count,
    }  # fmt: skip
    return pd.DataFrame({**facts, **columns})


def test_features_use_the_original_size_when_the_manifest_has_it() -> None:
    table = pd.DataFrame({"view": [""] * 4, "meta:orig_width": [100, 200, 300, 400], "meta:orig_height": [10] * 4})
    features = {one.name: one for one in film_features(table, measured(4))}
    assert features["original width"].values.tolist() == [100, 200, 300, 400]
    assert features["original area"].values.tolist() == [1000, 2000, 3000, 4000]
    assert features["stored width"].values.tolist() == [1, 2, 3, 4]
    assert "original height" not in features  # constant


def test_features_without_originals_are_the_stored_ones() -> None:
    features = {one.name for one in film_features(pd.DataFrame({"view": ["PA", "AP", "PA", ""]}), measured(4))}
    assert features == {"width", "area", "aspect", "view"}


def test_age_and_sex_are_demographics_text_is_left_out_and_unreadable_films_are_unknown() -> None:
    table = pd.DataFrame(
        {"view": [""] * 3, "meta:age": [1, 2, 3], "meta:sex": ["F", "M", "M"], "meta:subtype": list("abc"),
         "meta:visit": [0, 1, 2]}
    )  # fmt: skip
    features = {one.name: one for one in film_features(table, measured(3, error=["", "", "broken"]))}
    assert features["age"].group == features["sex"].group == "demographics"
    assert features["visit"].group == "other"
    assert "subtype" not in features
    assert features["width"].values.isna().tolist() == [False, False, True]

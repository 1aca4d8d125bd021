"""Scores are weighed: planted ones get the weight, those that know a kind by heart or work sign-flipped get none."""

from __future__ import annotations

import numpy as np
import pytest

from afire.detect.choose import Choice, choice_from_json, choice_to_json, choose, warnings
from afire.errors import UserError

FILMS = 400


def planted(**strengths: float) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
    """Normal and lesioned scores; a lesion lifts each score by its strength, in sd."""
    rng = np.random.default_rng(0)
    normal = {name: rng.normal(size=FILMS) for name in strengths}
    lesioned = {
        kind: {name: rng.normal(size=FILMS) + strength for name, strength in strengths.items()}
        for kind in ("texture", "haze")
    }
    return normal, lesioned


def test_the_planted_score_is_chosen() -> None:
    choice = choose(*planted(surprise=0.0, gaussian=1.5, restoration=0.1))
    assert choice.name == "gaussian" and choice.mean_auc == pytest.approx(0.855, abs=0.03)
    assert choice.table["surprise"]["haze"] == pytest.approx(0.5, abs=0.06)
    assert choice.components[0].weight == pytest.approx(1)


def test_a_second_score_joins_where_it_helps() -> None:
    choice = choose(*planted(gaussian=1.0, surprise=1.0, restoration=0.0))
    assert {one.name for one in choice.components} == {"gaussian", "surprise"}
    assert choice.mean_auc > choice.table["gaussian"]["texture"] + 0.03


def test_weights_follow_what_scores_tell_and_are_shrunk_towards_equal_ones() -> None:
    choice = choose(*planted(gaussian=2.0, surprise=1.0))
    weights = {component.name: component.weight for component in choice.components}
    assert weights["gaussian"] > weights["surprise"] > 0.25, "half of a weight is the same for all"
    assert sum(weights.values()) == pytest.approx(1)
    alike = choose(*planted(gaussian=1.0, surprise=1.0))
    assert all(component.weight == pytest.approx(0.5, abs=0.1) for component in alike.components)


def test_a_score_that_learnt_its_drawings_by_heart_gets_no_weight() -> None:
    rng = np.random.default_rng(1)
    normal, lesioned = {name: rng.normal(size=FILMS) for name in ("lesion", "gaussian")}, {}
    for number in range(6):
        by_heart = 8.0 if number == 0 else 0.1  # what it was trained with, and hardly anything else
        lesioned[f"kind {number}"] = {
            "lesion": rng.normal(size=FILMS) + by_heart,
            "gaussian": rng.normal(size=FILMS) + 0.6,
        }
    choice = choose(normal, lesioned)
    assert choice.table["lesion"]["kind 0"] > 0.99
    assert choice.name == "gaussian"


def test_a_kind_may_have_normals_of_its_own() -> None:
    normal, lesioned = planted(gaussian=1.0, surprise=1.0)
    moved = {name: values + 5 for name, values in normal.items()}  # films of another source score higher
    findings = {name: values + 6 for name, values in normal.items()}
    choice = choose(normal, {**lesioned, "findings": findings}, references={"findings": moved})
    assert choice.table["gaussian"]["findings"] == pytest.approx(0.76, abs=0.02), "not 1: against its own normals"


def test_sign_flipped_scores_are_not_chosen_however_strong() -> None:
    choice = choose(*planted(restoration=-3.0, paper=3.0, gaussian=0.3))
    assert choice.name == "gaussian", "paper's direction is wrong, and a negative one is not flipped"
    assert choice.table["restoration"]["haze"] < 0.05 and choice.table["paper"]["haze"] > 0.95


def test_a_sign_flipped_score_does_not_join_by_taking_away_what_it_shares() -> None:
    rng = np.random.default_rng(3)
    shared = [rng.normal(size=FILMS) for _ in range(2)]
    normal = {"gaussian": shared[0] + rng.normal(size=FILMS) / 4, "surprise": -shared[0]}
    lesioned = {"haze": {"gaussian": shared[1] + rng.normal(size=FILMS) / 4 + 0.5, "surprise": -shared[1] - 0.1}}
    assert choose(normal, lesioned).name == "gaussian"
    assert choose(normal, lesioned, ["gaussian", "surprise"]).mean_auc > choose(normal, lesioned).mean_auc + 0.05


def test_a_score_that_falls_with_one_kind_is_not_chosen_for_the_others() -> None:
    normal, lesioned = planted(lesion=3.0, gaussian=0.6)
    lesioned["haze"]["lesion"] = normal["lesion"] - 0.5
    choice = choose(normal, lesioned)
    assert np.mean(list(choice.table["lesion"].values())) > np.mean(list(choice.table["gaussian"].values()))
    assert choice.name == "gaussian"


def test_where_none_rises_with_every_kind_the_closest_is_taken_and_warned_of() -> None:
    normal, lesioned = planted(gaussian=-0.2, surprise=-2.0)
    choice = choose(normal, lesioned)
    assert choice.name == "gaussian" and any("sign-flipped" in message for message in warnings(choice))


def test_asked_scores_are_taken_and_warned_of() -> None:
    normal, lesioned = planted(restoration=-2.0, gaussian=1.0)
    choice = choose(normal, lesioned, ["restoration"])
    assert choice.asked and choice.name == "restoration"
    assert any("sign-flipped" in message for message in warnings(choice))
    assert not list(warnings(choose(normal, lesioned)))
    with pytest.raises(UserError, match="no score 'lesion' here"):
        choose(normal, lesioned, ["lesion"])


def test_one_odd_normal_film_does_not_silence_a_score() -> None:
    normal, lesioned = planted(gaussian=1.0, surprise=1.0)
    before = choose(normal, lesioned)
    normal["gaussian"][7] = 1e4
    after = choose(normal, lesioned)
    assert after.name == before.name and after.mean_auc == pytest.approx(before.mean_auc, abs=0.005)


def test_the_mean_of_components_in_the_spread_of_normals() -> None:
    normal, lesioned = planted(gaussian=1.0, surprise=1.0)
    normal = {name: 100 * values + 7 for name, values in normal.items()}
    lesioned = {kind: {n: 100 * v + 7 for n, v in row.items()} for kind, row in lesioned.items()}
    choice = choose(normal, lesioned, ["gaussian", "surprise"])
    joined = choice(normal)
    assert joined.mean() == pytest.approx(0, abs=0.1) and joined.std() == pytest.approx(np.sqrt(0.5), abs=0.07)
    assert choice({name: values / 100 for name, values in normal.items()}).std() < 0.1, "units count"
    one = choose(normal, lesioned, ["gaussian"])
    assert np.median(one(normal)) == pytest.approx(0, abs=1e-9)


def test_json_round_trip() -> None:
    choice = choose(*planted(gaussian=1.0, surprise=0.9))
    known = ("gaussian", "surprise")
    assert choice_from_json(choice_to_json(choice), known) == choice
    raw = choice_to_json(Choice(choice.components, 0.5))
    raw["components"][0]["name"] = "astrology"
    with pytest.raises(UserError, match="astrology"):
        choice_from_json(raw, known)

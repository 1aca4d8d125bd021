"""Negatives among positives, sets of negatives, and films that are neither."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from afire.data.audit.checks import chest_template, judge_polarity
from afire.data.audit.measure import rank_thumb
from tests.data.audit.drawing import draw_chest


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

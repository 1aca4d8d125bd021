"""Conformal p-values hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afire.detect.normals import Calibration
from afire.errors import UserError


@pytest.mark.parametrize("count", [9, 40])
@pytest.mark.parametrize("ties", [False, True])
def test_a_normal_film_gets_a_small_p_value_as_rarely_as_it_says(count: int, ties: bool) -> None:
    rng = np.random.default_rng(0)
    draws = 20_000
    scores = rng.normal(size=(draws, count + 1))
    scores = np.round(scores) if ties else scores
    normals, new = np.sort(scores[:, :-1], axis=1), scores[:, -1]
    p = (1 + (normals >= new[:, None]).sum(axis=1)) / (1 + count)
    assert p[:50] == pytest.approx([Calibration.of(normals[i]).p_values(new[i : i + 1])[0] for i in range(50)])
    for rate in (0.1, 0.2, 0.5):
        assert (p <= rate).mean() <= rate + 0.01
        if not ties:
            assert (p <= rate).mean() == pytest.approx(np.floor(rate * (count + 1)) / (count + 1), abs=0.012)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_the_threshold_is_where_the_p_value_passes_the_rate(normals: list[int], rate: float) -> None:
    calibration = Calibration.of(normals)
    threshold = calibration.threshold(rate)
    for score in np.arange(-6, 7, 0.5):
        alarms = score >= threshold
        assert alarms == bool(calibration.p_values([score])[0] <= rate + 1e-9)


def test_too_few_normals_never_alarm() -> None:
    calibration = Calibration.of([1.0, 2.0, 3.0])
    assert calibration.threshold(0.1) == float("inf") and calibration.smallest_rate() == 0.25
    assert calibration.percentiles([0, 2, 9]).tolist() == [0, 50, 100]


@pytest.mark.parametrize("scores", [[], [float("nan")], [1.0, float("inf")]])
def test_broken_scores_are_refused(scores: list[float]) -> None:
    with pytest.raises(UserError, match="finite scores"):
        Calibration.of(scores)

"""Scores: direction, log space, and the paper's form."""

from __future__ import annotations

import math

import pytest
import torch

from afire.detect.maps import SCORES, badly_restored, film_scores, peak, suspicious
from afire.detect.normals import Standard
from afire.errors import UserError
from afire.methods.equations import anomaly_score


def test_the_papers_score_in_log_space() -> None:
    errors = torch.rand(3, 16, generator=torch.Generator().manual_seed(0)) * 5
    printed = 1 / torch.exp(errors.double()).mean(dim=1)  # A = (1/L sum exp d)^-1
    torch.testing.assert_close(anomaly_score(errors), printed.log())
    torch.testing.assert_close(badly_restored(errors), -printed.log())
    assert torch.isfinite(anomaly_score(torch.full((1, 4), 1e4))).all(), "exp would overflow"


def test_every_score_has_a_map_and_rises_with_it_but_the_papers() -> None:
    raw = {
        name: torch.rand(2, 20, generator=torch.Generator().manual_seed(1)) for name in {s.map for s in SCORES.values()}
    }
    higher = {name: values + 1 for name, values in raw.items()}
    low, high = film_scores(raw, raw, list(SCORES)), film_scores(higher, higher, list(SCORES))
    assert low.keys() == SCORES.keys()
    for name in SCORES:
        assert (high[name] > low[name]).all() == (name != "paper"), name


def test_peak_is_the_mean_of_the_highest_tenth() -> None:
    values = torch.arange(20.0).view(1, 20)
    assert peak(values).item() == 18.5


def fitted(maps: torch.Tensor) -> Standard:
    standard = Standard()
    standard.fit(maps)
    return standard


def test_standards_and_the_hidden_quarter() -> None:
    maps = torch.randn(500, 8, generator=torch.Generator().manual_seed(2)) * 3 + 5
    standard = fitted(maps)(maps)
    torch.testing.assert_close(standard.mean(dim=0), torch.zeros(8), atol=1e-4, rtol=0)
    assert standard.std(dim=0).mean().item() == pytest.approx(1, abs=0.01)
    assert torch.isfinite(fitted(torch.ones(4, 8))(torch.ones(1, 8))).all(), "a constant map has no sd"
    hidden = suspicious(standard)
    assert (hidden.sum(dim=1) == 2).all()
    assert (standard.masked_fill(~hidden, math.inf).amin(1) >= standard.masked_fill(hidden, -math.inf).amax(1)).all()


def test_a_score_without_its_map_is_refused() -> None:
    with pytest.raises(UserError, match="needs the map lesion"):
        film_scores({"gaussian": torch.zeros(1, 4)}, {"gaussian": torch.zeros(1, 4)}, ["lesion"])

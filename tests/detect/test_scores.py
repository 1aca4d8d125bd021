"""Scores: direction, log space, and the paper's form."""

from __future__ import annotations

import math

import pytest
import torch

from afire.detect.maps import MAPS, SCORES, Standard, film_scores, log_mean_exp, peak, reciprocal, suspicious
from afire.errors import UserError


def test_the_papers_score_in_log_space() -> None:
    errors = torch.rand(3, 16, generator=torch.Generator().manual_seed(0)) * 5
    printed = 1 / torch.exp(errors.double()).mean(dim=1)  # A = (1/L sum exp d)^-1
    torch.testing.assert_close(reciprocal(errors), printed.log())
    torch.testing.assert_close(log_mean_exp(errors), -printed.log())
    assert torch.isfinite(log_mean_exp(torch.full((1, 4), 1e4))).all(), "exp would overflow"


def test_every_score_has_a_map_and_rises_with_it_but_the_papers() -> None:
    raw = {name: torch.rand(2, 20, generator=torch.Generator().manual_seed(1)) for name in MAPS}
    higher = {name: values + 1 for name, values in raw.items()}
    low, high = film_scores(raw, raw), film_scores(higher, higher)
    assert low.keys() == SCORES.keys()
    for name in SCORES:
        assert (high[name] > low[name]).all() == (name != "paper"), name


def test_peak_is_the_mean_of_the_highest_tenth() -> None:
    values = torch.arange(20.0).view(1, 20)
    assert peak(values).item() == 18.5


def test_standards_and_the_hidden_quarter() -> None:
    maps = torch.randn(500, 8, generator=torch.Generator().manual_seed(2)) * 3 + 5
    standard = Standard.of(maps)(maps)
    torch.testing.assert_close(standard.mean(dim=0), torch.zeros(8), atol=1e-4, rtol=0)
    assert standard.std(dim=0).mean().item() == pytest.approx(1, abs=0.01)
    assert torch.isfinite(Standard.of(torch.ones(4, 8))(torch.ones(1, 8))).all(), "a constant map has no sd"
    hidden = suspicious(standard)
    assert (hidden.sum(dim=1) == 2).all()
    assert (standard.masked_fill(~hidden, math.inf).amin(1) >= standard.masked_fill(hidden, -math.inf).amax(1)).all()


def test_a_score_without_its_map_is_a_sentence() -> None:
    with pytest.raises(UserError, match="needs the map lesion"):
        film_scores({"gaussian": torch.zeros(1, 4)}, {"gaussian": torch.zeros(1, 4)}, ["lesion"])

"""Schedules: the ends, the warm-up, the batch rule."""

from __future__ import annotations

import itertools

import pytest

from afire.config import TrainingConfig
from afire.methods.base import cosine
from afire.training.engine import Schedules


def schedules(**training: float) -> Schedules:
    recipe = TrainingConfig(epochs=10, warmup_epochs=2, batch_size=512, **training)  # type: ignore[arg-type]
    return Schedules(recipe, steps_per_epoch=5)


def test_learning_rate_scales_with_the_global_batch_and_ends_where_it_should() -> None:
    plan = schedules()
    assert plan.peak_learning_rate == pytest.approx(1e-3)
    rates = [plan.at(step).learning_rate for step in range(plan.steps)]
    assert rates[0] == pytest.approx(1e-4) and rates[9] == pytest.approx(1e-3) == max(rates)
    assert rates[-1] == pytest.approx(1e-6)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))


def test_weight_decay() -> None:
    plan = schedules()
    first, last = plan.at(0), plan.at(plan.steps - 1)
    assert (first.weight_decay, last.weight_decay) == pytest.approx((0.04, 0.4))


def test_a_run_shorter_than_its_warm_up_only_warms_up() -> None:
    plan = Schedules(TrainingConfig(epochs=1, warmup_epochs=20, batch_size=256), steps_per_epoch=4)
    assert [plan.at(step).learning_rate for step in range(4)] == pytest.approx([1.25e-4, 2.5e-4, 3.75e-4, 5e-4])


def test_cosine_of_one_step_is_its_start() -> None:
    assert cosine(1.0, 0.0, 0, 1) == 1.0

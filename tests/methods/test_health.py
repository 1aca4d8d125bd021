"""TokenHealth: each number against a case where its value is known, each verdict against its collapse."""

from __future__ import annotations

import math

import pytest
import torch

from afire.methods.health import TokenHealth, effective_rank, image_dependence, information, measure, place_nats

GOOD = TokenHealth(
    prototype_entropy=0.5,
    usage_entropy=0.95,
    dead_clusters=0.0,
    effective_rank=30.0,
    agreement=0.8,
    abnormal_share=0.1,
    image_dependence=0.4,
    structure=1.0,
)


def one_hot(index_BL: torch.Tensor, clusters: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(index_BL, clusters).float()


def test_assignments_by_position_alone_have_no_image_dependence() -> None:
    q = one_hot(torch.arange(6).expand(8, 6), 6)
    assert image_dependence(q, torch.ones(8, 6, dtype=torch.bool)) == pytest.approx(0, abs=1e-6)


def test_assignments_by_film_alone_are_all_image_dependence() -> None:
    q = one_hot(torch.arange(8)[:, None].expand(8, 6), 8)
    assert image_dependence(q, torch.ones(8, 6, dtype=torch.bool)) == pytest.approx(1, abs=1e-6)


def test_half_position_half_film() -> None:
    # Cluster = 2 * (position parity) + (film parity): one bit each, so half of the information is the film's.
    index = 2 * (torch.arange(6) % 2)[None] + (torch.arange(8) % 2)[:, None]
    assert image_dependence(one_hot(index, 4), torch.ones(8, 6, dtype=torch.bool)) == pytest.approx(0.5, abs=1e-6)


def test_abnormal_tokens_do_not_count_as_films_that_differ() -> None:
    q = one_hot(torch.arange(6).expand(8, 6), 7).clone()
    abnormal = torch.zeros(8, 6, dtype=torch.bool)
    abnormal[::2, 3] = True
    q[abnormal] = one_hot(torch.tensor(6), 7)
    assert image_dependence(q, ~abnormal) == pytest.approx(0, abs=1e-6)


def test_constant_q_carries_nothing() -> None:
    q = torch.full((4, 5, 3), 1 / 3)
    assert image_dependence(q, torch.ones(4, 5, dtype=torch.bool)) == 0


def test_effective_rank_counts_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(4000, 16, generator=generator)
    assert effective_rank(spread) == pytest.approx(16, abs=0.2)
    assert effective_rank(torch.cat([spread[:, :3], torch.zeros(4000, 13)], 1)) == pytest.approx(3, abs=0.1)
    assert effective_rank(torch.ones(50, 4)) == 0


def test_measure_on_known_assignments() -> None:
    index = torch.arange(4).expand(8, 4)
    q = one_hot(index, 8)
    abnormal = torch.zeros(8, 4, dtype=torch.bool)
    abnormal[0] = True
    health = measure(q, q, torch.randn(8, 4, 6), abnormal, torch.full((4, 8), 1 / 8), structure=0.7)
    assert health.dead_clusters == 0.5 and health.agreement == 1.0 and health.abnormal_share == 1 / 8
    assert health.prototype_entropy == pytest.approx(1) and health.usage_entropy == pytest.approx(
        math.log(4) / math.log(8)
    )


@pytest.mark.parametrize(
    ("change", "colour", "words"),
    [
        ({}, "green", "in use"),
        ({"usage_entropy": 0.1}, "red", "one cluster"),
        ({"effective_rank": 1.2}, "red", "one direction"),
        ({"prototype_entropy": 0.999}, "red", "uniform"),
        ({"structure": 0.01, "image_dependence": 0.001}, "red", "position alone"),
        ({"image_dependence": 0.03}, "amber", "follow the position"),
        ({"dead_clusters": 0.7}, "amber", "70% of the clusters are dead"),
        ({"effective_rank": 4.0}, "amber", "few directions"),
        ({"agreement": 0.1}, "amber", "agree on only 10%"),
        ({"abnormal_share": 0.9}, "amber", "90.0% of tokens are abnormal"),
    ],
)
def test_verdicts(change: dict[str, float], colour: str, words: str) -> None:
    found, reason = TokenHealth(**{**GOOD.report().numbers, **change}).verdict()
    assert found == colour and words in reason


def test_information_is_read_from_the_losses() -> None:
    """Where every token tells its place, it has log L nats; what was switched off is not told."""
    nats = math.log(16)
    assert information(nats, 0.0, 0.0) == {"place_information": nats, "category_term": -0.0}
    assert information(nats, nats, None) == {"place_information": pytest.approx(0.0)}
    assert information(nats, None, 0.5) == {"category_term": -0.5} and information(nats, None, None) == {}


def test_places_that_are_not_equally_frequent_hold_less() -> None:
    """The bound keeps below what tokens can tell: three quarters at one place are less than log 2."""
    place = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 1]])
    nats = place_nats(place, 2)
    assert nats == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert place_nats(torch.arange(6).expand(4, 6), 6) == pytest.approx(math.log(6))
    # Tokens that say nothing: the best loss is H(place), and they hold 0 nats, not log 2 - H(place).
    assert information(nats, nats, None)["place_information"] == 0


def test_the_bound_is_below_the_information_of_tokens_that_tell_their_place() -> None:
    """By counting: tokens that say their place with probability p, else any other, all places alike."""
    positions, p = 4, 0.7
    rest = (1 - p) / (positions - 1)
    says = torch.full((positions, positions), rest, dtype=torch.float64).fill_diagonal_(p)
    joint = says / positions
    exact = float((joint * (joint / (joint.sum(0, keepdim=True) * joint.sum(1, keepdim=True))).log()).sum())
    best = -float((joint * says.log()).sum())  # the loss of a posterior that is right
    nats = math.log(positions)
    assert information(nats, best, None)["place_information"] == pytest.approx(exact)
    worse = -float((joint * says.square().div(says.square().sum(1, keepdim=True)).log()).sum())
    assert information(nats, worse, None)["place_information"] < exact

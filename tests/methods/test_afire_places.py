"""Prototypes of places in the chest: equations against slow references, and AFiRe with them from views to a score."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from afire.config import Config
from afire.data.phantom import draw_batch
from afire.detect.maps import Evidence, settle
from afire.errors import UserError
from afire.methods.afire import AFiRe
from afire.methods.base import Keys
from afire.methods.equations import (
    Contrast,
    PrototypeBank,
    category_loss,
    moved_prototypes,
    place_mean,
    position_mean,
    structure_loss,
    surprise,
)
from afire.methods.health import place_entropy
from afire.settings import load_config

B, L, K, PLACES = 4, 5, 6, 7


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def example() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits that ask for a gradient, labels, prototypes, and places of which one has no token and one has many."""
    place = torch.randint(0, PLACES - 1, (B, L), generator=torch.Generator().manual_seed(3))
    place[:, 0] = 2
    return (
        (2 * draw(B, L, K)).requires_grad_(),
        draw(B, L, seed=1) > 0.3,
        torch.softmax(draw(PLACES, K, seed=2), -1),
        place,
    )


def tokens(place: Tensor) -> list[tuple[int, int, int]]:
    return [(i, j, int(place[i, j])) for i in range(B) for j in range(L)]


def slow_structure(log_q: Tensor, abnormal: Tensor, c: Tensor, place: Tensor, tau: float) -> Tensor:
    terms = []
    for i, j, own in tokens(place):
        if not abnormal[i, j]:
            scores = torch.stack([(log_q[i, j].exp() * c[other].log()).sum() / tau for other in range(PLACES)])
            terms.append(torch.logsumexp(scores, 0) - scores[own])
    return torch.stack(terms).mean()


def slow_category(log_q: Tensor, abnormal: Tensor, c: Tensor, place: Tensor, tau: float, of_abnormal: bool) -> Tensor:
    """-log of the share that tokens of its own kind have, among those at its place in all films."""
    q = log_q.exp()
    normal_terms, abnormal_terms = [], []
    for i, j, own in tokens(place):
        here = [(b, other) for b, other, where in tokens(place) if where == own]
        alike = [(q[i, j] * log_q[b, other]).sum() / tau for b, other in here if abnormal[b, other] == abnormal[i, j]]
        unlike = [(q[i, j] * log_q[b, other]).sum() / tau for b, other in here if abnormal[b, other] != abnormal[i, j]]
        if not abnormal[i, j]:
            unlike += [(q[b, other] * c[own].log()).sum() / tau for b, other in here if abnormal[b, other]]
        loss = torch.logsumexp(torch.stack(alike + unlike), 0) - torch.logsumexp(torch.stack(alike), 0)
        (abnormal_terms if abnormal[i, j] else normal_terms).append(loss)
    loss = torch.stack(normal_terms).mean()
    return loss + torch.stack(abnormal_terms).mean() if of_abnormal else loss


def assert_same(fast: Tensor, slow: Tensor, logits: Tensor) -> None:
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(*(torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (fast, slow)))


@pytest.mark.parametrize("tau", [0.1, 1.0])
@pytest.mark.parametrize("both", [False, True])
def test_token_losses_equal_the_references(tau: float, both: bool) -> None:
    logits, abnormal, c, place = example()
    log_q = torch.log_softmax(logits, -1)
    contrast = Contrast(log_q, abnormal, c, temperature=tau, similarity="corrected", place=place)
    if both:  # as training does: scores first
        assert_same(structure_loss(contrast), slow_structure(log_q, abnormal, c, place, tau), logits)
    fast = category_loss(contrast, abnormal_consistency=both)
    assert_same(fast, slow_category(log_q, abnormal, c, place, tau, both), logits)


def test_places_that_are_the_positions_change_nothing() -> None:
    logits, abnormal, c, _ = example()
    log_q, place = torch.log_softmax(logits, -1), torch.arange(L).expand(B, L)
    given = {"temperature": 0.3, "similarity": "corrected"}
    grid = Contrast(log_q, abnormal, c[:L], **given)  # type: ignore[arg-type]
    same = Contrast(log_q, abnormal, c[:L], **given, place=place)  # type: ignore[arg-type]
    assert_same(structure_loss(same), structure_loss(grid), logits)
    assert_same(category_loss(same), category_loss(grid), logits)
    torch.testing.assert_close(surprise(log_q, c[:L], place), surprise(log_q, c[:L]))
    mean, number = place_mean(log_q, place, L)
    torch.testing.assert_close(mean, position_mean(log_q))
    assert (number == 1).all()
    moved = moved_prototypes(c[:L], mean, 0.75, torch.zeros(L, dtype=torch.bool), number)
    torch.testing.assert_close(moved, moved_prototypes(c[:L], mean, 0.75, torch.tensor(False)))


def test_means_and_surprise_by_place() -> None:
    logits, _, c, place = example()
    values = logits.detach()
    mean, number = place_mean(values, place, PLACES)
    for at in range(PLACES):
        here = values[place == at]
        assert number[at] == len(here) / B
        torch.testing.assert_close(mean[at], here.mean(0) if len(here) else torch.zeros(K, dtype=torch.float64))
    log_q = torch.log_softmax(values, -1)
    far = surprise(log_q, c, place)
    for i, j, own in tokens(place):
        torch.testing.assert_close(far[i, j], -(log_q[i, j].exp() * c[own].log()).sum())


def test_a_prototype_moves_with_the_tokens_it_gets() -> None:
    bank = PrototypeBank(3, 2, 0.5, own_places=True)
    mean = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.5, 0.5]])
    number = torch.tensor([1.0, 0.5, 0.0])
    first = bank.moved(mean, number)
    torch.testing.assert_close(first, torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.5, 0.5]]))  # met first: the mean itself
    bank.store(first, number)
    assert bank.met.tolist() == [True, True, False]
    second = bank.moved(mean.flip(1), torch.tensor([1.0, 0.5, 2.0]))
    half = 1 - 0.5**0.5  # of a token for every other film
    torch.testing.assert_close(second, torch.tensor([[0.5, 0.5], [1 - half, half], [0.5, 0.5]]))
    assert "met" not in PrototypeBank(3, 2, 0.5).state_dict()


# AFiRe with them


def config(*overrides: str) -> Config:
    small = ["image.size=32", "encoder.patch_size=8", "prototypes.place=anatomy"]
    return load_config("tiny", overrides=[*small, *overrides])


@pytest.fixture(scope="module")
def films() -> Tensor:
    return torch.from_numpy(draw_batch(2, range(8), 32, normal_share=1.0).images)


KEYS = Keys(0, 0, 0, torch.arange(8))


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("lesions.views=2", "losses.lesion=1", "losses.abnormal_consistency=true"),
        ("prototypes.enabled=false",),
        ("losses.contrast=feature",),
        ("losses.structure=0", "prototypes.move=0.1"),
        ("losses.structure=0", "losses.category=0"),
    ],
)
def test_every_form_of_the_method_learns_with_places(films: Tensor, settings: tuple[str, ...]) -> None:
    model = AFiRe(config(*settings)).train()
    views = model.views(films, KEYS)
    losses = model.losses(model(views))
    losses.total.backward()
    assert torch.isfinite(losses.total)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in trained)
    model.after_step(losses)
    if model.bank is not None:
        met = torch.zeros(16, dtype=torch.bool)
        met[views["place"].flatten()] = True
        assert torch.equal(model.bank.met, met)
        if model.has_clusters:
            torch.testing.assert_close(model.prototypes.sum(1), torch.ones(16))
            assert ((model.prototypes - 1 / 16).abs().amax(1) < 1e-6).equal(~met)
    said = model.health(views, losses.as_floats())
    if said is not None:
        assert said.numbers["place_entropy"] > 0.1 and "nats of the place open" in said.shown
        assert "film dependence" in said.shown


def test_known_places_may_be_given_and_views_find_them(films: Tensor) -> None:
    model = AFiRe(config("lesions.views=2")).train()
    views = dict(model.views(films, KEYS))
    assert torch.equal(model(views)["place"], views["place"])
    assert torch.equal(views["place"], model.places(films))  # type: ignore[arg-type]
    without = {name: view for name, view in views.items() if name != "place"}
    assert torch.equal(model(without)["place"], views["place"])
    as_grid = {**views, "place": torch.arange(16).expand(8, 16)}
    grid = AFiRe(config("lesions.views=2", "prototypes.place=grid")).train()
    for mine, theirs in zip(
        model.losses(model(as_grid)).terms.values(), grid.losses(grid(without)).terms.values(), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_moved_films_are_those_of_their_keys(films: Tensor) -> None:
    model = AFiRe(config("prototypes.move=0.2"))
    views = model.views(films, KEYS)
    assert not torch.allclose(views["images"], films, atol=0.05)
    part = model.views(films[[3, 1]], KEYS._replace(rows=torch.tensor([3, 1])))
    torch.testing.assert_close(part["images"], views["images"][[3, 1]], atol=1e-6, rtol=0)
    assert place_entropy(views["place"], 16) > place_entropy(AFiRe(config()).views(films, KEYS)["place"], 16)


def test_place_entropy_is_what_position_leaves_open() -> None:
    assert place_entropy(torch.arange(4).expand(6, 4), 4) == 0
    half = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 2]])
    assert place_entropy(half, 3) == pytest.approx(0.5 * torch.tensor(2.0).log().item())


def test_surprise_of_a_detector_is_that_of_the_place(films: Tensor) -> None:
    model = AFiRe(config()).train()
    losses = model.losses(model(model.views(films, KEYS)))
    model.after_step(losses)
    settle(model)
    evidence = Evidence(model, films)
    place = model.places(films)
    assert place is not None
    log_q = model.assign(films)
    expected = torch.stack(
        [-(log_q[i].exp() * model.prototypes[place[i]].clamp_min(1e-6).log()).sum(-1) for i in range(8)]
    )
    torch.testing.assert_close(evidence.surprise, expected)
    torch.testing.assert_close(model.readouts(films)["surprise"], expected)


def test_what_does_not_go_together_is_a_message(films: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"prototypes\.place anatomy needs head\.form shared"):
        config("head.form=per_position")
    model = AFiRe(config()).eval()
    monkeypatch.setattr("afire.methods.afire.is_exporting", lambda: True)
    with pytest.raises(UserError, match="cannot be asked in a graph"):
        model.readouts(films)

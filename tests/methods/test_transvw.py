"""TransVW: words are found where films resemble each other, named and restored; losses against slow references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from afire.methods.base import Keys
from afire.methods.crops import cut
from afire.methods.transvw import NONE, TransVW, directions, nearest_films, word_boxes, word_loss
from tests.methods.test_restoring import film_model, films, keys

EASY = ("options.paint=0", "options.nonlinear=0", "options.shuffle=0", "encoder.width=32")


def made(*overrides: str) -> TransVW:
    model = film_model("transvw", *overrides)
    assert isinstance(model, TransVW)
    return model


def prepared(images: Tensor, *overrides: str, rows: Tensor | None = None) -> TransVW:
    model = made(*overrides)
    rows = torch.arange(len(images)) if rows is None else rows

    def all_films() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(images), 5):
            yield images[start : start + 5], rows[start : start + 5]

    model.prepare(0, all_films)
    return model


def test_the_losses_equal_their_references_in_value_and_gradient() -> None:
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    words = torch.tensor([2, NONE, 5, 0, NONE])
    terms = [-(logits[film].exp() / logits[film].exp().sum())[words[film]].log() for film in (0, 2, 3)]
    slow, loss = sum(terms) / 3, word_loss(logits, words)
    torch.testing.assert_close(loss, slow)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(slow, logits))
    nothing = word_loss(logits, torch.full((5,), NONE))
    assert nothing == 0 and torch.equal(torch.autograd.grad(nothing, logits)[0], torch.zeros(5, 6))
    model = prepared(films(12), "options.classification=0.5", "options.restoration=2").train()
    losses = model.losses(model(model.views(films(12), keys(12))))
    torch.testing.assert_close(losses.total, 0.5 * losses["classification"] + 2 * losses["restoration"])
    assert losses["classification"] > 0


def test_resemblance_is_distance_along_the_leading_directions() -> None:
    small = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 5, 1, 1, 1, 1, 1, 1])
    codes = directions(small, 2)
    _, _, vectors = torch.linalg.svd(small - small.mean(0), full_matrices=False)
    expected = torch.cdist((small - small.mean(0)) @ vectors[:2].T, (small - small.mean(0)) @ vectors[:2].T)
    torch.testing.assert_close(torch.cdist(codes, codes).float(), expected, rtol=1e-4, atol=1e-4)
    found = nearest_films(codes, torch.tensor([4, 7]), 3)
    for reference, row in zip((4, 7), found.tolist(), strict=True):
        assert row == sorted(range(20), key=lambda film: float(expected[reference, film]))[:3] and row[0] == reference
    assert nearest_films(codes[:2], torch.tensor([1]), 4).tolist() == [[1, 0, NONE, NONE]]


def test_words_are_found_among_films_alike_and_kept_in_buffers() -> None:
    kinds = films(2, seed=3)
    noise = 0.02 * torch.rand(20, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    images = (kinds.repeat_interleave(10, 0) + noise).clamp(0, 1)
    rows = torch.arange(20) * 3 + 1  # rows of the manifest, not of the run
    model = prepared(images, "options.films=10", rows=rows)
    for word in model.members:
        found = set(word.tolist())
        assert found in (set(rows[:10].tolist()), set(rows[10:].tolist()))
    before = model.members.clone()
    model.prepare(1, lambda: iter(()))  # later epochs look at nothing
    assert torch.equal(model.members, before) and {"members", "places"} <= model.state_dict().keys()
    again = prepared(images, "options.films=10", rows=rows)
    assert torch.equal(again.members, before) and torch.equal(again.places, model.places)


def test_a_film_shows_its_words_and_no_other() -> None:
    model, images = made("options.words=3", "options.films=2"), films(4)
    model.members.copy_(torch.tensor([[0, 1], [1, NONE], [1, 2]]))
    seen: dict[int, set[int]] = {film: set() for film in range(4)}
    for epoch in range(40):
        views = model.views(images, Keys(0, epoch, 0, torch.arange(4)))
        for film, word in enumerate(views["word"].tolist()):
            seen[film].add(word)
            if word != NONE:
                part = cut(images[[film]], word_boxes(model.places[[word]], 0.5)[:, None], 32)
                torch.testing.assert_close(views["parts"][[film]], part)
    assert seen == {0: {0}, 1: {0, 1, 2}, 2: {2}, 3: {NONE}}


def test_a_word_lies_inside_the_film() -> None:
    boxes = word_boxes(torch.tensor([[0.0, 1.0], [0.5, 0.5]]), 0.5)
    torch.testing.assert_close(boxes, torch.tensor([[0.0, 0.5, 0.5, 0.5], [0.25, 0.25, 0.5, 0.5]]))


def test_health_tells_what_is_wrong_with_words() -> None:
    noise = 0.02 * torch.rand(12, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    images = (films(1) + noise).clamp(0, 1)  # all alike: a place looks the same in each
    none = made().health(made().views(images, keys(12)), {})
    assert none.colour == "amber" and none.reason.startswith("only 0% of the films are in a word")
    model = prepared(images, "options.words=3", "options.films=12", "options.classification=1", *EASY)
    told = model.health(model.views(images, keys(12)), {})
    assert told.numbers["films_with_words"] == 1
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        loss = model.losses(model(model.views(images, keys(12, step)))).total
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    views = model.views(images, keys(12, 100))
    assert model.health(views, {}).numbers["words_named"] > 0.7


def test_bad_settings_are_messages() -> None:
    from afire.errors import UserError

    with pytest.raises(UserError, match="word_side"):
        made("options.word_side=2")

"""The detector that phantoms teach: its losses, what it is shown, and what it starts from."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from afire.config import Config
from afire.detect.taught import (
    CELL,
    KINDS,
    MAPS,
    Finder,
    FinderConfig,
    FinderSettings,
    Taught,
    film_loss,
    known_loss,
    plain,
)
from afire.errors import UserError
from afire.methods.base import Keys
from afire.settings import load_config

SIZE = 64


def config_of(**settings: object) -> Config:
    chosen = FinderConfig(taught=FinderSettings(start="nothing", films=48, width=8, blocks=1, **settings))  # type: ignore[arg-type]
    return Taught.config_of(load_config(None, None, [f"image.size={SIZE}"]), chosen, 32)


def begun(films: int = 24, **settings: object) -> tuple[Finder, Tensor]:
    """A learner that has drawn its phantoms, and normal films."""
    finder = Finder(config_of(**settings))
    images = torch.rand(films, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    finder.begin_run(torch.arange(films), lambda rows: images[rows])
    return finder, images


def cross_entropy(logit: float, target: float, positive: float = 1.0) -> float:
    likely = 1 / (1 + math.exp(-logit))
    return -(positive * target * math.log(likely) + (1 - target) * math.log(1 - likely))


def test_places_count_on_known_films_only() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 2, 2, 2, generator=generator, requires_grad=True)
    target, known = torch.rand(3, 2, 2, 2, generator=generator), torch.tensor([[1.0], [0.0], [1.0]])
    slow = [
        cross_entropy(float(logit.detach()), float(truth), positive=3.0)
        for film in (0, 2)
        for logit, truth in zip(logits[film].flatten(), target[film].flatten(), strict=True)
    ]
    loss = known_loss(logits, target, known, positive=3.0)
    assert float(loss) == pytest.approx(np.mean(slow), rel=1e-5)
    loss.backward()
    assert logits.grad is not None and not logits.grad[1].any() and logits.grad[0].all()
    expected = (torch.sigmoid(logits) * (1 - target) - 3.0 * target * (1 - torch.sigmoid(logits))) / 16
    torch.testing.assert_close(logits.grad[0], expected[0].detach())
    assert float(known_loss(logits, target, torch.zeros(3, 1))) == 0, "none known: nothing, and no NaN"


def test_a_film_is_judged_by_kinds_where_they_are_known() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 1 + KINDS, generator=generator, requires_grad=True)
    labels, known = (torch.rand(4, 1 + KINDS, generator=generator) < 0.3).float(), torch.tensor([[0.0], [1], [1], [0]])
    any_finding = np.mean([cross_entropy(float(logits[n, 0].detach()), float(labels[n, 0])) for n in range(4)])
    kinds = [
        cross_entropy(float(logits[n, k].detach()), float(labels[n, k])) for n in (1, 2) for k in range(1, 1 + KINDS)
    ]
    loss = film_loss(logits, labels, known)
    assert float(loss) == pytest.approx(any_finding + np.mean(kinds), rel=1e-5)
    loss.backward()
    assert logits.grad is not None and not logits.grad[0, 1:].any() and logits.grad[:, 0].all()


def test_views_are_normal_films_and_phantoms_and_follow_from_their_keys() -> None:
    finder, images = begun(pasted=0.5)
    rows = torch.arange(8)
    views = finder.views(images[:8], Keys(0, 1, 5, rows))
    places = SIZE // CELL
    assert views["images"].shape == (16, 1, SIZE, SIZE) and views["maps"].shape == (16, MAPS, places, places)
    assert views["known"][:, 0].tolist() == [0.0] * 8 + [1.0] * 8
    assert not views["maps"][:8, 1:].any(), "nothing is known about the anatomy of patients"
    pasted = views["maps"][:8, 0].flatten(1).amax(dim=1) > 0
    assert 0 < int(pasted.sum()) < 8 and not views["labels"][:8][~pasted].any()
    again = finder.views(images[4:8], Keys(0, 1, 9, rows[4:]))
    torch.testing.assert_close(again["images"][:4], views["images"][4:8])
    torch.testing.assert_close(again["images"][4:], views["images"][12:])
    other = finder.views(images[:8], Keys(0, 2, 5, rows))
    assert not torch.equal(other["images"], views["images"])


def test_faint_phantoms_are_not_shown_and_without_pastes_normal_films_are_normal() -> None:
    finder, images = begun(pasted=0.0, faintest=0.6, normal_share=0.2)
    bank = finder._bank.at(0)
    shown = plain(bank, 0.6)
    severity = bank.severity[shown].max(axis=1)
    assert ((severity == 0) | (severity >= 0.6)).all() and (severity > 0).any() and len(shown) < 48
    views = finder.views(images[:8], Keys(0, 0, 0, torch.arange(8)))
    assert finder.donors is None and not views["maps"][:8].any() and not views["labels"][:8].any()


def test_phantoms_that_are_all_too_faint_are_a_sentence() -> None:
    finder, images = begun(pasted=0.0, faintest=0.999, normal_share=0.0)
    with pytest.raises(UserError, match=r"all findings are fainter than taught\.faintest=0\.999"):
        finder.views(images[:8], Keys(0, 0, 0, torch.arange(8)))


def test_phantoms_drawn_anew_follow_from_the_epoch() -> None:
    finder, images = begun(pasted=0.0, renewed=0.5)
    rows = torch.arange(8)
    first, later = (finder.views(images[:8], Keys(0, epoch, 0, rows)) for epoch in (0, 1))
    resumed, _ = begun(pasted=0.0, renewed=0.5)
    again = resumed.views(images[:8], Keys(0, 1, 0, rows))
    assert torch.equal(again["images"], later["images"]) and torch.equal(again["maps"], later["maps"])
    held, _ = begun(pasted=0.0)
    assert torch.equal(held.views(images[:8], Keys(0, 0, 0, rows))["images"], first["images"])
    old, new = finder._bank.at(0).images.copy(), finder._bank.at(1).images
    assert sum(not np.array_equal(*pair) for pair in zip(old, new, strict=True)) == 24, "half of the films are others"
    finder.end_run()


def test_every_parameter_learns() -> None:
    finder, images = begun()
    losses = finder.losses(finder(finder.views(images[:8], Keys(0, 0, 0, torch.arange(8)))))
    assert set(losses.terms) == {"places", "findings", "anatomy", "film"}
    losses.total.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in finder.network.parameters())


def test_it_scores_by_what_it_is_sure_of() -> None:
    detector = Taught(config_of(), FinderConfig())
    images = torch.rand(2, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(3))
    examined = detector.examine(images, restore=False)
    assert set(examined.scores) == set(Taught.meanings) and examined.map.shape == (2, (SIZE // CELL) ** 2)
    slow = [math.log(np.mean([1 / (1 + math.exp(-float(place))) for place in film])) for film in examined.map]
    np.testing.assert_allclose(examined.scores["places"].numpy(), slow, rtol=1e-5)
    assert detector.model.network.head.last.bias is not None
    with torch.no_grad():
        detector.model.network.head.last.bias[0] += 3
    surer = detector.examine(images, restore=False)
    assert all((surer.scores[name] > examined.scores[name] + 1).all() for name in examined.scores)


def test_a_start_of_another_kind_or_width_is_refused(tmp_path: Path) -> None:
    from afire.detect.base import FitTask

    def start(settings: FinderConfig) -> None:
        first = Taught.first_weights(FitTask(config_of(), settings, None, tmp_path))  # type: ignore[arg-type]
        assert first is not None
        first(Finder(config_of()))

    with pytest.raises(UserError, match=r"holds no detector"):
        start(FinderConfig(taught=FinderSettings(start=str(tmp_path))))
    with pytest.raises(UserError, match="another width"):
        start(FinderConfig())

"""SALAD as we read it: corruption, structural similarity, losses, centre and score against slow references."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from afire.data.pack import PackedFilms
from afire.detect.base import load_detector
from afire.detect.fit import fit_detector
from afire.detect.salad import SALAD, SALADNetworks, corrupted, structural_similarity
from afire.methods.base import Keys, train_only
from afire.settings import load_config
from tests.detect.test_learned import SIZE, task_of


def networks(**options: object) -> SALADNetworks:
    config = load_config("tiny", overrides=[f"image.size={SIZE}", "encoder.patch_size=8"])
    return SALADNetworks(config.model_copy(update={"options": {"width": 4, "latent": 6, **options}}))


def drawn_films(count: int = 3, seed: int = 3, side: int = SIZE) -> Tensor:
    return torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(seed))


def test_cells_are_shuffled_or_blanked_and_the_rest_stays() -> None:
    images, cell, along = drawn_films(2, side=12).double(), 4, 3
    generator = torch.Generator().manual_seed(0)
    fate = torch.randint(0, 3, (2, 9), generator=generator)
    order = torch.stack([torch.randperm(16, generator=generator) for _ in range(2)])
    greys = torch.rand(2, 9, generator=generator, dtype=torch.float64)
    broken = corrupted(images, cell, fate == 1, fate == 2, order, greys)
    for film in range(2):
        for place in range(9):
            top, left = cell * (place // along), cell * (place % along)
            before = images[film, 0, top : top + cell, left : left + cell].flatten().tolist()
            after = broken[film, 0, top : top + cell, left : left + cell].flatten().tolist()
            shuffled = [before[pixel] for pixel in order[film].tolist()]
            assert after == [before, shuffled, [float(greys[film, place])] * 16][int(fate[film, place])]


def test_corruption_follows_from_seed_step_and_film_alone() -> None:
    learner = networks(cell=4, shuffled=0.3, blanked=0.2)
    rows = torch.tensor([4, 9, 2])
    broken = learner.views(drawn_films(), Keys(0, 0, 0, rows))["corrupted"]
    assert torch.equal(broken[1:2], learner.views(drawn_films()[1:2], Keys(0, 5, 0, rows[1:2]))["corrupted"])
    for other in (Keys(1, 0, 0, rows), Keys(0, 0, 1, rows), Keys(0, 0, 0, rows + 1)):
        assert not torch.equal(broken, learner.views(drawn_films(), other)["corrupted"])


def test_as_many_cells_as_were_asked_for() -> None:
    learner = networks(cell=4, shuffled=0.3, blanked=0.2)
    views = learner.views(drawn_films(200), Keys(0, 0, 0, torch.arange(200)))
    images, broken = (
        views[name].reshape(200, 8, 4, 8, 4).transpose(2, 3).reshape(-1, 16) for name in ("images", "corrupted")
    )
    blank = (broken == broken[:, :1]).all(dim=1)
    moved = (broken != images).any(dim=1) & ~blank
    assert blank.double().mean() == pytest.approx(0.2, abs=0.02) and moved.double().mean() == pytest.approx(
        0.3, abs=0.02
    )
    assert torch.equal(broken[moved].sort(dim=1).values, images[moved].sort(dim=1).values)
    assert -1 <= broken.min() < -0.9 and 0.9 < broken.max() <= 1


def slow_similarity(first: Tensor, second: Tensor) -> Tensor:
    """SSIM window by window, for pixels from -1 to 1."""
    first, second = (first + 1) / 2, (second + 1) / 2
    values = []
    for top in range(first.shape[0] - 6):
        for left in range(first.shape[1] - 6):
            a, b = (image[top : top + 7, left : left + 7].flatten() for image in (first, second))
            spread_a, spread_b = (a - a.mean()).square().mean(), (b - b.mean()).square().mean()
            shared = ((a - a.mean()) * (b - b.mean())).mean()
            light = (2 * a.mean() * b.mean() + 0.01**2) / (a.mean() ** 2 + b.mean() ** 2 + 0.01**2)
            values.append(light * (2 * shared + 0.03**2) / (spread_a + spread_b + 0.03**2))
    return torch.stack(values).mean()


def test_structural_similarity_in_value_and_gradient() -> None:
    first, second = (drawn_films(2, seed, side=10).double() * 2 - 1 for seed in (1, 2))
    first = (0.7 * second + 0.3 * first).requires_grad_()
    found = structural_similarity(first, second)
    expected = torch.stack([slow_similarity(one[0], other[0]) for one, other in zip(first, second, strict=True)])
    torch.testing.assert_close(found, expected)
    weights = torch.tensor([1.0, -2.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found * weights).sum(), first)
    (slow,) = torch.autograd.grad((expected * weights).sum(), first)
    torch.testing.assert_close(gradient, slow)
    torch.testing.assert_close(structural_similarity(second, second), torch.ones(2, dtype=torch.float64))
    assert (structural_similarity(-second, second) < 0.1).all()


def test_the_losses_of_each_turn_and_the_centre() -> None:
    learner = networks(structure=0.5, consistency=0.1, centre=0.2, adversarial=0.3, momentum=0.75)
    learner.centre.copy_(torch.arange(6.0))
    said = {"fake": [1.0, -3.0], "real": [0.5, 2.0], "error": [0.1, 0.3], "structure": [0.5, 0.7]}
    outputs = {name: torch.tensor(values) for name, values in {**said, "consistency": [4.0, 8.0]}.items()}
    outputs["codes"] = torch.tensor([[1.0] * 6, [3.0] * 6])

    def crossed(logit: float, truth: int) -> float:
        """Cross-entropy as it is written."""
        chance = 1 / (1 + math.exp(-logit))
        return -math.log(chance) if truth else -math.log(1 - chance)

    judged = sum(crossed(logit, 1) for logit in said["real"]) / 2 + sum(crossed(logit, 0) for logit in said["fake"]) / 2
    fooled = sum(crossed(logit, 1) for logit in said["fake"]) / 2
    away = sum((code - place) ** 2 for code in (1.0, 3.0) for place in range(6)) / 12
    discriminator, restorer = (learner.losses(outputs, turn) for turn in learner.turns)
    assert discriminator.total.item() == pytest.approx(judged, rel=1e-5)
    expected = 0.2 + 0.5 * 0.6 + 0.1 * 6 + 0.2 * away + 0.3 * fooled
    assert restorer.total.item() == pytest.approx(expected, rel=1e-5)
    learner.after_step(restorer)
    torch.testing.assert_close(learner.centre, 0.75 * torch.arange(6.0) + 0.25 * 2)


def test_what_is_compared() -> None:
    """The drawing of the corrupted film with the film itself, and its code with the one it was drawn from."""
    learner = networks()
    views = learner.views(drawn_films(), Keys(0, 0, 0, torch.arange(3)))
    outputs = learner(views)
    code = learner.code(views["corrupted"])
    drawn = learner.decoder(code)
    assert not torch.equal(views["images"], views["corrupted"]) and drawn.abs().max() <= 1
    torch.testing.assert_close(outputs["error"], (drawn - views["images"]).square().mean(dim=(1, 2, 3)))
    torch.testing.assert_close(outputs["consistency"], (learner.code(drawn) - code).square().mean(dim=1))
    torch.testing.assert_close(outputs["structure"], 1 - structural_similarity(drawn, views["images"]))
    torch.testing.assert_close(code.mean(dim=1), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(code.square().mean(dim=1), torch.ones(3), atol=1e-2, rtol=0)


def test_turns_train_their_networks() -> None:
    learner = networks()
    views = learner.views(drawn_films(), Keys(0, 0, 0, torch.arange(3)))
    trained = {turn: [weight for _, weight in learner.parameters_of(turn)] for turn in learner.turns}
    for turn in learner.turns:
        train_only(turn, trained)
        learner.zero_grad()
        learner.losses(learner(views), turn).total.backward()
        for name, weight in learner.named_parameters():
            own = name.startswith("discriminator.") == (turn == "discriminator")
            assert (weight.grad is not None) == own, name


def test_the_score_is_that_of_film_and_code(films: PackedFilms, tmp_path: Path) -> None:
    fit_detector(task_of("salad", films, tmp_path / "model", "held_out=0.4", "train.epochs=2", "salad.consistency=0.3"))
    detector = load_detector(tmp_path / "model")
    assert isinstance(detector, SALAD)
    assert detector.model.centre.abs().sum() > 0
    images = films.batch([50, 51])
    found = detector.score(images, all_scores=True)
    model = detector.model.double()
    for number, image in enumerate(images.double()):
        film = image[None] * 2 - 1
        with torch.no_grad():
            code = model.code(film)
            drawn = model.decoder(code)
            again = model.code(drawn)
        error, consistency, centre = (
            float(np.mean((one.numpy() - other.numpy()) ** 2))
            for one, other in ((film, drawn), (code, again), (code, model.centre))
        )
        assert found.scores["translation"][number] == pytest.approx(error + 0.3 * consistency, rel=1e-3)
        assert found.scores["error"][number] == pytest.approx(error, rel=1e-3)
        assert found.scores["centre"][number] == pytest.approx(centre, rel=1e-3)

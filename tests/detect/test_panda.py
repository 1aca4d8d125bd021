"""PANDA: its losses, Fisher information and neighbours against slow references, and features that do not collapse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.detect.fit import detect_settings
from afire.detect.panda import PANDA, Compacted, NormalFeatures
from afire.errors import UserError
from afire.methods.base import AllFilms, Progress
from afire.settings import load_config
from tests.detect.test_learned_on_trunk import fit_on_trunk

TRUNK = ["image.size=32", "encoder.width=16", "encoder.depth=4", "encoder.heads=2", "encoder.patch_size=8"]
TRUNK += ["image.normalise=imagenet"]


def config(*settings: str, films: int | None = None) -> Config:
    return PANDA.config_of(load_config("tiny", overrides=TRUNK), detect_settings(settings, "panda"), films)


def drawn(count: int = 6) -> Tensor:
    smooth = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(smooth, size=(32, 32), mode="bilinear")


def passes(images: Tensor, size: int = 4) -> AllFilms:
    def films() -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(images.split(size), torch.arange(len(images)).split(size), strict=True))

    return films


def prepared(*settings: str) -> Compacted:
    learner = Compacted(config(*settings))
    learner.prepare(0, passes(drawn()))
    return learner


def test_the_last_half_is_trained_and_nothing_else() -> None:
    names = {name for name, _ in Compacted(config()).parameters_of("all")}
    assert {".".join(name.split(".")[:3]) for name in names if "blocks" in name} == {"trunk.blocks.2", "trunk.blocks.3"}
    assert {name for name in names if "blocks" not in name} == {"trunk.norm.weight", "trunk.norm.bias"}
    one = {name for name, _ in Compacted(config("panda.blocks=1")).parameters_of("all")}
    assert one == {name for name in names if not name.startswith("trunk.blocks.2.")}
    assert {name for name, _ in Compacted(config("panda.blocks=4")).parameters_of("all")} > names


def test_tokens_are_those_of_the_trunk() -> None:
    learner = Compacted(config())
    with torch.no_grad():
        whole = learner.trunk(learner.normalise(drawn()))[:, 1:]
    torch.testing.assert_close(learner.tokens(drawn()), whole)


def test_the_centre_is_the_first_mean_and_is_measured_once() -> None:
    learner = prepared()
    expected = learner.tokens(drawn()).mean(dim=1).mean(dim=0)
    torch.testing.assert_close(learner.centre, expected.detach())
    before = {name: value.clone() for name, value in learner.named_buffers()}
    learner.prepare(1, passes(drawn(2)))
    assert all(torch.equal(before[name], value) for name, value in learner.named_buffers())


def test_the_fisher_information_is_the_mean_square_of_all_gradients() -> None:
    """Signs are drawn: with many films alike, the estimate comes near the sum over all numbers of the feature."""
    learner = Compacted(config("panda.fisher_films=4000"))
    images = drawn(2)
    expected = []
    for film in images.split(1):
        feature = learner.tokens(film).mean(dim=(0, 1))
        squares = 0
        for number in feature:
            gradients = torch.autograd.grad(number, learner.trained(), retain_graph=True)
            squares = squares + torch.cat([gradient.flatten() for gradient in gradients]).square()
        expected.append(squares / len(feature))
    learner.prepare(0, passes(images.repeat(300, 1, 1, 1), 64))
    slow = torch.stack(expected).mean(dim=0)
    large = slow > slow.quantile(0.5)
    ratio = learner.fisher[large] / slow[large]
    assert abs(ratio.mean().item() - 1) < 0.05 and ratio.std() < 0.15
    assert torch.equal(learner.start, torch.cat([weight.detach().flatten() for weight in learner.trained()]))


def test_few_films_say_which_weights_matter() -> None:
    learner = Compacted(config("panda.fisher_films=3"))
    chosen = list(learner._every(passes(drawn(8), 3), 3))
    whole = learner._before_last_blocks(drawn(8))
    torch.testing.assert_close(torch.cat(chosen), whole[[0, 3, 6]])


def test_losses_and_gradients_are_the_papers() -> None:
    learner = prepared("panda.stiffness=50")
    with torch.no_grad():
        for weight in learner.trained():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    losses = learner.losses(learner({"images": drawn()}))
    compact = torch.zeros(())
    for film in drawn().split(1):
        feature = learner.tokens(film).mean(dim=1)[0]
        compact = compact + sum((a - b) ** 2 for a, b in zip(feature, learner.centre, strict=True)) / len(feature) / 6
    drift, position = torch.zeros(()), 0
    for weight in learner.trained():
        for value in weight.flatten():
            drift = drift + 0.5 * learner.fisher[position] * (value - learner.start[position]) ** 2
            position += 1
    torch.testing.assert_close(losses["compactness"], compact)
    torch.testing.assert_close(losses["drift"], drift, rtol=1e-3, atol=0)
    first = torch.autograd.grad(losses.total, learner.trained())
    second = torch.autograd.grad(compact + 50 * drift, learner.trained())
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def spread_after(*settings: str, steps: int = 60) -> float:
    """How far features still lie apart after the training, as a share of how far they did."""
    learner = prepared(*settings)
    optimiser = torch.optim.SGD(learner.trained(), lr=0.05, momentum=0.9)
    spreads = []
    for step in range(steps):
        outputs = learner({"images": drawn()})
        spreads.append(outputs["features"].detach().var(dim=0).sum().item())
        optimiser.zero_grad()
        learner.losses(outputs).total.backward()
        for weight in learner.frozen(Progress(step, steps, steps)):
            weight.grad = None
        optimiser.step()
    return spreads[-1] / spreads[0]


def test_features_collapse_unless_something_holds_them() -> None:
    alone = spread_after("panda.stiffness=0")
    assert alone < 0.2
    assert spread_after("panda.stiffness=30") > 3 * alone
    assert spread_after("panda.against=early", "panda.updates=5") > 3 * alone
    assert spread_after("panda.against=early", "panda.updates=60") < 0.2


def test_an_early_stop_is_a_number_of_updates() -> None:
    assert config("panda.against=early", films=320).training.epochs == 50, "of at most train.epochs"
    short = config("panda.against=early", "panda.updates=25", films=320)
    assert short.training.epochs == 3 and config(films=320).training.epochs == 50
    learner = Compacted(short)
    assert not learner.frozen(Progress(24, 30, 10)) and learner.frozen(Progress(25, 30, 10)) == learner.trained()
    assert len(learner.fisher) == 0 and "drift" not in learner({"images": drawn()})


def test_an_early_stop_keeps_still_in_the_loop(films: PackedFilms, tmp_path: Path) -> None:
    """There are three updates in an epoch."""

    def weights(updates: int) -> Tensor:
        settings = ("panda.against=early", f"panda.updates={updates}", "train.epochs=1")
        detector = fit_on_trunk("panda", films, tmp_path / str(updates), *settings)
        return torch.cat([weight.flatten() for weight in detector.model.parameters()])

    one, three, many = weights(1), weights(3), weights(100)
    assert not torch.equal(one, three) and torch.equal(three, many)


def slow_distances(films: np.ndarray, normals: np.ndarray, k: int) -> list[float]:
    return [float(np.mean(sorted(np.sum((film - normals) ** 2, axis=1))[:k])) for film in films]


@pytest.mark.parametrize("k", [1, 2, 5])
def test_neighbours_are_found_exactly(k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    normals, films = (torch.randn(count, 6, generator=generator) + 100 for count in (40, 7))
    known = NormalFeatures()
    known.fit(normals, torch.zeros(3, 6))
    found = known.distances(films, k)
    np.testing.assert_allclose(
        found.numpy(), slow_distances(films.double().numpy(), normals.double().numpy(), k), rtol=1e-4
    )
    assert known.distances(normals[:1], 1).item() < 1e-6
    torch.testing.assert_close(known.from_centre(films), (films - normals.mean(dim=0)).square().sum(dim=1))


def test_places_are_compared_with_their_own_mean() -> None:
    known, tokens = NormalFeatures(), torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    known.fit(torch.zeros(4, 6), tokens[0])
    torch.testing.assert_close(known.from_places(tokens)[0], torch.zeros(3))
    torch.testing.assert_close(known.from_places(tokens)[1, 2], (tokens[1, 2] - tokens[0, 2]).square().sum())


def test_what_is_kept_of_normals_comes_from_those_that_fit(films: PackedFilms, tmp_path: Path) -> None:
    detector = fit_on_trunk("panda", films, tmp_path / "model")
    assert isinstance(detector, PANDA)
    count = detector.origin["parts"]["fit"]
    assert detector.normals.features.shape == (count, 16) and detector.normals.places.shape == (16, 16)
    torch.testing.assert_close(detector.normals.features.mean(dim=0), torch.zeros(16), atol=1e-5, rtol=0)
    torch.testing.assert_close(detector.normals.places.mean(dim=0), detector.normals.centre, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("panda.blocks=5", "panda.blocks is 5, but the trunk has 4 blocks"),
        ("panda.neighbours=0", "greater than or equal to 1"),
        ("panda.against=hope", "ewc"),
    ],
)
def test_hostile_settings_are_one_message(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Compacted(config(setting))

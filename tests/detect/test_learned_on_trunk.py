"""What detectors on a pre-trained trunk share: its weights come in and stay, and two processes are one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.detect import DETECTORS
from afire.detect.base import AnomalyDetector, FitTask, load_detector
from afire.detect.fit import detect_settings, fit_detector, open_networks
from afire.detect.learned import OnTrunk, TrunkLearner, blocks_of
from afire.errors import UserError
from afire.methods.base import Keys
from afire.settings import load_config
from afire.weights import open_weights
from afire.weights.files import write_tensors
from tests import commands

METHODS = [name for name in DETECTORS if issubclass(DETECTORS[name], OnTrunk)]
TRUNK = [
    *("image.size=32", "image.normalise=imagenet", "encoder.width=16", "encoder.depth=3", "encoder.heads=2"),
    *("encoder.patch_size=8", "encoder.drop_path=0.5"),
]
QUICK = ["held_out=0.4", "false_alarms=0.2", "train.epochs=2", "train.batch_size=8"]
FROZEN = {"fae": "trunk.", "mkd": "trunk.", "panda": "trunk.blocks.0."}


def fit_on_trunk(method: str, films: PackedFilms, out: Path, *settings: str) -> AnomalyDetector:
    networks = open_networks("random", "tiny", None, TRUNK)
    chosen = detect_settings([*QUICK, *settings], method)
    return fit_detector(FitTask(networks.config, chosen, films, out, source="drawn", device="cpu", method=method))


@pytest.fixture(scope="module", params=METHODS)
def fitted(
    request: pytest.FixtureRequest, films: PackedFilms, tmp_path_factory: pytest.TempPathFactory
) -> AnomalyDetector:
    return fit_on_trunk(request.param, films, tmp_path_factory.mktemp("on trunk") / "model")


def learner_of(method: str, *settings: str) -> TrunkLearner:
    kind = DETECTORS[method]
    config: Config = kind.config_of(load_config("tiny", overrides=TRUNK), detect_settings(settings, method))
    learner: TrunkLearner = kind.Networks(config)
    return learner


def test_there_are_three_of_them() -> None:
    assert set(METHODS) == {"fae", "mkd", "panda"} == set(FROZEN)


def test_what_is_frozen_is_as_it_was_given(fitted: AnomalyDetector) -> None:
    given = open_weights("random", fitted.config, seed=0).trunk.state_dict()
    now, prefix = fitted.model.state_dict(), FROZEN[fitted.method]
    held = [name for name in now if name.startswith(prefix)]
    assert len(held) >= 10 and all(torch.equal(now[name], given[name.removeprefix("trunk.")]) for name in held)
    moved = [
        name
        for name, first in DETECTORS[fitted.method].Networks(fitted.config).state_dict().items()
        if not torch.equal(now[name], first)
    ]
    assert moved and not any(name.startswith(prefix) for name in moved)


def test_a_random_trunk_is_called_one(fitted: AnomalyDetector) -> None:
    notes = fitted.origin["notes"]
    assert any(f"{fitted.method} was published with a trunk pre-trained on ImageNet" in note for note in notes)
    assert fitted.grid == (4, 4)


@pytest.mark.parametrize("method", METHODS)
def test_the_trunk_of_a_run_comes_in(method: str, films: PackedFilms, model: Path, tmp_path: Path) -> None:
    networks = open_networks(str(model))
    assert networks.pretrained is not None
    settings = detect_settings([*QUICK, "train.epochs=1"], method)
    task = FitTask(
        *(networks.config, settings, films, tmp_path / "out", networks.pretrained, networks.run),
        device="cpu",
        method=method,
    )
    detector = fit_detector(task)
    given = networks.pretrained.trunk.patch_embed.proj.weight
    assert torch.equal(detector.model.get_parameter("trunk.patch_embed.proj.weight"), given)
    assert not any("random weights" in note for note in detector.origin["notes"])
    assert detector.origin["weights"]["hash"] == networks.pretrained.method_hash


@pytest.mark.parametrize("method", METHODS)
def test_the_trunk_of_a_file_comes_in(method: str, films: PackedFilms, tmp_path: Path) -> None:
    trunk = open_weights("random", load_config("tiny", overrides=TRUNK), seed=7).trunk
    write_tensors(tmp_path / "vit.safetensors", trunk.state_dict())
    networks = open_networks(str(tmp_path / "vit.safetensors"), "tiny", None, TRUNK)
    settings = detect_settings([*QUICK, "train.epochs=1"], method)
    task = FitTask(networks.config, settings, films, tmp_path / "out", device="cpu", method=method, init=networks.init)
    detector = fit_detector(task)
    given = trunk.get_parameter("blocks.0.mlp.fc1.weight")
    assert torch.equal(detector.model.get_parameter("trunk.blocks.0.mlp.fc1.weight"), given)
    assert detector.origin["weights"]["name"] == "vit.safetensors"
    assert not any("random weights" in note for note in detector.origin["notes"])


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_in_pieces_is_the_whole_batch(method: str, films: PackedFilms, tmp_path: Path) -> None:
    """By what the weights find: those that change nothing, such as the bias of keys, follow Adam's rounding."""
    whole, pieces = (
        fit_on_trunk(method, films, tmp_path / str(count), "train.epochs=1", f"train.accumulate={count}")
        for count in (1, 2)
    )
    first, second = (detector.score(films.batch(range(8)), all_scores=True).scores for detector in (whole, pieces))
    for name, values in first.items():
        np.testing.assert_allclose(second[name], values, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_stochastic_depth_of_the_trunk_stays_off(method: str) -> None:
    learner = learner_of(method).train()
    views = learner.views(batch(), Keys(0, 0, 0, torch.arange(4)))
    torch.manual_seed(0)
    first = learner(views)
    assert learner.training and all(torch.equal(first[name], value) for name, value in learner(views).items())


def test_blocks_are_read_where_they_are() -> None:
    assert blocks_of([], 12, (1 / 4, 1 / 2, 3 / 4, 1), "mkd") == [3, 6, 9, 12]
    assert blocks_of([], 1, (1 / 4, 1 / 2), "fae") == [1]
    assert blocks_of([5, 2], 6, (1,), "fae") == [2, 5]
    for wrong in (0, 4):
        with pytest.raises(UserError, match=f"mkd.blocks has {wrong}, but the trunk has the blocks 1 to 3"):
            learner_of("mkd", f"mkd.blocks=[{wrong}]")


def test_it_survives_the_disk_with_all_it_knows(fitted: AnomalyDetector, films: PackedFilms, tmp_path: Path) -> None:
    fitted.save(tmp_path / "again")
    again = load_detector(tmp_path / "again")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in fitted.state_dict().items())
    assert np.array_equal(fitted.score(films.batch([1, 2])).score, again.score(films.batch([1, 2])).score)


# Two processes


def batch() -> Tensor:
    return torch.rand(4, 1, 32, 32, generator=torch.Generator().manual_seed(0))


def steps(model: torch.nn.Module, bare: TrunkLearner, share: slice) -> dict[str, Tensor]:
    """Two updates on this process's share of four films, after the pass over all of them."""
    bare.prepare(0, lambda: iter([(batch(), torch.arange(4))]))
    optimiser = torch.optim.SGD([weight for weight in bare.parameters() if weight.requires_grad], lr=0.01)
    result: dict[str, Tensor] = {}
    for step in range(2):
        views = bare.views(batch()[share], Keys(0, 0, step, torch.arange(4)[share]))
        losses = bare.losses(model(views))
        optimiser.zero_grad()
        losses.total.backward()
        result |= {f"{step} {name}": value.detach() for name, value in losses.terms.items()}
        result |= {f"{step} {name}": p.grad.clone() for name, p in bare.named_parameters() if p.grad is not None}
        optimiser.step()
    return result | {name: value.clone() for name, value in bare.named_buffers()}


def work(rank: int, folder: str) -> None:
    for method in METHODS:
        bare = learner_of(method, *(["panda.stiffness=1"] if method == "panda" else []))
        result = steps(DistributedDataParallel(bare), bare, slice(2 * rank, 2 * rank + 2))
        torch.save(result, Path(folder) / f"{method} {rank}.pt")


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    commands.fork_group(work, tmp_path)
    for method in METHODS:
        bare = learner_of(method, *(["panda.stiffness=1"] if method == "panda" else []))
        expected = steps(bare, bare, slice(0, 4))
        for rank in (0, 1):
            result = torch.load(tmp_path / f"{method} {rank}.pt", weights_only=True)
            assert result.keys() == expected.keys() and len(result) > 20
            for name, value in expected.items():
                torch.testing.assert_close(result[name], value, rtol=1e-3, atol=1e-6, msg=f"{method} {name}")

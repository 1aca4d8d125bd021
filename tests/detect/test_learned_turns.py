"""Detectors whose networks take turns: a batch in pieces or on two processes teaches them what a whole one does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from afire.data.pack import PackedFilms
from afire.detect import DETECTORS
from afire.detect.fit import detect_settings
from afire.detect.learned import LearnedDetector
from afire.methods.base import Keys, Learner, train_only
from afire.settings import load_config
from afire.training.pretrain import pretrain
from afire.training.pretraining import Pretraining
from tests import commands
from tests.detect.test_learned import QUICK, SIZE, task_of

ADVERSARIES = ("fanogan", "salad", "squid")
STEPS = 2


def learner_of(method: str) -> Learner:
    kind: type[LearnedDetector] = DETECTORS[method]
    settings = detect_settings([*QUICK[method], "train.epochs=4"], method)
    return kind.Networks(kind.config_of(load_config("tiny", overrides=[f"image.size={SIZE}"]), settings))


def train(model: torch.nn.Module, bare: Learner, share: slice) -> dict[str, Tensor]:
    """Some steps of plain gradient descent, turn by turn, on this process's share of the films; what they left."""
    trained = {turn: [weight for _, weight in bare.parameters_of(turn)] for turn in bare.turns}
    result: dict[str, Tensor] = {}
    for step in range(STEPS):
        images = torch.rand(4, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(step))
        for turn in bare.turns:
            train_only(turn, trained)
            losses = bare.losses(model(bare.views(images[share], Keys(0, 0, step, torch.arange(4)[share]))), turn)
            bare.zero_grad()
            losses.total.backward()
            result |= {f"{step} {turn} {name}": value.detach() for name, value in losses.terms.items()}
            for name, parameter in bare.named_parameters():
                if parameter.grad is not None:
                    result[f"{step} {turn} gradient {name}"] = parameter.grad.clone()
                    parameter.data.sub_(parameter.grad, alpha=1e-3)
        bare.after_step(losses)
        result |= {f"{step} buffer {name}": buffer.clone() for name, buffer in bare.named_buffers()}
    return result


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Up to rounding, of which a gradient that cancels has as much as the largest one."""
    gradients = [value for name, value in expected.items() if "buffer" not in name]
    rounding = 1e-4 * max(float(value.abs().max()) for value in gradients)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-3, atol=rounding, msg=lambda text, n=name: f"{n}: {text}"
        )


def work(rank: int, folder: str) -> None:
    for method in ADVERSARIES:
        bare = learner_of(method)
        wrapped = DistributedDataParallel(
            bare, broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=True
        )
        torch.save(train(wrapped, bare, slice(2 * rank, 2 * rank + 2)), Path(folder) / f"{method} {rank}.pt")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    commands.fork_group(work, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", ADVERSARIES)
def test_two_processes_equal_one(method: str, two_processes: Path) -> None:
    bare = learner_of(method)
    expected = train(bare, bare, slice(0, 4))
    for rank in (0, 1):
        result = torch.load(two_processes / f"{method} {rank}.pt", weights_only=True)
        assert_same(result, expected)


@pytest.mark.parametrize("method", ADVERSARIES)
def test_a_batch_in_pieces_is_the_whole_batch(
    method: str, films: PackedFilms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first gradients of every turn; later ones are of weights that Adam's first step has set apart."""
    kind: type[LearnedDetector] = DETECTORS[method]
    clip = Pretraining._clip
    gradients: dict[str, Tensor] = {}

    def note(run: Pretraining, turn: str) -> float:
        for name, weight in run.model.named_parameters():
            if weight.grad is not None:
                gradients.setdefault(name, weight.grad.clone())
        run.optimizers[turn].zero_grad()  # no step: every turn's first gradients are those of the first weights
        return clip(run, turn)

    monkeypatch.setattr(Pretraining, "_clip", note)
    found = []
    for pieces in (1, 2):
        gradients.clear()
        task = task_of(method, films, tmp_path, "train.epochs=2", f"train.accumulate={pieces}", "train.batch_size=48")
        config = kind.config_of(task.config, task.settings, 48)
        pretrain(config, films, tmp_path / str(pieces), np.arange(48), learner=kind.Networks, device="cpu")
        found.append(dict(gradients))
    assert_same(found[1], found[0])

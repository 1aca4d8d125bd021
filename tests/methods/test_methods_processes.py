"""Two processes with half the films each equal one process with all: losses, gradients, queues, centres, prototypes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from afire.methods import METHODS, Method, complete, make_method
from afire.methods.base import Keys, Labels, Progress, train_only
from afire.settings import load_config
from tests import commands

FILMS, BATCH, STEPS = 16, 8, 3
NAN = float("nan")
QUEUE = ["options.queue=12", "options.key_width=4", "options.hidden=8"]
HEAD = ["options.outputs=12", "options.hidden=8", "options.bottleneck=6", "options.local_views=2"]
CASES: dict[str, list[str]] = {
    "moco": [*QUEUE, "encoder.drop_path=0.2"],
    "c2l": QUEUE,
    "pcl": [*QUEUE, "options.clusters=[2,3]", "options.warmup=0"],
    "adam1": [*QUEUE, "options.stages=[2]", "options.pruned_from=0.9"],
    "dino": HEAD,
    "adam2": [*HEAD, "options.alone=0"],
    "supervised": [],
    "genesis": [],
    "transvw": ["options.words=4", "options.films=6"],
    "dira": [*QUEUE, "options.adversary_width=2", "options.adversary_after=0"],
    "pcrl": [*QUEUE, "encoder.drop_path=0.2"],
}


def films() -> Tensor:
    coarse = torch.rand(FILMS, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)


def made(method: str) -> Method:
    small = ["image.size=32", "encoder.patch_size=8", "encoder.width=16", "encoder.depth=1", "training.epochs=3"]
    config = load_config("tiny", overrides=[f"method={method}", *small, *CASES[method]])
    kind = METHODS[method]
    names = ("A", "B") if kind.learns_from_labels else ()
    model = make_method(kind.settled(complete(config, kind), FILMS, names))
    if names:
        values = torch.rand(FILMS, 2, generator=torch.Generator().manual_seed(1)).round()
        values[:7, 0] = NAN  # the processes know differently many labels
        model.begin_labels(Labels(names, torch.arange(FILMS), values))
    model.begin_run(torch.arange(FILMS), lambda rows: films()[rows])
    return model.train()


def train(model: torch.nn.Module, bare: Method, rank: int, world: int) -> dict[str, Tensor]:
    """A few steps of plain gradient descent on this process's share of the films; what they left behind.

    Optimisers take turns in a step, as in the loop.
    """
    trained = {turn: [weight for _, weight in bare.parameters_of(turn)] for turn in bare.turns}
    optimisers = {turn: torch.optim.SGD(weights, lr=0.02) for turn, weights in trained.items()}
    result: dict[str, Tensor] = {}
    images = films()
    for step in range(STEPS):
        if bare.prepares and step == 0:
            bare.prepare(step, lambda: iter([(images, torch.arange(FILMS))]))
        bare.schedule(Progress(step, STEPS, 1))
        batch = torch.randperm(FILMS, generator=torch.Generator().manual_seed(step))[:BATCH]
        rows = batch.chunk(world)[rank]
        for turn in bare.turns:
            train_only(turn, trained)
            losses = bare.losses(model(bare.views(images[rows], Keys(0, step, step, rows))), turn)
            bare.zero_grad()
            losses.total.backward()
            for name, value in {**losses.terms, "total": losses.total}.items():
                result[f"{step} {turn} loss {name}"] = value.detach()
            for name, parameter in bare.named_parameters():
                if parameter.grad is not None:
                    result[f"{step} {turn} gradient {name}"] = parameter.grad.clone()
            optimisers[turn].step()
        train_only(None, trained)
        bare.after_step(losses)
        result |= {f"{step} buffer {name}": value.clone() for name, value in bare.named_buffers()}
    return result


def work(rank: int, folder: str) -> None:
    for method in CASES:
        bare = made(method)
        wrapped = DistributedDataParallel(bare, find_unused_parameters=len(bare.turns) > 1)
        torch.save(train(wrapped, bare, rank, 2), Path(folder) / f"{method} {rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes left their results."""
    path = tmp_path_factory.mktemp("two processes")
    commands.fork_group(work, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("method", list(CASES))
def test_two_processes_equal_one(method: str, folder: Path) -> None:
    bare = made(method)
    expected = train(bare, bare, 0, 1)
    results = [torch.load(folder / f"{method} {rank}.pt", weights_only=True) for rank in (0, 1)]
    for turn in bare.turns:
        assert any(name.startswith(f"0 {turn} gradient ") for name in expected)
    for result in results:
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                result[name], value, rtol=5e-4, atol=5e-6, msg=lambda text, n=name: f"{n}: {text}"
            )
    for name, value in results[0].items():  # what a checkpoint of the first process says holds for all
        assert "buffer" not in name or torch.equal(value, results[1][name]), name

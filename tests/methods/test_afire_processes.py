"""Two processes with half the films each equal one process with all of them: losses, prototypes, gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from afire.config import Config
from afire.methods.afire import AFiRe
from afire.nn.distributed import gather
from afire.settings import load_config
from tests import commands

STEPS, VIEWS = 2, 2
CASES = {
    "shared": ("losses.lesion=0.5", "losses.abnormal_consistency=true"),
    "per_position": ("head.form=per_position", "losses.temperature=0.1"),
    "lesion map": ("losses.lesion=0.5", "losses.lesion_finer=4"),
    "feature": ("losses.contrast=feature",),
    "anatomy": ("prototypes.place=anatomy", "losses.abnormal_consistency=true"),
    "no memory, category only": ("prototypes.enabled=false", "losses.structure=0", "losses.restoration=0"),
}


def config(case: str) -> Config:
    return load_config("tiny", overrides=["image.size=32", "encoder.patch_size=8", "encoder.depth=1", *CASES[case]])


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Four films with two views each. The first two films have large lesions, the last two hardly any or none."""
    generator = torch.Generator().manual_seed(step)
    images = torch.rand(4, 1, 32, 32, generator=generator) * 0.5
    mask = torch.zeros(8, 1, 32, 32)
    mask[:4] = (
        (torch.rand(4, 1, 4, 4, generator=generator) > 0.6).float().repeat_interleave(8, 2).repeat_interleave(8, 3)
    )
    mask[4, :, :8, :8] = 1
    return images, (images.repeat_interleave(VIEWS, 0) + 0.4 * mask).clamp(0, 1), mask


def train(model: torch.nn.Module, bare: AFiRe, share: slice) -> dict[str, Tensor]:
    """A few steps of plain gradient descent on this process's share of the films; what they left behind."""
    optimiser = torch.optim.SGD([p for p in bare.parameters() if p.requires_grad], lr=0.05)
    result: dict[str, Tensor] = {}
    for step in range(STEPS):
        images, lesioned, mask = batch(step)
        views = slice(share.start * VIEWS, share.stop * VIEWS)
        given = {"images": images[share], "lesioned": lesioned[views], "mask": mask[views]}
        if bare.by_anatomy:  # films of noise have no lungs: places as if they had, some of them in half of the films
            places = torch.randint(0, 12, (4, 16), generator=torch.Generator().manual_seed(step))
            given["place"] = places[share]
        losses = bare.losses(model(given))
        optimiser.zero_grad()
        losses.total.backward()
        for name, value in {**losses.terms, "total": losses.total}.items():
            result[f"{step} loss {name}"] = value.detach()
        for name, parameter in bare.named_parameters():
            if parameter.grad is not None:
                result[f"{step} gradient {name}"] = parameter.grad.clone()
        optimiser.step()
        bare.teacher_momentum = 0.5
        bare.after_step(losses)
        if bare.bank is not None:
            result[f"{step} prototypes"] = bare.prototypes.clone()
    return result


def work(rank: int, folder: str) -> None:
    for case in CASES:
        bare = AFiRe(config(case))
        result = train(DistributedDataParallel(bare), bare, slice(2 * rank, 2 * rank + 2))
        torch.save(result, Path(folder) / f"{case} {rank}.pt")
    gathered_gradient(rank, folder)


def gathered_gradient(rank: int, folder: str) -> None:
    rows = (torch.arange(2.0) + 2 * rank).requires_grad_()
    everything = gather(rows)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (10**rank)  # each process asks for different things
    (everything * weights).sum().backward()
    assert rows.grad is not None
    torch.save({"all": everything.detach(), "gradient": rows.grad}, Path(folder) / f"gather {rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes left their results."""
    path = tmp_path_factory.mktemp("two processes")
    commands.fork_group(work, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_two_processes_equal_one(case: str, folder: Path) -> None:
    bare = AFiRe(config(case))
    expected = train(bare, bare, slice(0, 4))
    assert expected["0 loss category"] > 0
    for rank in (0, 1):
        result = torch.load(folder / f"{case} {rank}.pt", weights_only=True)
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                result[name], value, rtol=2e-4, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.slow
def test_both_processes_hold_the_same_prototypes_to_the_bit(folder: Path) -> None:
    first, second = (torch.load(folder / f"shared {rank}.pt", weights_only=True) for rank in (0, 1))
    assert torch.equal(first["1 prototypes"], second["1 prototypes"])


@pytest.mark.slow
def test_gather_sends_gradients_back_to_their_owner(folder: Path) -> None:
    for rank in (0, 1):
        result = torch.load(folder / f"gather {rank}.pt", weights_only=True)
        assert torch.equal(result["all"], torch.arange(4.0))
        assert torch.equal(result["gradient"], torch.tensor([11.0, 22.0, 33.0, 44.0])[2 * rank : 2 * rank + 2])

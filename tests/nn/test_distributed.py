from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from afire.nn import distributed
from afire.training.engine import explain
from tests import commands


def test_leaving_frees_what_holds_the_group_first(tmp_path: Path) -> None:
    commands.fork_processes(1, leave_after_an_error, str(tmp_path))


def leave_after_an_error(_: int, folder: str) -> None:
    """A wrapped network in a cycle and one in the frames of an error: both must be gone before the group ends."""
    with pytest.MonkeyPatch.context() as patch:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        networks: list[weakref.ref[nn.Module]] = []
        left_at_the_end: list[int] = []
        end = dist.destroy_process_group

        def destroy() -> None:
            left_at_the_end.append(sum(network() is not None for network in networks))
            end()

        patch.setattr(dist, "destroy_process_group", destroy)
        try:
            fail(networks)
        except RuntimeError:
            distributed.leave()
        assert left_at_the_end == [0]
        assert not dist.is_initialized()


def test_leaving_by_an_error_that_is_its_own_cause_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the training loop raises one of torch that it has no words for."""
    ended: list[str] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append("end"))
    try:
        try:
            raise RuntimeError("out of memory")
        except RuntimeError as error:
            raise explain(error, processes=2, step=3) from error
    except RuntimeError as error:
        assert error.__cause__ is error
        distributed.leave()
    assert ended == ["end"]


def fail(networks: list[weakref.ref[nn.Module]]) -> None:
    for _ in range(2):
        wrapped = DistributedDataParallel(nn.Linear(2, 2))
        wrapped(torch.ones(1, 2)).sum().backward()
        wrapped.itself = [wrapped]  # type: ignore[assignment]
        networks.append(weakref.ref(wrapped))
    try:
        raise ValueError("the network is in this frame")
    except ValueError as error:
        raise RuntimeError("and this error holds that one") from error

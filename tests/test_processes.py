"""Work over processes: every result once, errors handed on, a dead worker noticed."""

from __future__ import annotations

import os
from concurrent.futures.process import BrokenProcessPool

import pytest

from afire.processes import in_processes, usable_cores


def square(number: int) -> int:
    return number * number


def fail(number: int) -> int:
    raise ValueError(f"no {number}")


def die(number: int) -> int:
    os._exit(3)


@pytest.mark.parametrize("processes", [1, 2])
def test_every_job_gives_one_result(processes: int) -> None:
    found = in_processes(square, ((number,) for number in range(9)), processes)
    assert sorted(found) == [number * number for number in range(9)]


@pytest.mark.parametrize("processes", [1, 2])
def test_errors_are_handed_on(processes: int) -> None:
    with pytest.raises(ValueError, match="no 1"):
        list(in_processes(fail, [(1,)], processes))


def test_a_worker_that_dies_is_noticed() -> None:
    with pytest.raises(BrokenProcessPool):
        list(in_processes(die, [(1,), (2,)], 2))


def test_there_is_a_core() -> None:
    assert usable_cores() >= 1

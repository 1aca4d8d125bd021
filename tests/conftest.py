"""Shared fixtures: where the real films are, and small sets that tests draw themselves."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from afire import progress

# Test processes run side by side on few cores; one thread each is faster than all of them fighting.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: a file is the work of one process, and a long one at the end has no other beside."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the collector need not look through them again, nor look every moment."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with the public datasets, or a skip."""
    folder = os.environ.get("AFIRE_DATA")
    if not folder:
        pytest.skip("AFIRE_DATA is not set")
    return Path(folder)


@pytest.fixture(scope="session", autouse=True)
def _no_syncing() -> Iterator[None]:
    """Waiting for the disk shows nothing: processes are killed in tests, their machine is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def _silent_progress() -> Iterator[None]:
    """A command run inside the test process switches progress on for all that follow it."""
    yield
    progress.configure("off")

"""Memory of a whole program: freed tensors come back without new pages, and the user's own settings stay."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

CHURN = """
import os, resource, sys
from afire.processes import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
import torch
def churn():
    for _ in range(4):
        torch.zeros(12, 1024, 1024).add_(1)
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, os.environ.get("THP_MEM_ALLOC_ENABLE"))
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")


@cache
def churn(how: str, **settings: str) -> tuple[int, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "THP_"))}
    command = [sys.executable, "-c", CHURN, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**clean, **settings})
    faults, huge = done.stdout.split()
    return int(faults), huge


def test_freed_tensors_come_back_without_new_pages() -> None:
    plain, _ = churn("plain")
    kept, huge = churn("kept")
    assert huge == "1"
    assert kept < plain / 10, (kept, plain)


def test_what_the_user_has_set_stays() -> None:
    faults, huge = churn("kept", THP_MEM_ALLOC_ENABLE="0", MALLOC_MMAP_THRESHOLD_="131072")
    plain, _ = churn("plain")
    assert huge == "0"
    assert faults > plain / 2, (faults, plain)

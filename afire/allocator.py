"""How this process asks the system for memory: fewer and larger pages, and freed tensors kept for the next step.

A training step on a CPU allocates and frees the same large tensors over and over. By default each comes as new pages of
4 KiB that the kernel has to clear and map one by one, which takes up to a tenth of a step.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt, from malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Keep freed memory and ask for huge pages, before torch makes its first tensor; what the user has set stays.

    Only for whole programs: a library must not decide this for the process it is used in.
    """
    if not sys.platform.startswith("linux"):
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's own switch for huge pages under CPU tensors
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, _LARGEST)
        mallopt(_TOP_PAD, 64 * 2**20)

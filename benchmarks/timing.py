"""Shared by the benchmarks of the model: times measured in one run, and the machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from afire.processes import keep_freed_memory

keep_freed_memory()  # as the command line does, or ratios to it would compare two ways to allocate

Clock = Callable[[], float]
# Time of the wall, or of this process alone: fairer on a busy machine, but threads that wait for work count in it.
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(function: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    start = clock()
    function()
    return clock() - start


def interleaved(
    functions: Mapping[str, Callable[[], object]], repetitions: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each function, in alternation, so that a busy moment of the machine affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repetitions):
        for name, function in functions.items():
            times[name].append(seconds(function, clock))
    return times


def median_ratio(slow: list[float], fast: list[float]) -> float:
    """Median of the ratios of neighbouring repetitions."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def whole_and_bare(
    steps: tuple[Callable[[], object], Callable[[], object]], repetitions: int, clock: Clock
) -> dict[str, Any]:
    """Medians of a whole step and of its bare networks, and their ratio; both are run once before."""
    whole, bare = steps
    whole(), bare()
    times = interleaved({"whole": whole, "bare": bare}, repetitions, clock)
    return {
        "whole_seconds": round(statistics.median(times["whole"]), 3),
        "bare_seconds": round(statistics.median(times["bare"]), 3),
        "ratio": round(median_ratio(times["whole"], times["bare"]), 3),
        "ratio_of_fastest": round(min(times["whole"]) / min(times["bare"]), 3),
    }


def peak_megabytes() -> float:
    """The most memory this process has held so far.

    From the system's account of this program where there is one: ru_maxrss of a process starts at the peak of the
    one that started it.
    """
    if (peak := _status_megabytes("VmHWM")) is not None:
        return peak
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / 1024 if platform.system() != "Darwin" else largest / 1024**2


def held_megabytes() -> float:
    """The memory this process holds now, and a peak that starts from here where the system allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    held = _status_megabytes("VmRSS")
    return peak_megabytes() if held is None else held


def _status_megabytes(name: str) -> float | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return None


def machine() -> dict[str, Any]:
    """What a number depends on."""
    info: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    if hasattr(os, "getloadavg"):
        info["load"] = round(os.getloadavg()[0], 2)
    return info


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def report(result: Mapping[str, Any], file: Path | None) -> None:
    """Print ``result`` and, with a file, write it there as JSON."""
    for name, value in result.items():
        print(f"{name}: {value}")
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

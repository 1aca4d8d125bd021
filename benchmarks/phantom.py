"""How fast the phantom is drawn and written. Goals at 224 px: 40 ms of one core per film, 2,000 films a minute on two.

python benchmarks/phantom.py [--count N] [--size S] [--workers W] [--against CHECKOUT] [--json FILE]

``--against`` is the folder of another checkout, such as ``git worktree add ../before main``: both draw the same
numbers in turn, each in a process of its own, and the ratio of their medians is what a change costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from timing import machine, report, seconds

from afire.data.phantom.bank import draw_batch
from afire.data.phantom.film import draw_film
from afire.data.phantom.write import write_phantom

GOAL_MILLISECONDS = 40.0
GOAL_PER_MINUTE = 2000.0
FILMS = 60
BATCH = 8
_DRAWER = """
import sys, time
from pathlib import Path
import afire
from afire.data.phantom.film import draw_film
from afire.processes import keep_freed_memory
keep_freed_memory()
size = int(sys.argv[1])
draw_film(0, 0, size)
print(Path(afire.__file__).resolve().parents[1], flush=True)
for line in sys.stdin:
    start = time.process_time()
    draw_film(0, int(line), size)
    print(time.process_time() - start, flush=True)
"""


def in_turn(checkouts: list[Path], size: int) -> list[float]:
    """Median seconds of CPU per film of each checkout, which draw the same films one after the other."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _DRAWER, str(size)],
            cwd=checkout,  # Python looks there first: from elsewhere both would draw with the same code
            env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for checkout in checkouts
    ]
    for checkout, process in zip(checkouts, processes, strict=True):
        assert process.stdout is not None
        used = Path(process.stdout.readline().strip())
        assert used == checkout, f"{checkout} was to be measured, and {used} was imported"
    taken: list[list[float]] = [[] for _ in processes]
    for index in range(FILMS):
        for times, process in zip(taken, processes, strict=True):
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{index}\n")
            process.stdin.flush()
            times.append(float(process.stdout.readline()))
    for process in processes:
        process.communicate()
    return [statistics.median(times) for times in taken]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--against", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    draw_film(0, 0, options.size)  # imports and caches
    drawing = [seconds(partial(draw_film, 0, index, options.size), time.process_time) for index in range(FILMS)]
    numbers = [range(start, start + BATCH) for start in range(0, FILMS, BATCH)]
    batches = [seconds(partial(draw_batch, 0, films, options.size), time.process_time) / BATCH for films in numbers]
    with tempfile.TemporaryDirectory() as folder:
        writing = seconds(lambda: write_phantom(Path(folder) / "p", options.count, options.size, 0, options.workers))
    found: dict[str, Any] = {
        "size": options.size,
        "cpu_ms_per_film_median": round(1000 * statistics.median(drawing), 1),
        "cpu_ms_per_film_best": round(1000 * min(drawing), 1),
        "cpu_ms_per_film_in_batches": round(1000 * statistics.median(batches), 1),
        "goal_ms_per_film": GOAL_MILLISECONDS,
        "films_written": options.count,
        "films_per_minute_written": round(60 * options.count / writing),
        "goal_films_per_minute": GOAL_PER_MINUTE,
        "machine": machine(),
    }
    if options.against is not None:
        here, there = in_turn([Path(__file__).resolve().parents[1], options.against.resolve()], options.size)
        found["cpu_ms_here_and_there"] = [round(1000 * here, 1), round(1000 * there, 1)]
        found["ratio"] = round(here / there, 3)
    report(found, options.json)


if __name__ == "__main__":
    main()

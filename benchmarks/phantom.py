"""How fast the phantom is drawn and written. Goals at 224 px: 40 ms of one core per film, 2,000 films a minute on two.

python benchmarks/phantom.py [--count N] [--size S] [--workers W] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from timing import machine, report, seconds

from afire.data.phantom.film import draw_film
from afire.data.phantom.write import write_phantom

GOAL_MILLISECONDS = 40.0
GOAL_PER_MINUTE = 2000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    draw_film(0, 0, options.size)  # imports and caches
    drawing = [seconds(partial(draw_film, 0, index, options.size), time.process_time) for index in range(60)]
    with tempfile.TemporaryDirectory() as folder:
        writing = seconds(lambda: write_phantom(Path(folder) / "p", options.count, options.size, 0, options.workers))
    report(
        {
            "size": options.size,
            "cpu_ms_per_film_median": round(1000 * statistics.median(drawing), 1),
            "cpu_ms_per_film_best": round(1000 * min(drawing), 1),
            "goal_ms_per_film": GOAL_MILLISECONDS,
            "films_written": options.count,
            "films_per_minute_written": round(60 * options.count / writing),
            "goal_films_per_minute": GOAL_PER_MINUTE,
            "machine": machine(),
        },
        options.json,
    )


if __name__ == "__main__":
    main()

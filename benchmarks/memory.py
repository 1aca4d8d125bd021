"""Peak memory of a pre-training step against the batch size, each in its own process.

    python benchmarks/memory.py [--case small|vit-b] [--json FILE]

The peak is the largest resident memory during two steps, minus that of the same process with the model and its
optimiser before the first step: images, activations, gradients and AdamW's two moments. The memory per additional film
is compared with what autograd keeps for the backward pass of one film, counted tensor by tensor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from figures import Figure, Findings, Table, digits
from flops import kept_for_backward
from throughput import CASES, Step
from timing import held_megabytes, machine, peak_megabytes, report

BATCHES = {"small": (8, 32, 128), "vit-b": (1, 2, 4, 8)}


def peak_of(case: str, batch: int) -> float:
    """Megabytes above the process with its model, in a new process."""
    command = [sys.executable, __file__, "--case", case, "--only-batch", str(batch)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["megabytes"])


def peak_here(case: str, batch: int) -> float:
    step = Step(case, batch)
    before = held_megabytes()
    step()
    step()
    return peak_megabytes() - before


def counted(case: str) -> float:
    """Megabytes that autograd keeps for one film."""
    step = Step(case, 4)
    return kept_for_backward(step.forward, step.model) / 4 / 2**20


def run(case: str, batches: tuple[int, ...]) -> dict[str, Any]:
    peaks = {batch: peak_of(case, batch) for batch in batches}
    first, last = min(batches), max(batches)
    slope = (peaks[last] - peaks[first]) / (last - first)
    return {
        "peaks, MB": {batch: round(peak, 1) for batch, peak in peaks.items()},
        "one more film, MB": round(slope, 2),
        "kept for backward, MB/film": round(counted(case), 2),
    }


def measure(quick: bool = False) -> Findings:
    figures, tables = [], []
    for case in ("small",) if quick else CASES:
        batches = (2, 4) if quick else BATCHES[case]
        found = run(case, batches)
        name = f"memory per additional film / what autograd keeps for it, {CASES[case].label}"
        figures.append(Figure(name, found["one more film, MB"] / found["kept for backward, MB/film"]))
        first = found["peaks, MB"][batches[0]]
        rows = [
            [str(batch), f"{peak:,.0f}", f"{digits(peak / first)} ×", f"{digits(peak / batch)}"]
            for batch, peak in found["peaks, MB"].items()
        ]
        columns = ["batch", "peak above the model, MB", f"to batch {batches[0]}", "MB per film"]
        title = (
            f"{CASES[case].label}; each film adds {digits(found['one more film, MB'])} MB, of which autograd keeps "
            f"{digits(found['kept for backward, MB/film'])} MB"
        )
        tables.append(Table(title, columns, rows))
    return Findings(figures, tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--only-batch", type=int, help="this batch in this process: what the others are started with")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.only_batch:
        print(json.dumps({"megabytes": peak_here(options.case[0], options.only_batch)}))
        return
    cases = options.case or list(CASES)
    report({"machine": machine(), **{case: run(case, BATCHES[case]) for case in cases}}, options.json)


if __name__ == "__main__":
    main()

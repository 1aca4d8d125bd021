"""How long `afire --help` takes, against a Python that does nothing and one that imports torch.

    python benchmarks/startup.py [--repetitions N] [--json FILE]

Wall time and CPU time of complete processes, in alternation. Heavy libraries that the command imports are counted too:
there should be none, because a command imports what it needs only when it runs.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure, Findings, Table
from timing import machine, report

HEAVY = ("torch", "numpy", "pandas", "scipy", "sklearn", "matplotlib", "PIL", "accelerate")
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "afire --help": ["-m", "afire", "--help"],
    "python -c 'import torch'": ["-c", "import torch"],
}
LIST_IMPORTS = f"""
import sys
sys.argv = ["afire", "--help"]
from afire.cli import main
try:
    main()
except SystemExit:
    pass
print("imported:", *[name for name in {HEAVY!r} if name in sys.modules])
"""


def one_process(arguments: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one process, from start to end."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def heavy_imports() -> list[str]:
    done = subprocess.run([sys.executable, "-c", LIST_IMPORTS], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1].split()[1:]


def run(repetitions: int) -> dict[str, Any]:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for number in range(repetitions + 1):
        for name, arguments in COMMANDS.items():
            if (times := one_process(arguments)) and number:  # the first reads files from the disk
                taken[name].append(times)
    clocks = {"wall": 0, "cpu": 1}
    return {
        "machine": machine(),
        **{
            f"{name}, {clock} ms": round(1000 * median(one[at] for one in times), 1)
            for name, times in taken.items()
            for clock, at in clocks.items()
        },
        "heavy imports of afire --help": heavy_imports(),
    }


def measure(quick: bool = False) -> Findings:
    found = run(1 if quick else 9)
    imports: list[str] = found["heavy imports of afire --help"]
    nothing, afire, torch = COMMANDS
    rows = [[f"`{name}`", *(f"{found[f'{name}, {clock} ms']:.0f}" for clock in ("wall", "cpu"))] for name in COMMANDS]

    def ratio(of: str, clock: str) -> float:
        return float(found[f"{afire}, {clock} ms"] / found[f"{of}, {clock} ms"])

    figures = [
        Figure("`afire --help` / `python -c pass`, wall time", ratio(nothing, "wall")),
        Figure("`afire --help` / `python -c pass`, CPU time", ratio(nothing, "cpu")),
        Figure("`afire --help` / `import torch`, wall time", ratio(torch, "wall"), "share"),
        Figure("heavy libraries that `afire --help` imports", len(imports), "count", 0, "at most"),
    ]
    notes = [f"It imports {', '.join(imports)}."] if imports else []
    return Findings(figures, [Table("Medians", ["process", "wall, ms", "CPU, ms"], rows)], notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report(run(options.repetitions), options.json)


if __name__ == "__main__":
    main()

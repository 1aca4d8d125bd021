"""Fault drills: kills, a full disk, damaged files. Writes benchmarks/faults.json and benchmarks/faults.md.

python benchmarks/faults.py                       # all of it: half an hour on two idle cores; writes the page
python benchmarks/faults.py --only packing,disk   # some drills; the results of the others stay
python benchmarks/faults.py --only none           # the page alone, from the stored results

Stops with an error at the first failed check. Linux only; the full-disk drill mounts a small file system in memory and
needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fault_drills import full_disk, mutated, packing, page, pretraining
from timing import machine

from afire.data.manifest import read_manifest
from afire.data.pack import PackSettings, pack
from afire.data.phantom.write import write_phantom
from afire.files import write_json, write_text

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "faults.json", HERE / "faults.md"
PACKAGES = ("afire", "torch", "numpy", "pillow", "pydicom")
Drill = Callable[[Path], dict[str, Any]]


def drills(options: argparse.Namespace) -> dict[str, Drill]:
    """The drills by name; each gets a folder of its own."""

    def small_pack(folder: Path) -> Path:
        write_phantom(folder / "phantom", options.films, 64, 0, workers=1)
        manifest = read_manifest(folder / "phantom/manifest.parquet")
        pack(manifest, folder / "pack", PackSettings(size=64), workers=1)
        return folder / "pack"

    def kill_packing(folder: Path) -> dict[str, Any]:
        source = packing.draw_films(folder / "films", options.pack_films, 512)
        return packing.drill(folder, source, kills=options.pack_kills, seed=options.seed)

    def mutate(folder: Path) -> dict[str, Any]:
        detector = mutated.fit_detector(small_pack(folder), folder / "detector", folder / "logs")
        return mutated.drill(folder, detector, mutants=options.mutants, good=options.good, seed=options.seed)

    return {
        "pretraining": lambda folder: pretraining.drill(
            folder, small_pack(folder), kills=options.kills, seed=options.seed, jobs=options.jobs
        ),
        "packing": kill_packing,
        "disk": lambda folder: full_disk.drill(folder / "disk", small_pack(folder)),
        "mutated": mutate,
    }


def environment() -> dict[str, Any]:
    """Where the results come from."""
    versions = {package: version(package) for package in PACKAGES}
    return machine() | {"packages": versions, "files on": os.uname().sysname}


def run_one(drill: Drill, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    start = time.monotonic()
    found = drill(folder)
    return {**found, "seconds in all": round(time.monotonic() - start), "where": environment()}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--only", help="drills to run, by comma: pretraining, packing, disk, mutated, none")
    found.add_argument("--seed", type=int, default=0, help="moments of the kills and mutations follow from it")
    found.add_argument("--jobs", type=int, default=2, help="pre-training drills at a time")
    found.add_argument("--kills", type=int, default=50, help="drills of pre-training, each with at least one kill")
    found.add_argument("--films", type=int, default=120, help="in the pack that is pre-trained on")
    found.add_argument("--pack-kills", type=int, default=20, help="kills of packing")
    found.add_argument("--pack-films", type=int, default=1000, help="in the pack that is killed")
    found.add_argument("--mutants", type=int, default=500, help="mutated files")
    found.add_argument("--good", type=int, default=56, help="good films among them")
    found.add_argument("--work", type=Path, help="folder for everything, kept; default: a temporary one")
    found.add_argument("--json", type=Path, default=RESULTS, help="where results are kept")
    found.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    return found


def main() -> None:
    options = parser().parse_args()
    known = drills(options)
    chosen = list(known) if options.only is None else [name for name in options.only.split(",") if name != "none"]
    if unknown := set(chosen) - set(known):
        sys.exit(f"no drill is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    work = options.work or Path(tempfile.mkdtemp(prefix="afire-faults-"))
    for name in chosen:
        print(f"{name} ...", flush=True)
        found = {"seed": options.seed, **run_one(known[name], work / name)}
        # Read again before each write: another start may have run another drill meanwhile.
        results = json.loads(options.json.read_text()) if options.json.exists() else {}
        write_json(options.json, {**results, name: found})
        print(json.dumps(found, indent=2), flush=True)
    write_text(options.page, page.write_page(json.loads(options.json.read_text())))
    if options.work is None:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()

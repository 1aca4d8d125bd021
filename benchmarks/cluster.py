"""Shards on a cluster: drills with real Ray, what Ray costs, a prediction, and one real set.

python benchmarks/cluster.py                                   # all but the real set: half an hour on two cores
python benchmarks/cluster.py --only drills,costs --times 3     # some parts; the results of the others stay
python benchmarks/cluster.py --only real --real FOLDER         # FOLDER: the set of `afire data build lungmasks`
python benchmarks/cluster.py --only none                       # the table in docs/cluster.md alone

Two raylets of this machine, on loopback and with a token. Linux; the disk that fills needs root. Writes
benchmarks/cluster.json, and the tables into docs/cluster.md. Stops with an error at the first failed check.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster_drills import costs, page, real
from cluster_drills.drills import DRILLS, Source, drill
from cluster_drills.raylets import two_raylets
from timing import machine

from afire.cluster.engine import connected
from afire.files import write_json, write_text

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "cluster.json", HERE.parent / "docs" / "cluster.md"
PARTS = ("drills", "costs", "real")


def keep(file: Path, name: str, found: Any) -> None:
    """Add one result to the file."""
    results = json.loads(file.read_text()) if file.exists() else {}
    write_json(file, {**results, name: found})
    print(name, json.dumps(found), flush=True)


def run_drills(options: argparse.Namespace, work: Path) -> None:
    many, few = Source.draw(work / "many", 128, 64, 64), Source.draw(work / "few", 64, 512, 8)
    known = json.loads(options.json.read_text()).get("drills", {}) if options.json.exists() else {}
    with two_raylets() as raylets, connected(raylets.address):
        for name in options.drill or DRILLS:
            source = many if name.startswith("64") else few
            folder = work / "drills" / name.replace(" ", "-")
            for found in drill(name, source, raylets, folder, options.times, options.seed):
                known[name] = found
                keep(options.json, "drills", known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="drills,costs", help=f"of {', '.join(PARTS)}, by comma; none: the page")
    parser.add_argument("--drill", action="append", choices=list(DRILLS), help="this drill alone; repeat for more")
    parser.add_argument("--times", type=int, default=20, help="each drill")
    parser.add_argument("--seed", type=int, default=0, help="the moments of kills follow from it")
    parser.add_argument("--films", type=int, default=24, help="that ViT-B looks at")
    parser.add_argument("--real", type=Path, help="the folder of the Shenzhen set")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--page", type=Path, default=PAGE, help="whose tables are written")
    options = parser.parse_args()
    chosen = [name for name in options.only.split(",") if name != "none"]
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    work = Path(tempfile.mkdtemp(prefix="afire-cluster-"))
    try:
        if "drills" in chosen:
            run_drills(options, work)
        if "costs" in chosen:
            keep(options.json, "costs", costs.measure(work / "costs", options.films))
        if "real" in chosen:
            if options.real is None:
                sys.exit("--only real needs --real FOLDER")
            with two_raylets() as raylets:
                keep(options.json, "real", real.compare(options.real, work / "real", raylets))
        if chosen:
            packages = {package: version(package) for package in ("afire", "ray", "torch", "numpy")}
            keep(options.json, "where", {**machine(), "packages": packages})
    finally:
        shutil.rmtree(work, ignore_errors=True)
    results = json.loads(options.json.read_text())
    write_text(options.page, page.fill_in(options.page.read_text(encoding="utf-8"), results))


if __name__ == "__main__":
    main()

"""`make bench`: run the benchmarks one after another, store their results, and write docs/benchmarks.md.

    python benchmarks/page.py                       # everything, about twenty-five minutes on two idle cores
    python benchmarks/page.py --only losses,step    # these again; keep the others
    python benchmarks/page.py --render              # only the page, from benchmarks/results.json
    python benchmarks/page.py --quick --only losses # does it work? Does not touch the page

Each section runs in its own process and is saved when it is done. A section that fails keeps its previous result; the
others still run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from idle import Moment, others_since
from render import is_busy, render
from sections import NAMES

ROOT = Path(__file__).resolve().parents[1]
RESULTS, HISTORY, PAGE = (
    ROOT / name for name in ("benchmarks/results.json", "benchmarks/history.json", "docs/benchmarks.md")
)
LONGEST = 1800.0  # seconds of one section


def measure_section(name: str, quick: bool) -> dict[str, Any]:
    """Run a section in a new process; its findings with machine, versions, date, commit and load of the machine."""
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    date, before = datetime.now(timezone.utc), Moment.now()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--section", name, str(file), *(["--quick"] if quick else [])]
        subprocess.run(command, check=True, timeout=LONGEST)
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {
        "date": f"{date:%Y-%m-%d %H:%M} UTC",
        "commit": commit(),
        "seconds": round(time.monotonic() - before.wall, 1),
        "load": load,
        "others": others_since(before),
        **found,
    }


def work(name: str, file: Path, quick: bool) -> None:
    """In the new process: measure, and write the findings to ``file``."""
    found = importlib.import_module(name).measure(quick).as_json()
    from timing import machine

    where = {key: value for key, value in machine().items() if key != "load"}
    found["machine"] = where | {"system": f"{platform.system()} {platform.machine()}"}
    file.write_text(json.dumps(found), encoding="utf-8")


def commit() -> str:
    """The commit of the checkout, with a plus if relevant files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "afire", "benchmarks/*.py")
        return git("rev-parse", "--short=9", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read(file: Path, otherwise: Any) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else otherwise


def write(file: Path, text: str) -> None:
    """Atomically: a run that is stopped leaves the page of the last section."""
    beside = file.with_name(f".{file.name}.part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def write_page(results: Path, page: Path) -> None:
    write(page, render(read(results, {"sections": {}}), read(HISTORY, [])))


def run(names: Sequence[str], results: Path, page: Path, quick: bool) -> list[str]:
    """Measure the sections and write results and page after each; the names of those that failed."""
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        try:
            found = measure_section(name, quick)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        kept = read(results, {"sections": {}})
        sections = {**kept["sections"], name: found}
        kept["sections"] = {one: sections[one] for one in NAMES if one in sections}
        write(results, json.dumps({**kept, "quick": quick}, indent=1, ensure_ascii=False) + "\n")
        write_page(results, page)
        for figure in found["figures"]:
            print(
                f"{figure['name']}: {figure['value']:.4g}" + (f" (goal {figure['goal']:g})" if figure["goal"] else "")
            )
        busy = ", the machine was BUSY with other work" if is_busy(found) else ""
        print(f"{found['seconds']:.0f} s{busy}", flush=True)
    return failed


def names_of(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"{name} is not a section; there are {', '.join(NAMES)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names_of, default=list(NAMES), help="sections to measure, separated by commas")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, one repetition: does everything work?")
    parser.add_argument("--results", type=Path, help="instead of benchmarks/results.json")
    parser.add_argument("--page", type=Path, help="instead of docs/benchmarks.md")
    parser.add_argument("--section", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.section:
        work(options.section[0], Path(options.section[1]), options.quick)
        return 0
    results, page = options.results or RESULTS, options.page or PAGE
    if options.quick and not (options.results and options.page):
        folder = Path(tempfile.mkdtemp(prefix="afire-bench-"))
        results, page = options.results or folder / RESULTS.name, options.page or folder / PAGE.name
    failed = [] if options.render else run(options.only, results, page, options.quick)
    if options.render:
        write_page(results, page)
    print(page)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

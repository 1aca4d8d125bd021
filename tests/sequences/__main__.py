"""Many walks: ``python -m tests.sequences --seeds 0:500``; one of them: ``--seeds 17``, with its commands."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.sequences.shell import BrokenPromiseError
from tests.sequences.walk import Walk

STEPS = 14


def main() -> int:
    """Run the seeds; the number of those that broke a promise is the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="A seed, or first:last as in range().")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--keep", type=Path, help="Keep the folders of walks that break a promise here.")
    parser.add_argument("--log", type=Path, help="Add what was found to this file of JSON lines.")
    asked = parser.parse_args()
    first, _, last = asked.seeds.partition(":")
    seeds = range(int(first), int(last)) if last else [int(first)]
    codes: Counter[str] = Counter()
    messages: Counter[str] = Counter()
    broken: list[int] = []
    for seed in seeds:
        record = walk_once(seed, asked.steps, asked.keep)
        codes.update(record["codes"])
        messages.update(record["messages"])
        if record["broken"]:
            broken.append(seed)
        if asked.log:
            with asked.log.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
        if record["broken"] or len(seeds) == 1:
            sys.stdout.write("\n".join(record["history"]) + "\n")
        sys.stdout.write(f"seed {seed}: {record['seconds']:.0f} s, {record['broken'] or 'holds'}\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps({"seeds": len(seeds), "broken": broken, "commands": codes}, indent=1) + "\n")
    return len(broken)


def walk_once(seed: int, steps: int, keep: Path | None) -> dict[str, object]:
    """One walk in a folder of its own, and what came of it."""
    folder = Path(tempfile.mkdtemp(prefix=f"afire-walk-{seed}-"))
    walk, broken, start = Walk(seed, folder), "", time.monotonic()
    try:
        walk.go(steps)
    except BrokenPromiseError as promise:
        broken = str(promise)
    except Exception:
        broken = "the walk itself: " + traceback.format_exc()
    if broken and keep is not None:
        shutil.copytree(folder, keep / f"seed-{seed}", dirs_exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder.with_name(folder.name + "-cache"), ignore_errors=True)
    return {
        "seed": seed,
        "broken": broken,
        "seconds": time.monotonic() - start,
        "codes": {f"{name} {code}": count for (name, code), count in walk.shell.codes.items()},
        "messages": dict(walk.shell.messages),
        "history": walk.shell.history,
    }


if __name__ == "__main__":
    sys.exit(main())

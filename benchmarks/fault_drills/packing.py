"""``kill -9`` during packing, then the same command again: the pack must be bit-identical to an uninterrupted one."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from afire.files import sha256_file
from fault_drills.commands import DrillError, afire, require_documented_end, run, stray_files, succeed, tree_hashes
from fault_drills.films import phantom, raster

_MOST_TRIES = 10


def draw_films(folder: Path, count: int, side: int) -> Path:
    """Large films, so that reading them is most of the work; a few phantoms, each shifted so that no two are alike."""
    folder.mkdir(parents=True)
    drawn = [phantom(number, side) for number in range(min(count, 32))]
    for number in range(count):
        film = np.roll(drawn[number % len(drawn)], 3 * (number // len(drawn)), axis=1)
        (folder / f"{number:04d}.png").write_bytes(raster(film, "PNG", compress_level=1))
    return folder


def command(source: Path, out: Path, workers: int = 2) -> list[str]:
    return afire("data", "pack", "--data", source, "--out", out, "--size", 128, "--workers", workers)


def outcome(pack: Path) -> dict[str, Any]:
    """What must not depend on kills. The journal may name the films in another order."""
    found: dict[str, Any] = {
        name: sha256_file(pack / name) for name in ("images.npy", "manifest.parquet", "pack.json", "begun.json")
    }
    rows = {}
    for line in (pack / "journal.jsonl").read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # a line truncated by a kill stays; its film was packed again
            continue
        rows[entry.pop("row")] = entry
    return found | {"journal.jsonl": rows, "files": sorted(path.name for path in pack.iterdir())}


def phase(out: Path, films: int) -> str:
    """Where the packing stood when it was killed."""
    if (out / "pack.json").exists():
        return "ending, pack written"
    if not (out / "images.npy.part").exists():
        return "finishing" if (out / "images.npy").exists() else "starting, before the array"
    journal = out / "journal.jsonl"
    done = journal.read_bytes().count(b"\n") if journal.exists() else 0
    return "starting, before the first film" if not done else "packing films" if done < films else "finishing"


def drill(folder: Path, source: Path, *, kills: int, seed: int, workers: int = 2) -> dict[str, Any]:
    """``kills`` packs that are killed once each; every second kill spares the workers, which must end by themselves."""
    rng, logs = np.random.default_rng([seed, 20]), folder / "logs"
    before = tree_hashes(source)
    cpu_seconds = succeed(command(source, folder / "whole", workers), logs / "whole").cpu_seconds
    expected = outcome(folder / "whole")
    films = len(expected["journal.jsonl"])
    phases: list[str] = []
    for number in range(kills):
        out = folder / f"pack-{number:02d}"
        for _ in range(_MOST_TRIES):
            after = float(rng.uniform(0, cpu_seconds))
            ended = run(
                command(source, out, workers),
                logs / f"pack-{number:02d}",
                kill_when=lambda used, after=after: used >= after,  # type: ignore[misc]
                kill_workers=number % 2 == 0,
            )
            if ended.killed:
                break
            require_documented_end(ended, f"packing {number}", codes=(0,))
            shutil.rmtree(out)  # it was faster than the kill: once more
        else:
            raise DrillError(f"packing {number} could not be killed")
        phases.append(phase(out, films))
        succeed(command(source, out, workers), logs / f"pack-{number:02d}-again")
        if outcome(out) != expected:
            raise DrillError(f"packing {number}, killed {phases[-1]}, differs from the undisturbed pack")
        if left := stray_files(out):
            raise DrillError(f"packing {number} left {', '.join(left)}")
        shutil.rmtree(out)
    if tree_hashes(source) != before:
        raise DrillError("packing changed its source films")
    return {
        "kills": kills,
        "identical": kills,
        "films": films,
        "cpu seconds of a pack": round(cpu_seconds, 1),
        "killed while": dict(sorted(Counter(phases).items())),
    }

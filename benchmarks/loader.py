"""Reading a packed batch of 224-px films against decoding the same 256-px JPEGs again. Goal: 20 times faster per film.

python benchmarks/loader.py [--data MANIFEST] [--json FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from figures import Figure, Findings, Table
from PIL import Image
from timing import interleaved, machine, median_ratio, report

from afire.data.manifest import Manifest, read_manifest
from afire.data.pack import DecodedFilms, PackedFilms, PackSettings, pack
from afire.data.phantom.film import draw_film
from afire.data.sources.folders import build_folder

GOAL = 20.0
BATCH = 64


def draw_jpegs(folder: Path, count: int) -> Manifest:
    """Phantoms of 256 px, quality 85, as the public copies of the datasets are."""
    folder.mkdir()
    for index in range(count):
        film = draw_film(0, index, 256).image
        Image.fromarray((film * 255).astype(np.uint8)).save(folder / f"{index:04d}.jpg", quality=85)
    return build_folder(folder)


def run(data: Path | None, films: int, repetitions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        manifest = read_manifest(data) if data else draw_jpegs(Path(name) / "films", films)
        manifest = manifest.where(manifest.table.index.to_series() < 512)
        pack(manifest, Path(name) / "pack", PackSettings(size=224))
        packed, decoded = PackedFilms(Path(name) / "pack"), DecodedFilms(manifest, 224)
        batch = min(BATCH, len(packed))
        rng = np.random.default_rng(0)

        def rows() -> np.ndarray:
            return rng.choice(len(packed), batch, replace=False)

        works = {"packed": lambda: packed.batch(rows()), "decoded": lambda: decoded.batch(rows())}
        interleaved(works, 2)
        times = interleaved(works, repetitions)
    ratio = median_ratio(times["decoded"], times["packed"])
    return {
        "machine": machine(),
        "batch": batch,
        "packed, films/s": round(batch / median(times["packed"])),
        "decoded, films/s": round(batch / median(times["decoded"])),
        "packed is faster by": round(ratio, 1),
        "goal": f"at least {GOAL:g}: {'met' if ratio >= GOAL else 'missed'}",
    }


def measure(quick: bool = False) -> Findings:
    found = run(None, 8 if quick else 256, 2 if quick else 15)
    figure = Figure("films/s, packed / decoded from JPEG again", found["packed is faster by"], goal=GOAL)
    rows = [[name, f"{found[f'{name}, films/s']:,}"] for name in ("packed", "decoded")]
    return Findings([figure], [Table(f"Batches of {found['batch']}", ["films", "films/s"], rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=None, help="manifest of JPEGs; phantoms without it")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    report(run(options.data, 256, 15), options.json)


if __name__ == "__main__":
    main()

"""Reading a packed batch of 224-px films against decoding the same 256-px JPEGs again. Goal: 20 times faster per film.

python benchmarks/loader.py [--data MANIFEST] [--json FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image
from timing import interleaved, machine, median_ratio, report

from afire.data.dataset import DecodedFilms, PackedFilms
from afire.data.datasets.folder import build_folder
from afire.data.manifest import Manifest, read_manifest
from afire.data.pack import PackSettings, pack
from afire.data.phantom import draw_film

GOAL = 20.0
BATCH = 64


def draw_jpegs(folder: Path, count: int) -> Manifest:
    """Phantoms of 256 px, quality 85, as the public copies of the datasets are."""
    folder.mkdir()
    for index in range(count):
        film = draw_film(0, index, 256).image
        Image.fromarray((film * 255).astype(np.uint8)).save(folder / f"{index:04d}.jpg", quality=85)
    return build_folder(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=None, help="manifest of JPEGs; phantoms without it")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        manifest = read_manifest(options.data) if options.data else draw_jpegs(Path(name) / "films", 256)
        manifest = manifest.where(manifest.table.index.to_series() < 512)
        pack(manifest, Path(name) / "pack", PackSettings(size=224))
        packed, decoded = PackedFilms(Path(name) / "pack"), DecodedFilms(manifest, 224)
        rng = np.random.default_rng(0)

        def rows() -> np.ndarray:
            return rng.choice(len(packed), BATCH, replace=False)

        works = {"packed": lambda: packed.batch(rows()), "decoded": lambda: decoded.batch(rows())}
        interleaved(works, 2)
        times = interleaved(works, 15)
    ratio = median_ratio(times["decoded"], times["packed"])
    result = {
        "machine": machine(),
        "batch": BATCH,
        "packed, films/s": round(BATCH / median(times["packed"])),
        "decoded, films/s": round(BATCH / median(times["decoded"])),
        "packed is faster by": round(ratio, 1),
        "goal": f"at least {GOAL:g}: {'met' if ratio >= GOAL else 'missed'}",
    }
    report(result, options.json)


if __name__ == "__main__":
    main()

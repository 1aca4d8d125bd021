"""How many planted copies and inverted films the audit finds in real data, and how long the search for copies takes.

AFIRE_DATA=folder python benchmarks/audit.py            # the tables of docs/audit.md
python benchmarks/audit.py --films 112120               # the time of the search alone
"""

from __future__ import annotations

import argparse
import io
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageOps

from afire.data.audit.checks import judge_polarity
from afire.data.audit.collect import default_workers, measure_manifest
from afire.data.audit.copies import near_pairs
from afire.data.audit.measure import perceptual_hash, rank_thumb
from afire.data.audit.run import _rank_array
from afire.data.decode import fit_square, read_film
from afire.data.manifest import Manifest
from afire.data.sources import build

SETS = ("childcxr", "nih", "shenzhen")
COPIES = 300
Picture = Image.Image


def compressed(film: Picture) -> Picture:
    buffer = io.BytesIO()
    film.save(buffer, "JPEG", quality=20)
    return Image.open(buffer)


def cropped(share: float) -> Callable[[Picture], Picture]:
    def crop(film: Picture) -> Picture:
        x, y = film.width * share, film.height * share
        return film.resize(film.size, box=(x, y, film.width - x, film.height - y))

    return crop


def stamped(film: Picture) -> Picture:
    film = film.copy()
    ImageDraw.Draw(film).rectangle((0, 0, film.width // 6, film.height // 16), fill=255)
    return film


CHANGES: dict[str, Callable[[Picture], Picture]] = {
    "JPEG, quality 20": compressed,
    "64 px": lambda film: film.resize((64, 64)),
    "gamma 0.6": lambda film: film.point([round(255 * (value / 255) ** 0.6) for value in range(256)]),
    "gamma 1.5": lambda film: film.point([round(255 * (value / 255) ** 1.5) for value in range(256)]),
    "equalised": ImageOps.equalize,
    "mirrored": ImageOps.mirror,
    "negative": ImageOps.invert,
    "1 % cropped from each side": cropped(0.01),
    "2 % cropped from each side": cropped(0.02),
    "turned by 2 degrees": lambda film: film.rotate(2, Image.Resampling.BICUBIC),
    "white label in a corner": stamped,
}


def describe(film: Picture) -> tuple[NDArray[np.uint8], int]:
    ranks = rank_thumb(fit_square(np.asarray(film.convert("L"), np.float32) / np.float32(255), 128))
    return ranks.ravel(), perceptual_hash(ranks)


def copies(manifest: Manifest, ranks: NDArray[np.uint8], hashes: NDArray[np.uint64]) -> None:
    """Share of planted copies that are found among all films of the set, and false pairs."""
    rows = np.random.default_rng(0).choice(len(manifest), min(COPIES, len(manifest)), replace=False)
    films = [Image.fromarray(np.round(read_film(manifest.path(row))[0] * 255).astype(np.uint8)) for row in rows]
    known = {(pair.first, pair.second) for pair in near_pairs(ranks, hashes)}
    for name, change in CHANGES.items():
        described = [describe(change(film)) for film in films]
        all_ranks = np.concatenate([ranks, np.stack([one[0] for one in described])])
        all_hashes = np.concatenate([hashes, np.array([one[1] for one in described], np.uint64)])
        pairs = {(pair.first, pair.second) for pair in near_pairs(all_ranks, all_hashes)} - known
        found = sum((int(row), len(manifest) + place) in pairs for place, row in enumerate(rows))
        print(f"  {name:28s} {found / len(rows):.3f}")


def negatives(manifest: Manifest, ranks: NDArray[np.uint8]) -> None:
    """Share of planted negatives that are found, and films taken for one by mistake."""
    views = manifest.table["view"].tolist()
    for share in (0.0, 0.05, 0.5, 0.95):
        flipped = np.random.default_rng(0).random(len(ranks)) < share
        suspects = np.zeros(len(ranks), bool)
        suspects[judge_polarity(np.where(flipped[:, None], 255 - ranks, ranks), views).suspects] = True
        recall = f"{suspects[flipped].mean():.4f}" if flipped.any() else "-"
        print(f"  {share:4.0%} negatives ({flipped.sum()}): found {recall}, others {(suspects & ~flipped).sum()}")


def search(count: int) -> None:
    """Time of the search in ``count`` smooth random films with 500 planted copies."""
    rng = np.random.default_rng(0)
    smooth = np.stack([_field(rng) for _ in range(512)])
    ranks = np.empty((count, 1024), np.uint8)
    for row in range(count):
        first, second = rng.integers(0, 512, 2)
        mixed = smooth[first] + smooth[second] * rng.uniform(0.3, 1)
        ranks[row] = np.argsort(np.argsort(mixed)) * 255 // 1023
    sources, targets = rng.permutation(count)[:1000].reshape(2, 500)
    ranks[targets] = np.clip(ranks[sources] + rng.normal(0, 4, (500, 1024)), 0, 255).astype(np.uint8)
    start, cpu = time.perf_counter(), time.process_time()
    pairs = {(pair.first, pair.second) for pair in near_pairs(ranks, np.zeros(count, np.uint64))}
    found = sum((min(a, b), max(a, b)) in pairs for a, b in zip(sources.tolist(), targets.tolist(), strict=True))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(
        f"{count} films: {seconds:.1f} s ({cpu:.1f} s of CPU), {found} of 500 copies, {len(pairs) - found} other pairs"
    )


def _field(rng: np.random.Generator) -> NDArray[np.float32]:
    coarse = Image.fromarray(rng.normal(0, 1, (6, 6)).astype(np.float32))
    return np.asarray(coarse.resize((32, 32), Image.Resampling.BICUBIC)).ravel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--films", type=int, help="only time the search for copies, in so many films")
    arguments = parser.parse_args()
    if arguments.films:
        search(arguments.films)
        return
    for name in SETS:
        manifest = build(name, Path(os.environ["AFIRE_DATA"]) / name)
        start = time.perf_counter()
        measured = measure_manifest(manifest, None, default_workers())
        print(f"{name}: {len(manifest)} films measured in {time.perf_counter() - start:.1f} s")
        ranks = _rank_array(measured)
        negatives(manifest, ranks)
        copies(manifest, ranks, measured["phash"].to_numpy())


if __name__ == "__main__":
    main()

"""Prototypes of cells of the film against prototypes of places in the chest, on phantoms: numbers for docs/methods.md.

Short pre-trainings of the preset `tiny` with 8 x 8 tokens on normal phantoms. Of each: the structure loss at the end,
what of the place the position alone leaves open (a loss below that comes from looking at the film), how far
assignments depend on the film, and whether tokens of moved films follow their anatomy (`afire figure landmarks`). Then,
of 120 phantoms with and without findings, how many have no frame of their own, as they are and shifted.

python benchmarks/places.py --work FOLDER [--count N] [--epochs E] [--seed K] [--only grid,anatomy]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afire.data.phantom import draw_batch
from afire.lesions.frames import TYPICAL, chest_frame
from afire.lesions.places import lung_depth

ANATOMY = ("prototypes.place=anatomy",)
MOVED = ("prototypes.move=0.06",)
TAUGHT_BESIDE = ("method=phantom", "options.afire=1")
VARIANTS: dict[str, tuple[str, ...]] = {
    "grid": (),
    "grid, moved": MOVED,
    "anatomy": ANATOMY,
    "anatomy, moved": (*ANATOMY, *MOVED),
    "taught by phantoms": ("method=phantom",),
    "anatomy, taught beside": (*TAUGHT_BESIDE, *ANATOMY),
    "predicted, taught beside": (*TAUGHT_BESIDE, *ANATOMY, "prototypes.lungs=predicted"),
}
SETTINGS = ("encoder.patch_size=8", "run.picture_epochs=0", "training.warmup_epochs=2", "head.clusters=32")


def afire(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "afire", *map(str, words)], check=True)


def pretrained(name: str, work: Path, epochs: int, count: int, seed: int) -> Path:
    """The folder of a run, made unless it is there."""
    out = work / name.replace(", ", "-").replace(" ", "-")
    if not (out / "summary.json").exists():
        values = [*SETTINGS, f"training.epochs={epochs}", *VARIANTS[name]]
        if "method=phantom" in values:
            values.append(f"options.films={count}")
        if "method=phantom" not in values or "options.afire=1" in values:
            values += ["losses.lesion=0.5"]
        given = ("--data", work / "pack") if "losses.lesion=0.5" in values else ()
        words = ("pretrain", *given, "--out", out, "--preset", "tiny", "--seed", seed, "--device", "cpu", "-q")
        afire(*words, *(word for value in values for word in ("--set", value)))
    return out


def last_health(run: Path) -> dict[str, float]:
    """The last numbers of the health line, those of AFiRe beside phantoms by the names that they have alone."""
    numbers: dict[str, float] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        read = json.loads(line).items()
        numbers.update({name.removeprefix("health/"): value for name, value in read if isinstance(value, float)})
    return {**numbers, **{name.removeprefix("afire_"): number for name, number in numbers.items()}}


def without_frame(films_BSS: Tensor) -> int:
    """Films whose lungs are not found, or cannot be lungs."""
    frame = chest_frame(lung_depth(films_BSS))
    same = [(edge - typical).abs() < 1e-6 for edge, typical in zip(frame, TYPICAL, strict=True)]
    return int(torch.stack(same).all(dim=0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for phantoms and runs; a rerun continues")
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(name.replace(", ", "+") for name in VARIANTS))
    asked = parser.parse_args()
    work: Path = asked.work
    phantom = work / "phantom"
    afire("data", "phantom", "--count", asked.count, "--size", 64, "--normal-share", 1, "--out", phantom, "-q")
    afire("data", "pack", "--data", phantom / "manifest.parquet", "--out", work / "pack", "--size", 64, "-q")
    rows: list[dict[str, Any]] = []
    for name in (text.replace("+", ", ") for text in asked.only.split(",")):
        run = pretrained(name, work, asked.epochs, asked.count, asked.seed)
        figure = work / f"{run.name}-landmarks"
        words = ("figure", "landmarks", "--weights", run, "--data", work / "pack", "--part", "test", "--out", figure)
        afire(*words, "--device", "cpu", "--force", "-q")
        [shown] = json.loads(figure.with_suffix(".json").read_text())["numbers"].values()
        health, moved = last_health(run), shown["moved_films"]
        rows.append({"run": name, **health, "anatomy": moved["anatomy"], "position": moved["place"]})
    print("| prototypes | structure loss | position leaves open | film dependence | moved: anatomy | moved: position |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        numbers = [f"{row[key]:.2f}" if key in row else "-" for key in ("structure", "place_entropy")]
        film = f"{100 * row['image_dependence']:.0f} %" if "image_dependence" in row else "-"
        print(
            f"| {row['run']} | {' | '.join(numbers)} | {film} "
            f"| {100 * row['anatomy']:.0f} % | {100 * row['position']:.0f} % |"
        )
    films = torch.from_numpy(draw_batch(11, range(120), 64).images)
    for shift in (0, 4, 8):
        moved = F.pad(films, (shift, 0, 0, 0), mode="replicate")[..., :64]
        print(f"shifted by {shift} of 64 px: {without_frame(moved[:, 0])} of 120 films have no frame of their own")


if __name__ == "__main__":
    main()

"""The end of `make demo`: a table of what was measured, and a picture of what the two detectors point at.

python scripts/demo_result.py demo
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from scipy.ndimage import binary_dilation

from afire.data.manifest import LABEL_PREFIX, read_manifest
from afire.files import read_json
from afire.report.table import DASH, Column, number, show_summary, table_of

DETECTORS = {"built in": "builtin", "adapted": "adapted"}
RUNS = {"built in": "detect-builtin", "adapted": "detect"}
PROBES = {"random weights": "probe-random", "AFiRe, tiny": "probe", "built-in network": "probe-builtin"}
FILMS, SIDE, GAP, TITLE = 6, 176, 4, 22
OUTLINE = (255, 176, 32)
PICTURE = "result.png"


def interval(estimate: dict[str, Any]) -> str:
    return f"{number(estimate['low'])} to {number(estimate['high'])}"


def show_table(demo: Path) -> None:
    """AUC of detectors and probes with intervals, and how often the hottest point lies in the finding."""
    header: list[str | Column] = ["", "AUC", "95 % interval", "points at it", "by chance"]
    rows = []
    for name, folder in DETECTORS.items():
        auc = read_json(demo / f"eval-{folder}" / "result.json")["metrics"]["auc"]
        place = read_json(demo / f"eval-{folder}" / "detect.json")["localisation"]
        where = [number(place["hit"]["mean"]), number(place["chance"])]
        rows.append([f"detector, {name}", number(auc["mean"]), interval(auc), *where])
    for name, folder in PROBES.items():
        auc = read_json(demo / folder / "result.json")["metrics"]["auc"]
        rows.append([f"probe, {name}", number(auc["mean"]), interval(auc), DASH, DASH])
    notes = [
        "detectors: scanned phantoms of another seed; probes: test patients of the digital ones",
        "points at it: how often the hottest point lies in the finding",
        f"what they point at: {demo / PICTURE}",
    ]
    show_summary(Console(), table_of(header, rows), notes)


def outlined(film: Path, mask: Path) -> Image.Image:
    """The film with the edge of what was drawn."""
    pixels = np.asarray(Image.open(film).convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)).copy()
    inside = np.asarray(Image.open(mask).resize((SIDE, SIDE), Image.Resampling.NEAREST)) > 0
    pixels[binary_dilation(inside) & ~inside] = OUTLINE
    return Image.fromarray(pixels)


def overlays(run: Path) -> dict[str, Path]:
    """The picture of film and heat of every film that was scored, by its file."""
    with (run / "results.csv").open(newline="", encoding="utf-8") as lines:
        return {row["file"]: run / row["overlay_picture"] for row in csv.DictReader(lines) if row["overlay_picture"]}


def draw_picture(demo: Path) -> None:
    """The first films with findings: what was drawn, and the heat of each detector."""
    manifest = read_manifest(demo / "new" / "manifest.parquet")
    table = manifest.table[manifest.table["normal"] == 0].head(FILMS)
    sheet = Image.new("RGB", (FILMS * (SIDE + GAP), 3 * (SIDE + TITLE)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    heat = {detector: overlays(demo / folder) for detector, folder in RUNS.items()}
    for column, (_, film) in enumerate(table.iterrows()):
        left = column * (SIDE + GAP)
        names = [name for name in manifest.labels if film[f"{LABEL_PREFIX}{name}"] == 1]
        pictures = {" + ".join(names): outlined(demo / "new" / film["image"], demo / "new" / film["mask"])}
        for detector, files in heat.items():
            overlay = files.get(Path(film["image"]).name)
            picture = Image.open(overlay) if overlay else Image.new("L", (SIDE, SIDE))
            pictures[detector] = picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        for row, (title, picture) in enumerate(pictures.items()):
            top = row * (SIDE + TITLE)
            draw.text((left + 2, top + 3), title, fill="black", font=font)
            sheet.paste(picture, (left, top + TITLE))
    sheet.save(demo / PICTURE)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw_picture(folder)
    show_table(folder)

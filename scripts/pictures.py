"""The picture of the README, from the folder that `make demo` leaves, and that of the phantom's page, from a phantom.

python scripts/pictures.py readme demo
python scripts/pictures.py phantom phantom    # after: afire data phantom --count 800 --size 224 --seed 0 --out phantom
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

IMAGES = Path(__file__).parent.parent / "docs" / "images"
WIDTH = 1100
SHEET_WIDTH = 800  # of the phantom's sheet, which is tall: it stays below 300 KB


def load(path: Path, height: int) -> Image.Image:
    picture = Image.open(path).convert("RGB")
    return picture.crop((0, 0, picture.width, min(height, picture.height)))


def fit(picture: Image.Image, width: int) -> Image.Image:
    return picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)


def stack(parts: list[tuple[str, Image.Image]]) -> Image.Image:
    """Pictures below each other, each under a line of text."""
    font = ImageFont.load_default(size=18)
    parts = [(title, fit(picture, WIDTH)) for title, picture in parts]
    sheet = Image.new("RGB", (WIDTH, sum(picture.height + 38 for _, picture in parts)), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for title, picture in parts:
        draw.text((4, top + 8), title, fill="black", font=font)
        sheet.paste(picture, (0, top + 34))
        top += picture.height + 38
    return sheet


def draw_readme(demo: Path) -> None:
    restorations = sorted((demo / "run" / "pictures").glob("restorations-*.png"))[-1]
    parts = [
        (
            "1. What is drawn into films, and what the detectors point at: out of the box, and after a short fit",
            load(demo / "result.png", 600),
        ),
        (
            "2. Films that afire draws itself, normal and with findings",
            load(demo / "phantom" / "contact_sheet.png", 375),
        ),
        ("3. Synthetic lesions on normal films, and the tokens they make abnormal", load(demo / "lesions.png", 305)),
        ("4. What the tiny preset restores after a minute of pre-training", load(restorations, 250)),
    ]
    stack(parts).save(IMAGES / "demo.jpg", quality=85, optimize=True)


def draw_phantom(phantom: Path) -> None:
    sheet = load(phantom / "contact_sheet.png", 10_000)
    fit(sheet, SHEET_WIDTH).save(IMAGES / "phantom.jpg", quality=80, optimize=True)


if __name__ == "__main__":
    IMAGES.mkdir(parents=True, exist_ok=True)
    {"readme": draw_readme, "phantom": draw_phantom}[sys.argv[1]](Path(sys.argv[2]))

"""A contact sheet: many films at once, each with a line of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

_GAP = 6
_PAPER, _INK, _FRAME = (18, 19, 22), (222, 224, 228), (58, 60, 66)
_SMALLEST_TEXT, _LARGEST_TEXT = 9, 14


def contact_sheet(
    images: Sequence[NDArray[Any]], captions: Sequence[str], columns: int, cell: int = 160
) -> Image.Image:
    """Films in a grid, captions below them in light text on dark.

    An image is (H, W) or (H, W, 3): uint8, or floats in [0, 1]. It is scaled to fit a square of ``cell`` pixels; a
    caption that is too long for its cell is cut with an ellipsis.
    """
    if len(images) != len(captions):
        raise ValueError(f"{len(images)} images have {len(captions)} captions")
    if columns < 1 or cell < 16:
        raise ValueError(f"a sheet needs at least 1 column and cells of 16 px, not {columns} and {cell}")
    text_size = int(np.clip(cell // 12, _SMALLEST_TEXT, _LARGEST_TEXT))
    font = ImageFont.load_default(text_size)
    line = text_size + 8
    columns = max(1, min(columns, len(images)))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (cell + _GAP) + _GAP, rows * (cell + line + _GAP) + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(place, columns)
        left, top = _GAP + column * (cell + _GAP), _GAP + row * (cell + line + _GAP)
        picture = _fitted(image, cell)
        draw.rectangle((left - 1, top - 1, left + cell, top + cell), outline=_FRAME)
        sheet.paste(picture, (left + (cell - picture.width) // 2, top + (cell - picture.height) // 2))
        draw.text((left + 2, top + cell + 3), _shortened(caption, draw, font, cell - 4), _INK, font=font)
    return sheet


def _fitted(image: NDArray[Any], cell: int) -> Image.Image:
    if image.dtype != np.uint8:
        image = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    picture = Image.fromarray(image).convert("RGB")
    scale = cell / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture.resize(size, Image.Resampling.LANCZOS)


def _shortened(
    text: str, draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int
) -> str:
    shown = text
    while len(shown) > 2 and draw.textlength(shown, font=font) > width:
        shown = shown[:-2] + "…"
    return shown

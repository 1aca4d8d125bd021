"""A contact sheet of synthetic lesions: normal, mask, lesioned, and the tokens that count as abnormal."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from afire.errors import UserError
from afire.files import write_atomic

Picture = NDArray[np.float32]  # (H, W, 3) in [0, 1]

_COLUMNS = ("normal", "lesion mask", "lesioned", "abnormal tokens")
_SMALLEST_CELL = 224
_GAP = 8
_HEADER = 58
_CAPTION = 22
_PAPER, _INK, _FAINT_INK = (255, 255, 255), (25, 25, 25), (110, 110, 110)
_TINT = np.array([1.0, 0.55, 0.1], np.float32)


def lesion_sheet(
    films: Tensor, masks: Tensor, lesioned: Tensor, abnormal: Tensor, patch_size: int, title: str, captions: list[str]
) -> Image.Image:
    """One row for each film. films and lesioned (B, C, S, S), masks (B, 1, S, S), abnormal (B, L); one caption each.

    Small films are enlarged by a whole factor, so that every pixel and every token keeps its sharp edge.
    """
    size = films.shape[-1]
    enlarge = -(-_SMALLEST_CELL // size)
    cell = size * enlarge
    sheet = Image.new("RGB", (4 * (cell + _GAP) + _GAP, _HEADER + len(films) * (cell + _CAPTION + _GAP)), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, 6), title, _INK, font=_font(15))
    for column, name in enumerate(_COLUMNS):
        draw.text((_GAP + column * (cell + _GAP), 34), name, _INK, font=_font(15))
    white = max(float(masks.max()), 1e-6)  # one scale for the sheet: faint lesions show, and rows compare
    for row in range(len(films)):
        top = _HEADER + row * (cell + _CAPTION + _GAP)
        pictures = _row(films[row], masks[row] / white, lesioned[row], abnormal[row], patch_size, enlarge)
        notes = (
            captions[row],
            f"largest {float(masks[row].max()):.2f} (brightest colour {white:.2f})",
            "",
            f"{int(abnormal[row].sum())} of {abnormal.shape[1]} tokens",
        )
        for column, (picture, note) in enumerate(zip(pictures, notes, strict=True)):
            left = _GAP + column * (cell + _GAP)
            sheet.paste(_image(picture), (left, top))
            draw.text((left, top + cell + 3), _shortened(note, draw, cell), _FAINT_INK, font=_font(12))
    return sheet


def check_name(path: Path) -> None:
    """Refuse a file name that is not a PNG's, before any work is done."""
    if path.suffix.lower() != ".png":
        raise UserError(f"{path} does not end in .png; the sheet is written as PNG.")


def save_sheet(sheet: Image.Image, path: Path) -> None:
    """Write the sheet as PNG, whole or not at all."""
    check_name(path)
    write_atomic(path, lambda temporary: sheet.save(temporary, format="PNG"))


def _row(
    film: Tensor, mask: Tensor, lesioned: Tensor, abnormal: Tensor, patch_size: int, enlarge: int
) -> list[Picture]:
    normal, changed = _gray(film, enlarge), _gray(lesioned, enlarge)
    colours = matplotlib.colormaps["magma"](_enlarged(mask[0], enlarge))[..., :3].astype(np.float32)
    return [normal, colours, changed, _overlay(changed, abnormal, patch_size * enlarge)]


def _gray(image: Tensor, enlarge: int) -> Picture:
    return np.repeat(_enlarged(image.float().mean(0), enlarge)[..., None], 3, axis=2)


def _enlarged(image: Tensor, times: int) -> NDArray[np.float32]:
    values: NDArray[np.float32] = image.float().cpu().numpy()
    return values.repeat(times, axis=0).repeat(times, axis=1)


def _overlay(picture: Picture, abnormal: Tensor, patch_size: int) -> Picture:
    """Abnormal tokens tinted, with a faint line around every token."""
    rows, columns = (side // patch_size for side in picture.shape[:2])
    grid = abnormal.view(rows, columns).cpu().numpy()
    tinted = np.kron(grid, np.ones((patch_size, patch_size), bool))[..., None]
    result = np.where(tinted, picture * 0.6 + _TINT * 0.4, picture)
    lines = np.zeros(picture.shape[:2], bool)
    lines[::patch_size] = lines[:, ::patch_size] = True
    return np.where(lines[..., None], result * 0.75 + 0.12, result).astype(np.float32)


def _image(picture: Picture) -> Image.Image:
    return Image.fromarray((picture.clip(0, 1) * 255).round().astype(np.uint8))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _shortened(text: str, draw: ImageDraw.ImageDraw, width: int) -> str:
    """The end of a text that is too long: of a path, the end tells most."""
    shown = text
    while len(shown) > 4 and draw.textlength(shown, font=_font(12)) > width:
        shown = "…" + shown[2:]
    return shown

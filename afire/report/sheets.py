"""Pictures to look through: sheets of films, sheets of synthetic lesions, and inputs and outputs of a pre-training run.

Sheets are drawn pixel by pixel (PIL), because every pixel of a film should be seen; the pictures of a run are figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from afire.errors import UserError
from afire.files import write_atomic
from afire.methods.afire import AFiRe
from afire.methods.base import Panel
from afire.training.pretraining import EpochView

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
    shortened = text
    while len(shortened) > 2 and draw.textlength(shortened, font=font) > width:
        shortened = shortened[:-2] + "…"
    return shortened


Picture = NDArray[np.float32]  # (H, W, 3) in [0, 1]

_COLUMNS = ("normal", "lesion mask", "lesioned", "abnormal tokens")
_SMALLEST_CELL = 224
_LESION_GAP = 8
_HEADER = 58
_CAPTION = 22
_LESION_PAPER, _LESION_INK, _FAINT_INK = (255, 255, 255), (25, 25, 25), (110, 110, 110)
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
    sheet = Image.new(
        "RGB",
        (4 * (cell + _LESION_GAP) + _LESION_GAP, _HEADER + len(films) * (cell + _CAPTION + _LESION_GAP)),
        _LESION_PAPER,
    )
    draw = ImageDraw.Draw(sheet)
    draw.text((_LESION_GAP, 6), title, _LESION_INK, font=_font(15))
    for column, name in enumerate(_COLUMNS):
        draw.text((_LESION_GAP + column * (cell + _LESION_GAP), 34), name, _LESION_INK, font=_font(15))
    white = max(float(masks.max()), 1e-6)  # one scale for the sheet: faint lesions show, and rows compare
    for row in range(len(films)):
        top = _HEADER + row * (cell + _CAPTION + _LESION_GAP)
        pictures = _row(films[row], masks[row] / white, lesioned[row], abnormal[row], patch_size, enlarge)
        notes = (
            captions[row],
            f"largest {float(masks[row].max()):.2f} (brightest colour {white:.2f})",
            "",
            f"{int(abnormal[row].sum())} of {abnormal.shape[1]} tokens",
        )
        for column, (picture, note) in enumerate(zip(pictures, notes, strict=True)):
            left = _LESION_GAP + column * (cell + _LESION_GAP)
            sheet.paste(_image(picture), (left, top))
            draw.text((left, top + cell + 3), _shortened_name(note, draw, cell), _FAINT_INK, font=_font(12))
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


def _shortened_name(text: str, draw: ImageDraw.ImageDraw, width: int) -> str:
    """The end of a text that is too long: of a path, the end is the most useful."""
    shortened = text
    while len(shortened) > 4 and draw.textlength(shortened, font=_font(12)) > width:
        shortened = "…" + shortened[2:]
    return shortened


matplotlib.use("Agg")


_SCALES = {"film": ("gray", 0.0, 1.0), "mask": ("magma", 0.0, 1.0), "difference": ("RdBu_r", -0.5, 0.5)}
_FILMS = 4


class EpochPictures:
    """An observer for the loop: every ``every`` epochs, and at the last one, two pictures in ``RUN/pictures``."""

    def __init__(self, every: int, epochs: int) -> None:
        self.every, self.epochs = every, epochs

    def __call__(self, view: EpochView) -> None:
        if view.epoch % self.every and view.epoch != self.epochs:
            return
        folder = view.out / "pictures"
        panels = view.model.panels(view.views, _FILMS)
        if panels:
            save(restorations(panels, view.epoch), folder / f"restorations-{view.epoch:04d}.png")
        if isinstance(view.model, AFiRe) and view.model.bank is not None and view.model.has_clusters:
            save(prototype_map(view.model, view.epoch), folder / f"prototypes-{view.epoch:04d}.png")


def restorations(panels: Sequence[Panel], epoch: int) -> Figure:
    """A row for each film, a column for each panel of the method."""
    count = len(panels[0].images)
    figure: Figure
    figure, axes = plt.subplots(count, len(panels), figsize=(2.1 * len(panels), 2.15 * count), squeeze=False)
    for column, panel in enumerate(panels):
        colours, low, high = _SCALES[panel.kind]
        title = f"{panel.title} (epoch {epoch})" if column == 0 else panel.title
        axes[0, column].set_title(title, fontsize=10)
        for row in range(count):
            picture = panel.images[row].mean(dim=0).float().cpu().numpy()
            axes[row, column].imshow(picture, cmap=colours, vmin=low, vmax=high, interpolation="nearest")
            axes[row, column].axis("off")
    figure.tight_layout(pad=0.4)
    return figure


def prototype_map(model: AFiRe, epoch: int) -> Figure:
    """For each place of the film: its likeliest cluster, and how sure its prototype is."""
    rows, columns = model.grid
    prototypes = model.prototypes.detach().float().cpu()
    likeliest = prototypes.argmax(dim=1).view(rows, columns).numpy()
    entropy = (torch.special.entr(prototypes).sum(1) / np.log(prototypes.shape[1])).view(rows, columns).numpy()
    clusters, numbered = np.unique(likeliest, return_inverse=True)
    figure: Figure
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.6))
    axes[0].imshow(numbered.reshape(rows, columns), cmap="tab20" if len(clusters) <= 20 else "nipy_spectral")
    axes[0].set_title(f"epoch {epoch}: likeliest cluster ({len(clusters)} of {prototypes.shape[1]})", fontsize=9)
    image = axes[1].imshow(entropy, cmap="viridis", vmin=0, vmax=1)
    axes[1].set_title("entropy of the prototype (1 = uniform)", fontsize=9)
    figure.colorbar(image, ax=axes[1], fraction=0.046, pad=0.03)
    for axis in axes:
        axis.axis("off")
    figure.tight_layout(pad=0.5)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically and close it."""
    write_atomic(path, lambda temporary: figure.savefig(temporary, dpi=110))
    plt.close(figure)

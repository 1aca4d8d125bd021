"""The contact sheet: the right pixels in the right column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from afire.errors import UserError
from afire.report.sheets import lesion_sheet, save_sheet


def sheet(size: int = 224, count: int = 2) -> Image.Image:
    films = torch.full((count, 1, size, size), 0.2)
    lesioned = torch.full((count, 1, size, size), 0.6)
    masks = torch.zeros(count, 1, size, size)
    masks[..., : size // 2, :] = 0.4
    abnormal = torch.zeros(count, 4, dtype=torch.bool)
    abnormal[:, 1] = True
    return lesion_sheet(films, masks, lesioned, abnormal, size // 2, "slm", ["a", "b"][:count])


def pixel(image: Image.Image, column: int, x: int, y: int, cell: int = 224) -> list[int]:
    return np.asarray(image)[58 + y, 8 + column * (cell + 8) + x].tolist()


def test_columns_show_normal_mask_lesioned_and_labels() -> None:
    image = sheet()
    assert pixel(image, 0, 100, 100) == [51] * 3
    assert pixel(image, 2, 100, 100) == [153] * 3
    bright, dark = pixel(image, 1, 100, 50), pixel(image, 1, 100, 150)
    assert sum(bright) > 600 and sum(dark) < 30
    red, _, blue = pixel(image, 3, 170, 50)
    assert red > blue + 40  # the abnormal token is tinted
    assert pixel(image, 3, 50, 170) == [153] * 3


def test_small_films_are_enlarged_by_whole_pixels() -> None:
    assert sheet(size=64).width == 4 * (256 + 8) + 8
    assert pixel(sheet(size=64), 2, 255, 255, cell=256) == [153] * 3


def test_writes_png_only(tmp_path: Path) -> None:
    save_sheet(sheet(count=1), tmp_path / "deep" / "sheet.png")
    assert Image.open(tmp_path / "deep" / "sheet.png").size == sheet(count=1).size
    with pytest.raises(UserError, match=r"does not end in \.png"):
        save_sheet(sheet(count=1), tmp_path / "sheet.tiff")


def test_long_names_keep_their_end() -> None:
    image = lesion_sheet(
        torch.zeros(1, 1, 32, 32),
        torch.zeros(1, 1, 32, 32),
        torch.zeros(1, 1, 32, 32),
        torch.zeros(1, 4, dtype=torch.bool),
        16,
        "slm",
        ["folder/" * 60 + "film.png"],
    )
    assert image.width == 4 * (224 + 8) + 8

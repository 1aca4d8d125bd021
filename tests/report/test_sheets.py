"""The contact sheet: one cell for each film, whatever its shape."""

from __future__ import annotations

import numpy as np
import pytest

from afire.report.sheets import contact_sheet


def test_every_film_has_its_cell() -> None:
    films = [np.full((40, 40), value, np.float32) for value in (0.0, 0.5, 1.0)]
    sheet = np.asarray(contact_sheet(films, ["a", "b", "c"], columns=2, cell=80))
    one_row = np.asarray(contact_sheet(films[:2], ["a", "b"], columns=2, cell=80))
    assert sheet.shape[1] == one_row.shape[1] and sheet.shape[0] > 1.8 * one_row.shape[0]
    assert tuple(sheet[40, 40]) == (0, 0, 0)
    assert tuple(sheet[40, 130]) == (128, 128, 128)
    assert tuple(sheet[one_row.shape[0] + 20, 40]) == (255, 255, 255)


def test_colour_bytes_and_oblong_films_are_shown_whole() -> None:
    red = np.zeros((20, 40, 3), np.uint8)
    red[..., 0] = 255
    sheet = np.asarray(contact_sheet([red], ["oblong"], columns=5, cell=100))
    assert (sheet[..., 0] == 255).sum() == 100 * 50
    assert sheet.shape[1] < 120  # no empty columns


def test_a_long_caption_stays_in_its_cell() -> None:
    black = np.zeros((8, 8), np.float32)
    long = np.asarray(contact_sheet([black, black], ["word " * 60, ""], columns=2, cell=64))
    beside = long[70:, 72:]
    assert beside.max() < 80  # the neighbour's caption line is empty: paper only


def test_wrong_calls_fail() -> None:
    with pytest.raises(ValueError, match="1 images have 2 captions"):
        contact_sheet([np.zeros((4, 4))], ["a", "b"], columns=1)
    with pytest.raises(ValueError, match="at least 1 column"):
        contact_sheet([np.zeros((4, 4))], ["a"], columns=0)

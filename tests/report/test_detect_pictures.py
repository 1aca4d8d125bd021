"""Pictures on one scale: the same heat is the same colour on every film, and lies where it was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from afire.data.decode import FIT_MODES, fit_square
from afire.data.film import FilmInfo
from afire.detect.base import HeatScale
from afire.detect.findings import FilmResult
from afire.detect.run import Drawing, ReadFilm
from afire.report.detect_pictures import (
    Painter,
    difference_colours,
    heat_colours,
    heat_on_grey,
    laid_over,
    to_film,
    transparent,
)

SCALE = HeatScale(2.0, 6.0)


def drawing(path: Path, heat: np.ndarray, shape: tuple[int, int] = (40, 30), kind: str = "png") -> Drawing:
    shown = np.full(shape, 100, np.uint8)
    square = np.full((16, 16), 0.4, np.float32)
    info = FilmInfo(width=shape[1], height=shape[0], bits=8, kind=kind)
    restored = square.copy()
    restored[:8] += 0.2
    return Drawing(ReadFilm(3, path.name, path, square, shown, info), FilmResult(3, "x", "scored", 1.0), heat, restored)


def test_nothing_below_the_scale_is_coloured_and_the_scale_is_not_stretched(tmp_path: Path) -> None:
    painter = Painter(tmp_path, SCALE, "squash")

    def overlay(heat: float) -> np.ndarray:
        drawn = painter(drawing(tmp_path / "a.png", np.full((4, 4), heat, np.float32)))
        return np.asarray(Image.open(tmp_path / drawn.pictures["overlay"])).astype(int)

    quiet, weak, strong, beyond = (overlay(heat) for heat in (1.9, 4.0, 6.0, 60.0))
    assert (np.abs(quiet - 100) <= 1).all(), "the film and nothing else"
    assert np.abs(weak - strong).max() > 30 and (strong == beyond).all()
    assert np.ptp(strong.reshape(-1, 3), axis=0).max() <= 2


def test_a_grey_jpeg_is_shown_as_it_is_and_so_is_its_overlay_where_nothing_is_hot(tmp_path: Path) -> None:
    one = drawing(tmp_path / "a.jpg", np.zeros((4, 4), np.float32), kind="jpeg")
    film = replace(one.film, jpeg=b"the film itself")
    drawn = Painter(tmp_path, SCALE, "squash")(replace(one, film=film))
    assert (tmp_path / drawn.pictures["film"]).read_bytes() == film.jpeg
    assert (tmp_path / drawn.pictures["overlay"]).read_bytes() == film.jpeg


@pytest.mark.parametrize("fit", FIT_MODES)
def test_heat_of_few_cells_is_spread_as_pillow_would(fit: str) -> None:
    heat = np.random.default_rng(0).normal(size=(16, 12)).astype(np.float32)
    spread = to_film(heat, (64, 50), fit)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("afire.report.detect_pictures._FEW_CELLS", 0)
        by_pillow = to_film(heat, (64, 50), fit)  # type: ignore[arg-type]
    np.testing.assert_allclose(spread, by_pillow, atol=1e-5)


def test_a_large_film_keeps_its_size_and_its_overlay_is_half_of_it(tmp_path: Path) -> None:
    large = drawing(tmp_path / "a.png", np.full((4, 4), 5.0, np.float32), (512, 400))
    pictures = Painter(tmp_path, SCALE, "squash")(large).pictures
    assert Image.open(tmp_path / pictures["film"]).size == (400, 512)
    assert Image.open(tmp_path / pictures["overlay"]).size == (200, 256)


def test_every_picture_is_written_and_has_the_films_proportions(tmp_path: Path) -> None:
    drawn = Painter(tmp_path, SCALE, "squash")(drawing(tmp_path / "a.png", np.full((4, 4), 5.0, np.float32)))
    assert set(drawn.pictures) == {"film", "heat", "overlay", "restored", "difference"}
    sizes = {kind: Image.open(tmp_path / name).size for kind, name in drawn.pictures.items()}
    assert sizes["film"] == sizes["overlay"] == sizes["heat"] == (30, 40)
    assert sizes["restored"] == sizes["difference"] == (12, 16)
    difference = np.asarray(Image.open(tmp_path / drawn.pictures["difference"]).convert("RGB")).astype(int)
    assert difference[2, 6, 2] > difference[2, 6, 0] + 40, "blue: darker than restored"
    assert (np.abs(difference[13, 6] - difference_colours()[128].astype(int)) <= 2).all(), "equal is dark"
    heat = Image.open(tmp_path / drawn.pictures["heat"]).convert("RGBA")
    assert 0 < heat.getpixel((15, 20))[3] < 255


def test_a_full_disk_is_said_of_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*pictures/000/000003-film\.jpg"):
        Painter(tmp_path, SCALE, "squash")(drawing(tmp_path / "a.png", np.full((4, 4), 5.0, np.float32)))


@pytest.mark.parametrize("corner", [(0, 0), (60, 90), (93, 120)])
def test_heat_in_a_corner_looks_as_if_the_whole_film_were_mixed(corner: tuple[int, int]) -> None:
    film = np.random.default_rng(0).integers(0, 256, (187, 250)).astype(np.uint8)
    steps = np.zeros((96, 128), np.uint8)
    steps[corner[0] : corner[0] + 5, corner[1] : corner[1] + 7] = 200
    whole = Image.fromarray(film).convert("RGBA")
    whole.alpha_composite(
        transparent(Image.fromarray(steps).resize((250, 187), Image.Resampling.BILINEAR)).convert("RGBA")
    )
    overlay = np.asarray(laid_over(film, Image.fromarray(steps))).astype(int)
    assert np.abs(overlay - np.asarray(whole.convert("RGB"))).max() <= 13  # a step of the scale at its foot
    assert (overlay != film[..., None]).any(axis=2).sum() > 5 * 7 * 3


def test_a_film_out_of_domain_is_shown_without_heat(tmp_path: Path) -> None:
    one = drawing(tmp_path / "a.png", np.zeros((4, 4), np.float32))
    drawn = Painter(tmp_path, SCALE, "squash")(Drawing(one.film, one.result, None, None))
    assert set(drawn.pictures) == {"film"}


@pytest.mark.parametrize("fit", FIT_MODES)
def test_heat_comes_back_to_where_it_was_on_the_film(fit: str) -> None:
    film = np.zeros((96, 160), np.float32)
    film[40:52, 72:84] = 1  # in the middle, which every fit shows
    film[40:52, 100:112] = 0.5
    back = to_film(fit_square(film, 64, fit), (96, 160), fit)  # type: ignore[arg-type]
    assert back.shape == film.shape
    rows, columns = np.nonzero(back > 0.8)
    assert (rows.mean(), columns.mean()) == pytest.approx((45.5, 77.5), abs=1)
    assert np.abs(back - film)[60:].max() < 0.05
    assert np.corrcoef(back.ravel(), film.ravel())[0, 1] > 0.9


def test_what_a_crop_has_not_seen_is_outside() -> None:
    back = to_film(np.full((4, 4), 9.0, np.float32), (10, 20), "crop", outside=-1)
    assert (back[:, :5] == -1).all() and (back[:, 15:] == -1).all()
    np.testing.assert_allclose(back[:, 5:15], 9, rtol=1e-6)


def test_colours_rise_in_lightness() -> None:
    luminance = heat_colours() @ np.array([0.299, 0.587, 0.114])
    assert (np.diff(luminance) >= -1).all(), "order is told without colour"
    assert len(set(heat_on_grey()[0])) == 1, "at the foot of the scale the film is as it was"

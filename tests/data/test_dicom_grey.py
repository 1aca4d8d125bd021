"""The DICOM grey-scale against pydicom's where that holds, and its promises where it does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom.dataset import Dataset
from pydicom.pixels import apply_modality_lut, apply_windowing

from afire.data.dicom_grey import GreyScale, Lut, Voi, Window, to_film

numbers = st.floats(-5000, 5000)
widths = st.floats(1.5, 5000)
functions = st.sampled_from(["LINEAR", "LINEAR_EXACT", "SIGMOID"])


@settings(max_examples=60, deadline=None)
@given(centre=numbers, width=widths, function=functions, slope=st.floats(0.1, 10), intercept=numbers)
def test_windows_agree_with_pydicom(centre: float, width: float, function: str, slope: float, intercept: float) -> None:
    stored = np.arange(0, 4096, 7, dtype=np.uint16)[None]
    dataset = Dataset()
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.BitsStored, dataset.PixelRepresentation = 12, 0
    # DICOM decimals have 16 characters; ours get what the file would hold.
    centre, width, slope, intercept = (float(f"{value:.8g}") for value in (centre, width, slope, intercept))
    dataset.RescaleSlope, dataset.RescaleIntercept = slope, intercept
    dataset.WindowCenter, dataset.WindowWidth, dataset.VOILUTFunction = centre, width, function
    with np.errstate(over="ignore"):
        theirs = apply_windowing(apply_modality_lut(stored, dataset), dataset)
    theirs = (theirs - intercept) / (4095 * slope)  # their output spans the range of the stored bits, rescaled
    scale = GreyScale(12, slope=slope, intercept=intercept, window=Window(centre, width, function))
    np.testing.assert_allclose(to_film(stored, scale, "auto"), theirs, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    bits=st.integers(1, 16),
    signed=st.booleans(),
    slope=st.floats(-10, 10).filter(lambda value: abs(value) > 1e-3),
    intercept=numbers,
    centre=numbers,
    width=st.floats(0, 5000),
    function=functions,
    monochrome1=st.booleans(),
    voi=st.sampled_from(["auto", "lut", "window", "none"]),
)
def test_every_film_is_monotone_and_in_range(
    bits: int,
    signed: bool,
    slope: float,
    intercept: float,
    centre: float,
    width: float,
    function: str,
    monochrome1: bool,
    voi: Voi,
) -> None:
    window = Window(centre, width, function)
    scale = GreyScale(bits, signed, slope, intercept, window=window, monochrome1=monochrome1)
    low, high = scale.stored_range()
    stored = np.unique(np.linspace(low, high, 300).astype(np.int32))[None]
    film = to_film(stored, scale, voi)
    assert film.dtype == np.float32 and film.min() >= 0.0 and film.max() <= 1.0
    steps = np.diff(film[0])
    rises = (slope > 0) != monochrome1
    assert (steps >= 0).all() if rises else (steps <= 0).all()


def test_table_and_arithmetic_agree() -> None:
    """Up to 16 bits go through a table of all levels, wider numbers through arithmetic; the film is the same."""
    rng = np.random.default_rng(1)
    stored = rng.integers(-2000, 2000, (30, 30)).astype(np.int32)
    scale = GreyScale(16, True, 0.7, 12.5, window=Window(100, 900), monochrome1=True)
    wide = np.concatenate([stored, np.full((1, 30), 200_000, np.int32)])
    np.testing.assert_array_equal(to_film(stored, scale, "auto"), to_film(wide, scale, "auto")[:-1])


def test_a_linear_window_by_hand() -> None:
    """PS3.3 C.11.2.1.2.1: centre 2048 and width 4096 is the identity of 12 bits; width 1 is a threshold."""
    stored = np.arange(4096, dtype=np.uint16)[None]
    identity = to_film(stored, GreyScale(12, window=Window(2048, 4096)), "window")
    np.testing.assert_allclose(identity[0], np.arange(4096) / 4095, atol=1e-6)
    threshold = to_film(stored, GreyScale(12, window=Window(100, 1)), "window")
    np.testing.assert_array_equal(threshold[0], (np.arange(4096) >= 100).astype(np.float32))


def test_a_sigmoid_window_does_not_overflow() -> None:
    stored = np.array([[0, 32768, 65535]], np.uint16)
    film = to_film(stored, GreyScale(16, window=Window(32768, 1e-3, "SIGMOID")), "auto")
    np.testing.assert_allclose(film, [[0, 0.5, 1]], atol=1e-6)


@pytest.mark.parametrize(
    "window",
    [Window(5, 0), Window(5, 0.5), Window(5, -3), Window(np.nan, 5), Window(5, np.inf), Window(5, 5, "CUBIC")],
)
def test_windows_that_the_standard_forbids_are_passed_over(window: Window) -> None:
    stored = np.arange(100, dtype=np.uint16)[None]
    np.testing.assert_array_equal(
        to_film(stored, GreyScale(12, window=window), "auto"), to_film(stored, GreyScale(12), "auto")
    )


def test_a_falling_modality_lut_keeps_its_direction() -> None:
    stored = np.arange(1000, 1256, dtype=np.uint16)[None]
    falling = Lut(1000, np.arange(255, -1, -1).astype(np.uint16), 12)
    film = to_film(stored, GreyScale(12, modality_lut=falling), "auto")
    np.testing.assert_allclose(film[0], np.linspace(1, 0, 256), atol=1e-6)


def test_an_8_bit_voi_lut_after_a_12_bit_film_does_not_wrap() -> None:
    stored = np.array([[0, 255, 256, 4095]], np.uint16)
    ramp = Lut(0, (np.arange(4096) // 16).astype(np.uint16), 8)
    film = to_film(stored, GreyScale(12, voi_lut=ramp), "auto")
    np.testing.assert_allclose(film * 255, [[0, 15, 16, 255]], atol=1e-4)


def test_an_empty_table_of_zeros_is_black() -> None:
    film = to_film(np.array([[0, 3]], np.uint16), GreyScale(12, voi_lut=Lut(0, np.zeros(4, np.uint16), 0)), "auto")
    np.testing.assert_array_equal(film, 0.0)

"""DICOM films have the right numbers: the order of the grey-scale, windows, tables, views; real films last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.dataset import Dataset

from afire.data.decode import fit_square, read_film
from afire.data.film import FilmInfo, hash_patient
from afire.errors import UserError
from tests.data.dicom_films import GREY8, GREY12, RNG, lut, make, read, refusal, to_bytes, write


def test_8_bits_without_a_window_are_the_png(tmp_path: Path) -> None:
    data = to_bytes(make(GREY8, ViewPosition="PA"))
    for voi in ("auto", "lut", "window", "none"):
        film, info = read(tmp_path, data, voi=voi)
        np.testing.assert_array_equal(film, GREY8 / np.float32(255))
    patient = hash_patient("P1")
    assert info == FilmInfo(24, 16, 8, "dicom", view="PA", patient=patient, file_bytes=len(data))


def test_8_bits_are_not_stretched(tmp_path: Path) -> None:
    film, _ = read(tmp_path, make(GREY8 // 2))
    np.testing.assert_array_equal(film, (GREY8 // 2) / np.float32(255))


def test_rescale_then_window_then_inversion(tmp_path: Path) -> None:
    """By hand: stored 0, 1000, 2000, 3000 rescaled to -500, 0, 500, 1000, seen through -250..750."""
    stored = np.array([[0, 1000, 2000, 3000]], np.uint16)
    window = {"RescaleSlope": 0.5, "RescaleIntercept": -500, "WindowCenter": 250, "WindowWidth": 1000}
    window["VOILUTFunction"] = "LINEAR_EXACT"
    film, info = read(tmp_path, make(stored, 12, **window))
    np.testing.assert_allclose(film, [[0.0, 0.25, 0.75, 1.0]], atol=1e-6)
    assert not info.inverted and info.bits == 12
    film, info = read(tmp_path, make(stored, 12, PhotometricInterpretation="MONOCHROME1", **window))
    np.testing.assert_allclose(film, [[1.0, 0.75, 0.25, 0.0]], atol=1e-6)
    assert info.inverted


def test_monochrome1_is_inverted_after_the_window_not_before(tmp_path: Path) -> None:
    """An off-centre window tells the two apart: inverted first, the film would be all black here."""
    stored = np.array([[3000, 3500, 4000]], np.uint16)
    tags = {"WindowCenter": 3500, "WindowWidth": 1000, "VOILUTFunction": "LINEAR_EXACT"}
    film, _ = read(tmp_path, make(stored, 12, PhotometricInterpretation="MONOCHROME1", **tags))
    np.testing.assert_allclose(film, [[1.0, 0.5, 0.0]], atol=1e-6)


@pytest.mark.parametrize("voi", ["auto", "lut", "window", "none"])
@pytest.mark.parametrize("shape", [None, "INVERSE", "IDENTITY"])
def test_monochrome1_is_one_minus_monochrome2(tmp_path: Path, voi: str, shape: str | None) -> None:
    """INVERSE says again what MONOCHROME1 says; it is not a second inversion."""
    tags: dict[str, Any] = {
        "WindowCenter": 1000,
        "WindowWidth": 1500,
        "VOILUTSequence": lut(0, np.linspace(0, 4095, 4096).astype("<u2"), 12),
    }
    if shape:
        tags["PresentationLUTShape"] = shape
    one, _ = read(tmp_path, make(GREY12, 12, PhotometricInterpretation="MONOCHROME1", **tags), voi=voi)
    two, _ = read(tmp_path, make(GREY12, 12, **tags), voi=voi)
    np.testing.assert_allclose(one, 1.0 - two, atol=1e-6)


def test_which_grey_scale_a_setting_chooses(tmp_path: Path) -> None:
    stored = np.array([[0, 1024, 2048, 4095]], np.uint16)
    steps = np.repeat(np.array([0, 64, 128, 255], "<u2"), 1024)  # four grey levels, told from a window at once
    both = make(stored, 12, VOILUTSequence=lut(0, steps, 8), WindowCenter=2048, WindowWidth=4096)
    through_lut = np.array([[0, 64, 128, 255]]) / 255
    through_window = stored / 4095
    for voi, expected in (("auto", through_lut), ("lut", through_lut), ("window", through_window)):
        np.testing.assert_allclose(read(tmp_path, both, voi=voi)[0], expected, atol=2e-4)
    narrow = make(stored, 12, WindowCenter=1000, WindowWidth=200)
    np.testing.assert_allclose(read(tmp_path, narrow, voi="none")[0], stored / 4095, atol=1e-6)
    np.testing.assert_allclose(read(tmp_path, narrow, voi="lut")[0], stored / 4095, atol=1e-6)
    with pytest.raises(UserError, match=r"image\.voi 'best' is not one of auto, lut, window, none"):
        read(tmp_path, both, voi="best")


def test_the_first_of_several_windows_counts(tmp_path: Path) -> None:
    stored = np.array([[100, 200]], np.uint16)
    film, _ = read(tmp_path, make(stored, 12, WindowCenter=[150.5, 9], WindowWidth=[101, 3]))
    np.testing.assert_allclose(film, [[0.0, 1.0]], atol=1e-6)


@pytest.mark.parametrize("width", ["0", "-5", ""])
def test_a_window_without_width_is_no_window(tmp_path: Path, width: str) -> None:
    plain, _ = read(tmp_path, make(GREY12, 12))
    film, _ = read(tmp_path, make(GREY12, 12, WindowCenter="100", WindowWidth=width))
    np.testing.assert_array_equal(film, plain)


def test_deep_films_without_a_window_use_their_own_range(tmp_path: Path) -> None:
    """A 12-bit detector in a file that says 16 bits would be nearly black over the full range."""
    stored = (GREY12 // 2 + 500).astype(np.uint16)
    film, _ = read(tmp_path, make(stored, 16))
    np.testing.assert_allclose(film, (stored - 500) / 2047, atol=1e-6)
    film, _ = read(tmp_path, make(stored, 16), voi="none")
    np.testing.assert_allclose(film, stored / 65535, atol=1e-6)


def test_padding_does_not_count_for_the_range(tmp_path: Path) -> None:
    stored = np.array([[4000, 1000, 1500, 2000, 3990]], np.uint16)
    film, _ = read(tmp_path, make(stored, 12, PixelPaddingValue=4000, PixelPaddingRangeLimit=3990))
    np.testing.assert_allclose(film, [[1.0, 0.0, 0.5, 1.0, 1.0]], atol=1e-6)
    signed = np.array([[-2000, 0, 50, 100]], np.int16)
    film, _ = read(tmp_path, make(signed, 16, PixelPaddingValue=-2000))
    np.testing.assert_allclose(film, [[0.0, 0.0, 0.5, 1.0]], atol=1e-6)
    as_unsigned = make(signed, 16)
    as_unsigned.add_new("PixelPaddingValue", "US", 65536 - 2000)  # a frequent mistake
    np.testing.assert_array_equal(read(tmp_path, as_unsigned)[0], film)
    everything, info = read(tmp_path, make(np.full((3, 3), 7, np.uint16), 12, PixelPaddingValue=7))
    assert info.constant and np.isfinite(everything).all()


def test_signed_pixels_and_a_falling_slope(tmp_path: Path) -> None:
    stored = np.array([[-2048, 0, 2047]], np.int16)
    film, _ = read(tmp_path, make(stored, 12), voi="none")
    np.testing.assert_allclose(film, [[0.0, 2048 / 4095, 1.0]], atol=1e-6)
    falling = make(stored, 12, RescaleSlope=-1, RescaleIntercept=0, WindowCenter=0, WindowWidth=1000)
    np.testing.assert_allclose(read(tmp_path, falling)[0], [[1.0, 0.5005, 0.0]], atol=1e-3)
    np.testing.assert_allclose(read(tmp_path, falling, voi="none")[0], [[1.0, 2047 / 4095, 0.0]], atol=1e-6)


def test_modality_lut(tmp_path: Path) -> None:
    stored = np.array([[5, 10, 11, 12, 99]], np.uint16)
    table = lut(10, np.array([100, 40000, 65535], "<u2"), 16)
    film, _ = read(tmp_path, make(stored, 12, ModalityLUTSequence=table), voi="none")
    np.testing.assert_allclose(film, np.array([[100, 100, 40000, 65535, 65535]]) / 65535, atol=1e-6)


def test_tables_of_every_make(tmp_path: Path) -> None:
    """Packed bytes, 65,536 entries written as 0, a negative first value, more bits used than declared."""
    stored = np.arange(4, dtype=np.uint16)[None]
    packed = lut(0, np.array([0, 50, 100, 255], np.uint8), 8)
    np.testing.assert_allclose(
        read(tmp_path, make(stored, 12, VOILUTSequence=packed))[0] * 255, [[0, 50, 100, 255]], atol=1e-4
    )
    full = lut(0, np.arange(65536).astype("<u2"), 16, count=0)
    np.testing.assert_allclose(read(tmp_path, make(GREY12, 16, VOILUTSequence=full))[0], GREY12 / 65535.0, atol=1e-6)
    below = lut(-2, np.array([0, 10, 20, 40], "<u2"), 8)
    signed = np.array([[-2, -1, 0, 1]], np.int16)
    np.testing.assert_allclose(
        read(tmp_path, make(signed, 12, VOILUTSequence=below))[0] * 255, [[0, 10, 20, 40]], atol=1e-4
    )
    liar = lut(0, np.array([0, 1000, 2000, 4000], "<u2"), 8)
    np.testing.assert_allclose(read(tmp_path, make(stored, 12, VOILUTSequence=liar))[0], [[0, 0.25, 0.5, 1]], atol=1e-6)
    short = lut(0, np.array([0, 1], "<u2"), 8, count=300)
    assert "damaged" in refusal(write(tmp_path, make(stored, 12, VOILUTSequence=short)))


def test_overlay_bits_above_the_stored_ones_are_not_film(tmp_path: Path) -> None:
    overlaid = GREY12 | (RNG.integers(0, 2, GREY12.shape).astype(np.uint16) << 14)
    clean, _ = read(tmp_path, make(GREY12, 12), voi="none")
    film, _ = read(tmp_path, make(overlaid, 12), voi="none")
    np.testing.assert_array_equal(film, clean)


def test_colour_and_palette_captures(tmp_path: Path) -> None:
    grey = np.stack([GREY8] * 3, -1)
    film, info = read(tmp_path, make(grey, Modality="OT"))
    np.testing.assert_array_equal(film, GREY8 / np.float32(255))
    assert not info.colour
    photo = RNG.integers(0, 256, (16, 24, 3), dtype=np.uint8)
    film, info = read(tmp_path, make(photo, Modality="OT"))
    assert info.colour
    np.testing.assert_allclose(film, photo @ [0.299, 0.587, 0.114] / 255, atol=0.51 / 255)
    palette = make(GREY8, PhotometricInterpretation="PALETTE COLOR")
    ramp = (np.arange(256)[::-1] * 257).astype("<u2")
    for name in ("Red", "Green", "Blue"):
        palette.add_new(f"{name}PaletteColorLookupTableDescriptor", "US", [256, 0, 16])
        palette.add_new(f"{name}PaletteColorLookupTableData", "OW", ramp.tobytes())
    np.testing.assert_allclose(read(tmp_path, palette)[0], (255 - GREY8) / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("tags", "view"),
    [
        ({"ViewPosition": "AP"}, "AP"),
        ({"ViewPosition": "LL"}, "LATERAL"),
        ({"ViewPosition": "LATERAL"}, "LATERAL"),
        ({"ViewPosition": "LLD"}, ""),
        ({"PatientPosition": "PA"}, "PA"),
        ({"PatientPosition": "HFS"}, ""),
        ({}, ""),
    ],
)
def test_views(tmp_path: Path, tags: dict[str, str], view: str) -> None:
    assert read(tmp_path, make(GREY8, **tags))[1].view == view


def test_view_from_its_code(tmp_path: Path) -> None:
    item = Dataset()
    item.CodeMeaning = "postero-anterior"
    assert read(tmp_path, make(GREY8, ViewCodeSequence=[item]))[1].view == "PA"


@pytest.mark.realdata
def test_real_dicom_is_the_published_png(real_data: Path) -> None:
    film, info = read_film(real_data / "dicom" / "nih_udacity_test1.dcm")
    published, _ = read_film(real_data / "nih" / "images" / "00000002_000.jpg")
    assert info.view == "PA" and info.bits == 8 and film.shape == (1024, 1024)
    one, two = fit_square(film, 128), fit_square(published, 128)
    assert np.corrcoef(one.ravel(), two.ravel())[0, 1] > 0.99
    assert np.abs(one - two).mean() < 0.02


@pytest.mark.realdata
def test_real_ct_is_refused(real_data: Path) -> None:
    assert "modality CT is not a radiograph" in refusal(real_data / "dicom" / "nih_udacity_test5.dcm")


@pytest.mark.realdata
def test_real_monochrome1_is_the_opposite_of_its_twin(real_data: Path) -> None:
    [path] = (real_data / "dicom").glob("siim_1.2.276*.dcm")
    film, info = read_film(path)
    fake, fake_info = read_film(real_data / "dicom" / "siim_fake_monochrome1.dcm")
    np.testing.assert_allclose(fake, 1.0 - film, atol=1e-6)
    assert fake_info.inverted and not info.inverted and info.view == "PA"

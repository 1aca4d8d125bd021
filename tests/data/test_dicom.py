"""DICOM films: the order of the grey-scale, every refusal a sentence, and no name anywhere."""

from __future__ import annotations

import io
import logging
import struct
import time
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.pixels import get_decoder
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLSLossless,
    RLELossless,
)

from afire.data.decode import FilmInfo, hash_patient, read_film
from afire.data.resize import fit_square
from afire.errors import ImageError, UserError

RNG = np.random.default_rng(9)
GREY8 = RNG.integers(0, 256, (16, 24), dtype=np.uint8)
GREY12 = RNG.integers(0, 4096, (16, 24), dtype=np.uint16)
GREY8[0, :2], GREY12[0, :2] = (0, 255), (0, 4095)
PERSON = {
    "PatientName": "Doe^Joan",
    "PatientID": "MRN-4711-X",
    "PatientBirthDate": "19530217",
    "OtherPatientIDs": "SSN-99887",
    "PatientAddress": "Elm Street 12",
    "ReferringPhysicianName": "Grey^Meredith",
    "InstitutionName": "County General",
    "AccessionNumber": "ACC31337",
    "StudyDescription": "chest of Joan Doe",
}


def make(pixels: np.ndarray, stored: int | None = None, **tags: Any) -> Dataset:
    """A CR film around ``pixels``; tags by keyword, ``None`` removes one."""
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = UID("1.2.840.10008.5.1.4.1.1.1")
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = UID("1.2.3.4")
    dataset.Modality = "CR"
    dataset.PatientID = "P1"
    dataset.Rows, dataset.Columns = pixels.shape[:2]
    dataset.SamplesPerPixel = 1 if pixels.ndim == 2 else 3
    dataset.PhotometricInterpretation = "MONOCHROME2" if pixels.ndim == 2 else "RGB"
    if pixels.ndim == 3:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = pixels.dtype.itemsize * 8
    if pixels.dtype.kind == "f":
        dataset.FloatPixelData = pixels.tobytes()
    else:
        dataset.BitsStored = stored or dataset.BitsAllocated
        dataset.HighBit = dataset.BitsStored - 1
        dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
        dataset.PixelData = pixels.tobytes()
        dataset["PixelData"].VR = "OB" if dataset.BitsAllocated == 8 else "OW"
    for keyword, value in tags.items():
        if value is None:
            delattr(dataset, keyword)
        else:
            setattr(dataset, keyword, value)
    return dataset


def lut(first: int, entries: np.ndarray, bits: int, count: int | None = None) -> list[Dataset]:
    item = Dataset()
    item.add_new("LUTDescriptor", "US" if first >= 0 else "SS", [len(entries) if count is None else count, first, bits])
    item.add_new("LUTData", "OW", entries.tobytes())
    return [item]


def to_bytes(dataset: Dataset) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def write(folder: Path, what: Dataset | bytes, name: str = "film.dcm") -> Path:
    path = folder / name
    path.write_bytes(what if isinstance(what, bytes) else to_bytes(what))
    return path


def read(folder: Path, what: Dataset | bytes, **options: Any) -> tuple[np.ndarray, FilmInfo]:
    film, info = read_film(write(folder, what), **options)
    assert film.dtype == np.float32 and film.ndim == 2 and film.min() >= 0.0 and film.max() <= 1.0
    return film, info


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ImageError) as caught:
        read_film(path, **options)
    sentence = str(caught.value)
    assert str(path) in sentence and "\n" not in sentence and sentence.endswith(".")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return sentence


# --- right numbers ---------------------------------------------------------------------------------------------------


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


# --- transfer syntaxes and names -------------------------------------------------------------------------------------


def in_syntax(pixels: np.ndarray, stored: int, syntax: UID) -> Dataset:
    dataset = make(pixels, stored, WindowCenter=2000, WindowWidth=3000)
    if syntax == RLELossless:
        dataset.compress(RLELossless)
    elif syntax in (JPEG2000Lossless, JPEGBaseline8Bit):
        stream = io.BytesIO()
        image = Image.fromarray(pixels)
        image.save(stream, "JPEG" if syntax == JPEGBaseline8Bit else "JPEG2000", no_jp2=True, irreversible=False)
        dataset.PixelData = encapsulate([stream.getvalue()])
        dataset["PixelData"].VR = "OB"
        dataset["PixelData"].is_undefined_length = True
    elif syntax == ExplicitVRBigEndian:
        dataset.PixelData = pixels.astype(">u2").tobytes()
    dataset.file_meta.TransferSyntaxUID = syntax
    return dataset


@pytest.mark.parametrize(
    "syntax",
    [ImplicitVRLittleEndian, ExplicitVRBigEndian, DeflatedExplicitVRLittleEndian, RLELossless, JPEG2000Lossless],
    ids=lambda syntax: syntax.name,
)
def test_transfer_syntaxes_without_loss_agree(tmp_path: Path, syntax: UID) -> None:
    deep = (RNG.integers(0, 65536, (32, 32))).astype(np.uint16)  # pillow writes JPEG 2000 with 16 bits
    plain, _ = read(tmp_path, in_syntax(deep, 16, ExplicitVRLittleEndian))
    film, info = read(tmp_path, in_syntax(deep, 16, syntax))
    np.testing.assert_array_equal(film, plain)
    assert info.bits == 16 and info.patient == hash_patient("P1")


def test_jpeg_baseline(tmp_path: Path) -> None:
    smooth = np.linspace(0, 255, 64 * 48).reshape(48, 64).astype(np.uint8)
    film, _ = read(tmp_path, in_syntax(smooth, 8, JPEGBaseline8Bit), voi="none")
    assert np.abs(film - smooth / 255).max() < 0.05


def test_big_endian_tables(tmp_path: Path) -> None:
    dataset = make(GREY12, 12, VOILUTSequence=lut(0, np.arange(4096).astype(">u2"), 12))
    dataset.PixelData = GREY12.astype(">u2").tobytes()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRBigEndian
    np.testing.assert_allclose(read(tmp_path, dataset)[0], GREY12 / 4095, atol=1e-6)


@pytest.mark.skipif(get_decoder(JPEGLSLossless).is_available, reason="a JPEG-LS decoder is installed")
def test_a_missing_decoder_is_named_with_its_cure(tmp_path: Path) -> None:
    dataset = in_syntax(GREY12, 12, RLELossless)
    dataset.file_meta.TransferSyntaxUID = JPEGLSLossless
    sentence = refusal(write(tmp_path, dataset))
    assert "JPEG-LS Lossless Image Compression" in sentence and 'pip install "afire[dicom]"' in sentence


@pytest.mark.skipif(len(get_decoder(JPEGExtended12Bit).available_plugins) > 1, reason="a 12-bit decoder is installed")
def test_twelve_bit_jpeg_needs_more_than_pillow(tmp_path: Path) -> None:
    dataset = in_syntax(GREY12, 12, RLELossless)
    dataset.file_meta.TransferSyntaxUID = JPEGExtended12Bit
    assert 'pip install "afire[dicom]"' in refusal(write(tmp_path, dataset))


def test_video_is_not_a_film(tmp_path: Path) -> None:
    dataset = in_syntax(GREY12, 12, RLELossless)
    dataset.file_meta.TransferSyntaxUID = UID("1.2.840.10008.1.2.4.100")
    assert "transfer syntax that pydicom cannot decode" in refusal(write(tmp_path, dataset))


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    data = to_bytes(make(GREY8))
    for name in ("film.png", "1.2.3", "IM0001"):
        _, info = read_film(write(tmp_path, data, name))
        assert info.kind == "dicom"


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRLittleEndian], ids=lambda syntax: syntax.name)
def test_old_files_without_a_preamble(tmp_path: Path, syntax: UID) -> None:
    dataset = make(GREY12, 12)
    dataset.file_meta.TransferSyntaxUID = syntax
    whole, _ = read(tmp_path, dataset)
    data = to_bytes(dataset)
    group_2 = 132 + 12 + struct.unpack_from("<I", data, 140)[0]
    np.testing.assert_array_equal(read(tmp_path, data[group_2:])[0], whole)
    np.testing.assert_array_equal(read(tmp_path, data[132:])[0], whole)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modality", ["CT", "MR", "US", "MG", "XA", "SEG"])
def test_other_modalities(tmp_path: Path, modality: str) -> None:
    path = write(tmp_path, make(GREY8, Modality=modality))
    assert f"modality {modality} is not a radiograph" in refusal(path)
    read_film(path, modalities=[modality])


def test_modalities_of_radiographs(tmp_path: Path) -> None:
    for modality in ("CR", "DX", "RG", "OT", ""):
        read(tmp_path, make(GREY8, Modality=modality))
    read(tmp_path, make(GREY8, Modality=None))
    path = write(tmp_path, make(GREY8, Modality=None))
    assert "modality (none)" in refusal(path, modalities=["DX"])


def test_several_frames(tmp_path: Path) -> None:
    dataset = make(GREY8, NumberOfFrames=3)
    dataset.PixelData = GREY8.tobytes() * 3
    assert "holds 3 frames" in refusal(write(tmp_path, dataset))


def test_no_image_inside(tmp_path: Path) -> None:
    report = make(GREY8, PixelData=None, Rows=None, Columns=None)
    assert "without an image" in refusal(write(tmp_path, report))
    assert "pixels are missing" in refusal(write(tmp_path, make(GREY8, PixelData=None)))
    assert "has no pixels" in refusal(write(tmp_path, make(GREY8, Rows=0)))


def test_sizes_that_do_not_match_the_pixels(tmp_path: Path) -> None:
    assert "damaged" in refusal(write(tmp_path, make(GREY8, Rows=17)))
    wrong = in_syntax(np.tile(GREY8, (2, 2)), 8, JPEGBaseline8Bit)
    wrong.Rows = 500
    assert "damaged" in refusal(write(tmp_path, wrong))


def test_huge_sizes_are_refused_before_decoding(tmp_path: Path) -> None:
    path = write(tmp_path, make(GREY8, Rows=60_000, Columns=60_000))
    assert "60000 x 60000 pixels, more than max_pixels = 120,000,000" in refusal(path)
    assert "more than max_pixels = 100" in refusal(write(tmp_path, make(GREY8)), max_pixels=100)


def test_a_deflated_bomb_is_not_inflated(tmp_path: Path) -> None:
    data = to_bytes(in_syntax(GREY12, 12, DeflatedExplicitVRLittleEndian))
    start = 132 + 12 + struct.unpack_from("<I", data, 140)[0]
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = deflater.compress(bytes(100 << 20)) + deflater.flush()
    path = write(tmp_path, data[:start] + bomb)
    tracemalloc.start()
    assert "inflates to more than" in refusal(path, max_pixels=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 << 20


def test_float_pixels(tmp_path: Path) -> None:
    values = RNG.normal(size=(8, 8)).astype(np.float32)
    film, info = read(tmp_path, make(values))
    np.testing.assert_allclose(film, (values - values.min()) / (values.max() - values.min()), atol=1e-6)
    assert info.bits == 32
    values[3, 3] = np.nan
    assert "NaN or infinite" in refusal(write(tmp_path, make(values)))


def test_a_slope_that_is_no_number_is_not_passed_over(tmp_path: Path) -> None:
    """A decimal comma, say. A window can be left out; without its slope a film means something else."""
    data = to_bytes(make(GREY12, 12, RescaleSlope="1.50", RescaleIntercept="0")).replace(b"1.50", b"1,50")
    assert "damaged" in refusal(write(tmp_path, data))


def test_absurd_numbers_do_not_become_nan(tmp_path: Path) -> None:
    path = write(tmp_path, make(GREY12, 12, RescaleSlope="1e308", RescaleIntercept="-1e308"))
    try:
        film, _ = read_film(path)
        assert film.min() >= 0 and film.max() <= 1
    except ImageError as error:
        assert "no finite picture" in str(error)


def test_a_constant_film_is_flagged(tmp_path: Path) -> None:
    film, info = read(tmp_path, make(np.full((8, 8), 1234, np.uint16), 12))
    assert info.constant and np.isfinite(film).all()
    outside = make(GREY12, 12, WindowCenter=60000, WindowWidth=10)
    assert read(tmp_path, outside)[1].constant  # the window shows nothing of the film


@pytest.mark.parametrize(
    "syntax",
    [ImplicitVRLittleEndian, ExplicitVRLittleEndian, DeflatedExplicitVRLittleEndian, RLELossless, JPEGBaseline8Bit],
    ids=lambda syntax: syntax.name,
)
def test_truncated_anywhere(tmp_path: Path, syntax: UID) -> None:
    pixels = GREY8 if syntax == JPEGBaseline8Bit else GREY12
    data = to_bytes(in_syntax(pixels, pixels.dtype.itemsize * 8, syntax))
    read(tmp_path, data)
    # The last bytes of compressed films are a delimiter and padding; everything before them is needed.
    for length in [*range(133, len(data) - 12, 23), len(data) - 12]:
        refusal(write(tmp_path, data[:length]))


# --- nothing else is ever raised, nothing identifying is ever said ---------------------------------------------------


def damaged(data: bytes, count: int, seed: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    results = []
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(int(rng.integers(1, 5))):
            # Most of a file is pixels; aim at the header, where the damage is more interesting.
            at = 128 + int(rng.integers(min(len(changed), 900) - 128)) if rng.random() < 0.8 else len(changed) // 2
            match int(rng.integers(4)):
                case 0:
                    changed[at] = int(rng.integers(256))
                case 1:
                    del changed[at : at + int(rng.integers(1, 9))]
                case 2:
                    changed[at : at + 4] = b"\xff\xff\xff\xff"
                case _:
                    changed[at:at] = bytes(int(rng.integers(1, 9)))
        results.append(bytes(changed))
    return results


@pytest.mark.parametrize(
    "syntax",
    [ImplicitVRLittleEndian, ExplicitVRLittleEndian, DeflatedExplicitVRLittleEndian, RLELossless, JPEGBaseline8Bit],
    ids=lambda syntax: syntax.name,
)
def test_damaged_bytes_are_read_or_refused_in_silence(
    tmp_path: Path, syntax: UID, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    pixels = GREY8 if syntax == JPEGBaseline8Bit else GREY12
    dataset = in_syntax(pixels, pixels.dtype.itemsize * 8, syntax)
    for keyword, value in PERSON.items():
        setattr(dataset, keyword, value)
    dataset.VOILUTSequence = lut(0, np.arange(256).astype("<u2"), 8)
    path = tmp_path / "film"
    said, refused = [], 0
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as heard, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        for data in damaged(to_bytes(dataset), 150, seed=3):
            path.write_bytes(data)
            try:
                film, info = read_film(path, max_pixels=1_000_000)
                said.append(repr(info))
                assert film.min() >= 0.0 and film.max() <= 1.0
            except ImageError as error:
                refused += 1
                said.append(str(error))
    assert refused > 20 and time.perf_counter() - start < 20
    assert not heard and not caplog.records and capfd.readouterr().err == ""
    assert_nobody_named(" ".join(said))


def assert_nobody_named(text: str) -> None:
    for value in PERSON.values():
        for word in value.replace("^", " ").split():
            if len(word) > 3:
                assert word not in text, word


def test_nobody_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In what is returned, in what is refused, and in the logs; also where pydicom complains about values."""
    variants: list[dict[str, Any]] = [
        {},
        {"Modality": "CT"},
        {"Rows": 999},
        {"NumberOfFrames": 4},
        {"PixelData": None},
        {"WindowWidth": "0", "WindowCenter": "5"},
    ]
    with warnings.catch_warnings(record=True) as heard, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        for tags in variants:
            dataset = make(GREY8, **PERSON)
            for keyword, value in tags.items():
                dataset.__delattr__(keyword) if value is None else setattr(dataset, keyword, value)
            path = write(tmp_path, dataset)
            caplog.clear()
            heard.clear()
            try:
                _, info = read_film(path)
                assert_nobody_named(repr(info))
                assert info.patient == hash_patient(PERSON["PatientID"])
            except ImageError as error:
                assert_nobody_named(f"{error!r} {error}")
            assert_nobody_named(caplog.text + " ".join(str(warning.message) for warning in heard))


def test_values_that_make_pydicom_complain_stay_unsaid(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without the guard, pydicom warns and logs "Unknown encoding 'Joan Doe' - using default encoding instead"."""
    data = to_bytes(make(GREY8, SpecificCharacterSet="ISO_IR 100")).replace(b"ISO_IR 100", b"Joan Doe  ")
    path = write(tmp_path, data)
    with warnings.catch_warnings(record=True) as heard, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        with pytest.warns(UserWarning, match="Joan Doe"):
            assert pydicom.dcmread(path).PatientID
        assert "Joan Doe" in caplog.text
        heard.clear()
        caplog.clear()
        _, info = read_film(path)
    assert not heard and not caplog.records and "Doe" not in repr(info)


def test_only_listed_tags_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from afire.data.dicom import _TAGS

    parsed: list[Dataset] = []
    dcmread = pydicom.dcmread
    monkeypatch.setattr(
        pydicom, "dcmread", lambda *args, **options: parsed.append(dcmread(*args, **options)) or parsed[0]
    )
    read(tmp_path, make(GREY8, **PERSON))
    [dataset] = parsed
    assert "PatientID" in dataset and not [
        keyword for keyword in PERSON if keyword in dataset and keyword != "PatientID"
    ]
    assert not [tag for tag in _TAGS if "Name" in tag or "Birth" in tag or "Address" in tag or "Date" in tag]
    assert [tag for tag in _TAGS if tag.startswith("Patient")] == ["PatientID", "PatientPosition"]


def test_patient_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFIRE_PATIENT_SALT", raising=False)
    assert hash_patient("4711") == hash_patient(" 4711\0") == hash_patient("4711", "afire")
    assert hash_patient("4711") == "969ce8a97eb41d31"  # the same in every run and on every machine
    assert len({hash_patient("4711", salt) for salt in ("afire", "a", "b", "x" * 500)}) == 4
    assert len({hash_patient(str(number)) for number in range(2000)}) == 2000
    assert hash_patient("") == hash_patient("  ") == ""
    _, own = read_film(write(tmp_path, make(GREY8)), salt="ours")
    assert own.patient == hash_patient("P1", "ours") != hash_patient("P1")
    monkeypatch.setenv("AFIRE_PATIENT_SALT", "ours")
    assert hash_patient("P1") == own.patient
    assert read(tmp_path, make(GREY8, PatientID=""))[1].patient == ""


class Anything:
    """A collection that holds every modality."""

    def __contains__(self, _modality: object) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_pydicoms_own_collection_of_odd_files() -> None:
    """Some 80 files of all makes that come inside the pydicom package."""
    folder = Path(str(get_testdata_file("CT_small.dcm", download=False))).parent
    read_count, refused = 0, {}
    for path in sorted(folder.glob("*.dcm")):
        try:
            film, _ = read_film(path, modalities=Anything())
            assert film.min() >= 0.0 and film.max() <= 1.0
            read_count += 1
        except ImageError as error:
            refused[path.name] = str(error)
    assert read_count > 40, refused
    assert "without an image" in refused["test-SR.dcm"] and "without an image" in refused["rtplan.dcm"]
    assert "frames" in refused["rtdose.dcm"]


# --- real films ------------------------------------------------------------------------------------------------------


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

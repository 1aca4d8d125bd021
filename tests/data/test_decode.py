"""Films from PNG, JPEG, TIFF, BMP and GIF: right numbers, every refusal a message, and nothing else ever raised."""

from __future__ import annotations

import io
import logging
import os
import struct
import threading
import time
import tracemalloc
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from afire.data.decode import film_shape, fit_square, is_image_file, read_film, read_mask, read_mask_raw
from afire.data.film import FilmInfo, quiet_readers
from afire.errors import ImageError

RNG = np.random.default_rng(5)
GREY8 = RNG.integers(0, 256, (20, 30), dtype=np.uint8)
GREY16 = RNG.integers(0, 65536, (20, 30), dtype=np.uint16)
GREY8[0, :2], GREY16[0, :2] = (0, 255), (0, 65535)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def write(folder: Path, data: bytes, name: str = "film.png") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def read(folder: Path, data: bytes, name: str = "film.png") -> tuple[np.ndarray, FilmInfo]:
    film, info = read_film(write(folder, data, name))
    assert film.dtype == np.float32 and film.ndim == 2 and film.min() >= 0.0 and film.max() <= 1.0
    return film, info


def tiff(
    pixels: np.ndarray, bits: int, *, photometric: int = 1, sample_format: int = 1, order: str = "<", turn: int = 1
) -> bytes:
    """An uncompressed TIFF written by hand, for the kinds that pillow cannot write."""
    height, width = pixels.shape
    raw = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    short, long = 3, 4
    entries = [
        (256, long, width),
        (257, long, height),
        (258, short, bits),
        (259, short, 1),
        (262, short, photometric),
        (273, long, 8),
        (274, short, turn),
        (277, short, 1),
        (278, long, height),
        (279, long, len(raw)),
        (339, short, sample_format),
    ]
    data = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8 + len(raw)) + raw
    data += struct.pack(order + "H", len(entries))
    for tag, kind, value in entries:
        data += struct.pack(order + "HHI", tag, kind, 1)
        data += struct.pack(order + "HH", value, 0) if kind == short else struct.pack(order + "I", value)
    return data + struct.pack(order + "I", 0)


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, body: bytes, depth: int = 8, colour: int = 0) -> bytes:
    """A PNG whose header says what it likes."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b"")


# --- right numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "GIF"])
def test_8_bit_grey(tmp_path: Path, kind: str) -> None:
    data = encoded(Image.fromarray(GREY8), kind)
    film, info = read(tmp_path, data)
    np.testing.assert_array_equal(film, GREY8 / np.float32(255))
    assert info == FilmInfo(width=30, height=20, bits=8, kind=kind.lower(), file_bytes=len(data))


def test_jpeg(tmp_path: Path) -> None:
    smooth = np.linspace(0, 255, 64 * 48).reshape(48, 64).astype(np.uint8)
    film, info = read(tmp_path, encoded(Image.fromarray(smooth), "JPEG", quality=95))
    assert np.abs(film - smooth / 255).max() < 0.02
    assert (info.kind, info.bits, info.width, info.height, info.colour) == ("jpeg", 8, 64, 48, False)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_keeps_its_range_and_depth(tmp_path: Path, kind: str) -> None:
    film, info = read(tmp_path, encoded(Image.fromarray(GREY16), kind))
    np.testing.assert_array_equal(film, GREY16.astype(np.float32) / np.float32(65535))
    assert info.bits == 16 and film.min() == 0.0 and film.max() == 1.0
    assert len(np.unique(film)) > 256


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("depth", [8, 10, 12, 14])
def test_fewer_bits_in_a_16_bit_file_keep_their_depth(tmp_path: Path, kind: str, depth: int) -> None:
    stored = GREY16 >> (16 - depth)
    film, info = read(tmp_path, encoded(Image.fromarray(stored), kind))
    np.testing.assert_array_equal(film, stored / np.float32(2**depth - 1))
    assert (info.bits, info.unused_bits, film.max()) == (depth, 16 - depth, 1.0)
    one_more = stored.copy()
    one_more[0, 1] = 2**depth  # one value beyond
    film, info = read(tmp_path, encoded(Image.fromarray(one_more), kind))
    assert info.bits > depth and info.bits + info.unused_bits == 16 and film.max() < 0.51


def test_a_black_film_says_nothing_about_its_depth(tmp_path: Path) -> None:
    _, info = read(tmp_path, encoded(Image.fromarray(np.zeros((20, 30), np.uint16)), "PNG"))
    assert (info.bits, info.unused_bits, info.constant) == (16, 0, True)


@pytest.mark.parametrize("order", ["<", ">"])
def test_tiff_byte_orders(tmp_path: Path, order: str) -> None:
    film, info = read(tmp_path, tiff(GREY16, 16, order=order))
    np.testing.assert_array_equal(film, GREY16.astype(np.float32) / np.float32(65535))
    assert info.kind == "tiff" and not info.inverted


@pytest.mark.parametrize(("pixels", "bits"), [(GREY8, 8), (GREY16, 16)])
def test_tiff_white_is_zero_is_turned_over(tmp_path: Path, pixels: np.ndarray, bits: int) -> None:
    film, info = read(tmp_path, tiff(pixels, bits, photometric=0))
    np.testing.assert_allclose(film, 1.0 - pixels / (2.0**bits - 1), atol=1e-6)
    assert info.inverted


def test_one_bit(tmp_path: Path) -> None:
    film, info = read(tmp_path, encoded(Image.fromarray(GREY8 > 127), "PNG"))
    np.testing.assert_array_equal(film, (GREY8 > 127).astype(np.float32))
    assert info.bits == 1


def test_grey_in_three_channels_and_alpha_is_that_grey(tmp_path: Path) -> None:
    """NIH stores some films as RGBA; alpha is dropped, also where it says 'transparent'."""
    alpha = RNG.integers(0, 256, GREY8.shape, dtype=np.uint8)
    for stack in ([GREY8] * 3, [GREY8] * 3 + [alpha], [GREY8, alpha]):
        film, info = read(tmp_path, encoded(Image.fromarray(np.stack(stack, -1)), "PNG"))
        np.testing.assert_array_equal(film, GREY8 / np.float32(255))
        assert not info.colour


def test_palette_goes_through_its_colours(tmp_path: Path) -> None:
    """A palette may hold the greys in any order: an index is not a grey value."""
    image = Image.fromarray(GREY8).copy()
    image = Image.frombytes("P", image.size, bytes(255 - GREY8.reshape(-1)))
    image.putpalette([255 - index // 3 for index in range(768)])
    film, info = read(tmp_path, encoded(image, "PNG"))
    np.testing.assert_array_equal(film, GREY8 / np.float32(255))
    assert not info.colour and info.bits == 8


def test_colour_is_luminance_and_is_flagged(tmp_path: Path) -> None:
    photo = RNG.integers(0, 256, (20, 30, 3), dtype=np.uint8)
    film, info = read(tmp_path, encoded(Image.fromarray(photo), "PNG"))
    assert info.colour
    np.testing.assert_allclose(film, photo @ [0.299, 0.587, 0.114] / 255, atol=0.51 / 255)


def test_a_small_coloured_marker_or_jpeg_rounding_is_not_a_photo(tmp_path: Path) -> None:
    marked = np.stack([np.full((100, 100), 90, np.uint8)] * 3, -1)
    marked[:5, :10] = (255, 255, 0)
    assert not read(tmp_path, encoded(Image.fromarray(marked), "PNG"))[1].colour
    smooth = np.stack([np.linspace(0, 255, 10_000).reshape(100, 100).astype(np.uint8)] * 3, -1)
    film, info = read(tmp_path, encoded(Image.fromarray(smooth), "JPEG", quality=60))
    assert not info.colour and np.abs(film - smooth[..., 0] / 255).max() < 0.05


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    film, info = read(tmp_path, encoded(Image.fromarray(GREY8), "PNG", exif=exif))
    np.testing.assert_array_equal(film, np.rot90(GREY8, -1) / np.float32(255))
    assert (info.width, info.height) == (20, 30), "those of the film that was returned"
    assert film_shape(tmp_path / "film.png") == film.shape
    film, _ = read(tmp_path, tiff(GREY8, 8, turn=6))
    np.testing.assert_array_equal(film, np.rot90(GREY8, -1) / np.float32(255))


def test_float_tiff_in_the_unit_range_stays_and_others_are_stretched(tmp_path: Path) -> None:
    values = RNG.random((20, 30)).astype(np.float32) * 0.5
    film, info = read(tmp_path, encoded(Image.fromarray(values), "TIFF"))
    np.testing.assert_array_equal(film, values)
    assert info.bits == 32
    film, _ = read(tmp_path, encoded(Image.fromarray(values * 4000 - 1000), "TIFF"))
    expected = (values - values.min()) / (values.max() - values.min())
    np.testing.assert_allclose(film, expected, atol=1e-5)


def test_32_bit_and_signed_tiff_use_their_own_range(tmp_path: Path) -> None:
    large = np.array([[0, 2**31, 2**32 - 1]], np.uint32)
    np.testing.assert_allclose(read(tmp_path, tiff(large, 32))[0], [[0, 0.5, 1]], atol=1e-6)
    signed = np.array([[-100, 0, 300]], np.int16)
    np.testing.assert_allclose(read(tmp_path, tiff(signed, 16, sample_format=2))[0], [[0, 0.25, 1]], atol=1e-6)


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    data = encoded(Image.fromarray(GREY8), "PNG")
    for name in ("film.jpg", "film.dcm", "film", "film.txt"):
        assert read(tmp_path, data, name)[1].kind == "png"


# --- refusals: one message that names the file ----------------------------------------------------------------------


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(ImageError) as caught:
        read_film(path, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and message.endswith(".")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


def test_missing_folder_empty_and_pipe(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.png")
    assert "is a folder" in refusal(tmp_path)
    assert "is empty (0 bytes)" in refusal(write(tmp_path, b""))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.png")
        assert "not a regular file" in refusal(tmp_path / "pipe.png")


def test_not_an_image(tmp_path: Path) -> None:
    for data in (b"image,label\n1.png,0\n", b"\0" * 500, b"%PDF-1.4 " + bytes(200), os.urandom(3) + bytes(1000)):
        assert "is not an image that can be read" in refusal(write(tmp_path, data))


def test_other_image_formats_are_not_tried(tmp_path: Path) -> None:
    assert "is not an image that can be read" in refusal(write(tmp_path, encoded(Image.fromarray(GREY8), "WEBP")))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "BMP"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_truncated(tmp_path: Path, kind: str, share: float) -> None:
    data = encoded(Image.fromarray(RNG.integers(0, 256, (64, 64), dtype=np.uint8)), kind)
    message = refusal(write(tmp_path, data[: int(len(data) * share)]))
    assert "truncated" in message or "damaged" in message


def test_no_pixels(tmp_path: Path) -> None:
    for width, height in ((0, 10), (10, 0), (0, 0)):
        refusal(write(tmp_path, png(width, height, zlib.compress(b"\0" * 20))))


def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = write(tmp_path, png(60_000, 60_000, zlib.compress(b"\0" * 1000)))
    start = time.perf_counter()
    assert "pixels" in refusal(path)
    path = write(tmp_path, png(12_000, 11_000, zlib.compress(b"\0" * 1000)))
    assert "12000 x 11000 pixels, more than max_pixels = 120,000,000" in refusal(path)
    assert time.perf_counter() - start < 1.0


def test_the_pixel_limit_is_a_setting(tmp_path: Path) -> None:
    path = write(tmp_path, encoded(Image.fromarray(GREY8), "PNG"))
    assert "more than max_pixels = 599" in refusal(path, max_pixels=599)
    read_film(path, max_pixels=600)


def test_a_file_too_large_for_any_film_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as stream:
        stream.truncate(80 << 20)  # sparse
    assert "too large for a film" in refusal(path, max_pixels=1000)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity(tmp_path: Path, bad: float) -> None:
    values = np.full((4, 4), 0.5, np.float32)
    values[1, 2] = bad
    assert "NaN or infinite" in refusal(write(tmp_path, encoded(Image.fromarray(values), "TIFF")))


@pytest.mark.parametrize("value", [0, 77, 255])
def test_a_constant_film_is_read_and_flagged(tmp_path: Path, value: int) -> None:
    film, info = read(tmp_path, encoded(Image.fromarray(np.full((9, 9), value, np.uint8)), "PNG"))
    assert info.constant and (film == np.float32(value / 255)).all()
    film, info = read(tmp_path, encoded(Image.fromarray(np.full((9, 9), value * 10.0, np.float32)), "TIFF"))
    assert info.constant and np.isfinite(film).all()


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "PNG"])
def test_several_images_in_a_file(tmp_path: Path, kind: str) -> None:
    second = Image.fromarray(255 - GREY8)
    data = encoded(Image.fromarray(GREY8), kind, save_all=True, append_images=[second])
    assert "holds 2 images" in refusal(write(tmp_path, data))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = write(tmp_path, encoded(Image.fromarray(GREY8), "PNG"))
    path.chmod(0)
    assert "cannot be read: Permission denied" in refusal(path)


def test_a_text_bomb_in_a_png_is_not_inflated(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(100 << 20), 1)
    plain = encoded(Image.fromarray(GREY8), "PNG")
    path = write(tmp_path, plain[:33] + png_chunk(b"zTXt", b"Comment\0\0" + bomb) + plain[33:])
    tracemalloc.start()
    refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


# --- nothing else is ever raised -------------------------------------------------------------------------------------


def mutations(data: bytes, count: int, seed: int) -> list[bytes]:
    """Flipped bytes, cut ends, removed, doubled and zeroed stretches."""
    rng = np.random.default_rng(seed)
    results = []
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(int(rng.integers(1, 6))):
            at, length = int(rng.integers(len(changed) or 1)), int(rng.integers(1, 12))
            match int(rng.integers(5)):
                case 0:
                    changed[at : at + 1] = bytes([int(rng.integers(256))])
                case 1:
                    del changed[at:]
                case 2:
                    del changed[at : at + length]
                case 3:
                    changed[at:at] = changed[at : at + length]
                case _:
                    changed[at : at + length] = rng.choice([b"\0", b"\xff"]) * length
        results.append(bytes(changed))
    return results


SEEDS = {
    "png8": encoded(Image.fromarray(GREY8), "PNG"),
    "png16": encoded(Image.fromarray(GREY16), "PNG"),
    "palette": encoded(Image.fromarray(GREY8).convert("P"), "PNG"),
    "jpeg": encoded(Image.fromarray(GREY8), "JPEG"),
    "jpeg-rgb": encoded(Image.fromarray(np.stack([GREY8] * 3, -1)), "JPEG", progressive=True),
    "tiff": encoded(Image.fromarray(GREY8), "TIFF"),
    "tiff16": tiff(GREY16, 16, photometric=0),
    "tiff-lzw": encoded(Image.fromarray(GREY16), "TIFF", compression="tiff_lzw"),
    "tiff-float": encoded(Image.fromarray(GREY8.astype(np.float32)), "TIFF"),
    "gif": encoded(Image.fromarray(GREY8), "GIF"),
    "bmp": encoded(Image.fromarray(GREY8), "BMP"),
}


@pytest.mark.parametrize("name", SEEDS)
def test_damaged_bytes_are_read_or_refused(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "film"
    refused = 0
    with warnings.catch_warnings(record=True) as heard, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        for data in mutations(SEEDS[name], 150, seed=11):
            path.write_bytes(data)
            try:
                film, _ = read_film(path, max_pixels=1_000_000)
                assert film.min() >= 0.0 and film.max() <= 1.0
            except ImageError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 20  # the damage is real
    assert not heard and not caplog.records
    if name != "tiff-lzw":  # libtiff writes a line of its own from C, without a word of the file's tags
        assert capfd.readouterr().err == ""


# --- masks -----------------------------------------------------------------------------------------------------------


def test_masks_are_non_zero(tmp_path: Path) -> None:
    inside = GREY8 > 100
    for image in (
        Image.fromarray(inside),
        Image.fromarray(inside.astype(np.uint8)),
        Image.fromarray(inside.astype(np.uint8) * 255),
        Image.fromarray(np.stack([inside.astype(np.uint8) * 255] * 3, -1)),
        Image.fromarray(inside.astype(np.uint16)),
    ):
        mask = read_mask(write(tmp_path, encoded(image, "PNG")))
        assert mask.dtype == np.bool_
        np.testing.assert_array_equal(mask, inside)


def test_raw_masks_keep_flags_and_palette_indices(tmp_path: Path) -> None:
    flags = GREY8 % 8
    np.testing.assert_array_equal(read_mask_raw(write(tmp_path, encoded(Image.fromarray(flags), "PNG"))), flags)
    image = Image.frombytes("P", (30, 20), flags.tobytes())
    image.putpalette([200] * 768)
    np.testing.assert_array_equal(read_mask_raw(write(tmp_path, encoded(image, "PNG"))), flags)


def test_a_jpeg_mask_has_its_edge_at_half(tmp_path: Path) -> None:
    inside = np.zeros((64, 64), np.bool_)
    inside[11:50, 13:47] = True
    path = write(tmp_path, encoded(Image.fromarray(inside.astype(np.uint8) * 255), "JPEG", quality=60))
    assert (read_mask(path) != inside).sum() <= 4
    assert set(np.unique(read_mask_raw(path))) <= {0, 255}


def test_masks_that_are_not_clear_are_refused(tmp_path: Path) -> None:
    photo = RNG.integers(0, 256, (20, 30, 3), dtype=np.uint8)
    with pytest.raises(ImageError, match="coloured"):
        read_mask(write(tmp_path, encoded(Image.fromarray(photo), "PNG")))
    with pytest.raises(ImageError, match=r"outside 0\.\.255"):
        read_mask(write(tmp_path, encoded(Image.fromarray(GREY16), "PNG")))
    with pytest.raises(ImageError, match="does not exist"):
        read_mask(tmp_path / "none.png")
    with pytest.raises(ImageError, match="DICOM"):
        read_mask(write(tmp_path, bytes(128) + b"DICM" + bytes(100)))


# --- searching a folder, staying quiet -------------------------------------------------------------------------------


def test_which_files_a_search_takes(tmp_path: Path) -> None:
    data = encoded(Image.fromarray(GREY8), "PNG")
    dicom = bytes(128) + b"DICM" + bytes(100)
    for name, content, taken in (
        ("a.png", data, True),
        ("a.JPG", data, True),
        ("a.dcm", dicom, True),
        ("1.2.840.10008.17", dicom, True),
        ("IM0001", dicom, True),
        ("noname", data, True),
        ("README", b"read me", False),
        ("a.csv", b"1", False),
        ("a.png.json", data, False),
        ("._a.png", data, False),
        ("empty", b"", False),
    ):
        assert is_image_file(write(tmp_path, content, name)) is taken, name
    (tmp_path / "folder.png").mkdir()
    assert not is_image_file(tmp_path / "folder.png")
    assert not is_image_file(tmp_path / "none.png")


def test_quiet_in_one_thread_leaves_warnings_as_they_were() -> None:
    """Readers in many threads come and go; afterwards warnings and log lines flow as before."""
    before = list(warnings.filters)
    inside = threading.Barrier(4)

    def reader() -> None:
        for _ in range(50):
            with quiet_readers():
                pass
        inside.wait()
        with quiet_readers():
            inside.wait()

    threads = [threading.Thread(target=reader) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before
    logger = logging.getLogger("pydicom")
    record = logger.makeRecord("pydicom", logging.WARNING, "", 0, "said", (), None)
    assert logger.filter(record)
    with quiet_readers():
        assert not logger.filter(record)


# --- real films ------------------------------------------------------------------------------------------------------


@pytest.mark.realdata
def test_real_folders_can_be_read(real_data: Path) -> None:
    for folder in ("nih/images", "shenzhen/images"):
        paths = sorted((real_data / folder).iterdir())[:20]
        assert paths and all(is_image_file(path) for path in paths)
        for path in paths:
            film, info = read_film(path)
            assert not info.constant and not info.colour
            assert 0.05 < fit_square(film, 64).mean() < 0.95

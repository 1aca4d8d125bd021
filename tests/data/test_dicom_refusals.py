"""What is not a film, or is damaged, is refused in a message before it costs anything."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.data import get_testdata_file
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEGBaseline8Bit,
    RLELossless,
)

from afire.data.decode import read_film
from afire.errors import ImageError
from tests.data.dicom_films import GREY8, GREY12, RNG, in_syntax, make, read, refusal, to_bytes, write


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

"""DICOM films in every transfer syntax, and files whose name says something else."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
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
    JPEGLosslessSV1,
    RLELossless,
)

from afire.data.decode import read_film
from afire.data.film import hash_patient
from tests.data.dicom_films import GREY8, GREY12, RNG, in_syntax, lut, make, read, refusal, to_bytes, write


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


@pytest.mark.skipif(get_decoder(JPEGLosslessSV1).is_available, reason="a decoder of lossless JPEG is installed")
def test_a_missing_decoder_is_named_with_its_cure(tmp_path: Path) -> None:
    dataset = in_syntax(GREY12, 12, RLELossless)
    dataset.file_meta.TransferSyntaxUID = JPEGLosslessSV1
    message = refusal(write(tmp_path, dataset))
    assert "JPEG Lossless" in message and 'pip install "afire[dicom]"' in message


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

"""Whatever a DICOM file holds, nothing but ImageError is raised and nobody is named."""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEGBaseline8Bit,
    RLELossless,
)

from afire.data.decode import read_film
from afire.data.film import hash_patient
from afire.errors import ImageError
from tests.data.dicom_films import GREY8, GREY12, PERSON, in_syntax, lut, make, read, to_bytes, write


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

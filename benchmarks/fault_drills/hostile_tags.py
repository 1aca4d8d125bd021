"""DICOM films with false tags: sizes, depths, grey-scales, frames, texts, sequences, syntaxes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from pydicom.dataelem import RawDataElement
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence
from pydicom.tag import Tag
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRBigEndian, JPEGBaseline8Bit, RLELossless

from fault_drills.bombs import deflated_zeros
from fault_drills.films import SECRET, Grey, dataset, dicom_bytes

Change = Callable[[Dataset], None]
_LONG = 1 << 20


def _set(**tags: Any) -> Change:
    """Change or, with ``None``, remove tags."""

    def change(found: Dataset) -> None:
        for name, value in tags.items():
            if value is None:
                delattr(found, name)
            elif isinstance(value, bytes) and name != "PixelData":  # what no library would write
                known = found.get_item(name) if name in found else None
                tag = Tag(name)
                vr = known.VR if known is not None else {"RescaleSlope": "DS", "RescaleIntercept": "DS"}.get(name, "LO")
                found[tag] = RawDataElement(tag, vr, len(value), value, 0, False, True)
            else:
                setattr(found, name, value)

    return change


def _table(keyword: str, descriptor: list[int], entries: int) -> Change:
    def change(found: Dataset) -> None:
        item = Dataset()
        item.add_new(0x00283002, "US", descriptor)
        item.add_new(0x00283006, "OW", bytes(2 * entries))
        setattr(found, keyword, Sequence([item]))

    return change


def _nested(depth: int) -> Change:
    def change(found: Dataset) -> None:
        inner = Dataset()
        for _ in range(depth):
            outer = Dataset()
            outer.ReferencedStudySequence = Sequence([inner])
            inner = outer
        found.ViewCodeSequence = Sequence([inner])

    return change


def _many_items(found: Dataset) -> None:
    found.ViewCodeSequence = Sequence([Dataset() for _ in range(20_000)])


TAGS: dict[str, Change] = {
    "rows and columns 65535": _set(Rows=65535, Columns=65535),
    "rows and columns 10000, pixels of a small film": _set(Rows=10_000, Columns=10_000),
    "rows 0": _set(Rows=0),
    "columns missing": _set(Columns=None),
    "one row more than there is": _set(Rows=161),
    "window width 0": _set(WindowWidth=0),
    "window width negative": _set(WindowWidth=-400),
    "window width NaN": _set(WindowWidth=b"nan "),
    "window width 1e308": _set(WindowWidth=b"1e308 "),
    "window centre 1e308": _set(WindowCenter=b"1e308 "),
    "window centre text": _set(WindowCenter=b"<script>alert(1)</script> "),
    "sigmoid of width 1e-300": _set(WindowWidth=b"1e-300", VOILUTFunction="SIGMOID"),
    "window function unknown": _set(VOILUTFunction="[bold red]"),
    "slope 1e300": _set(RescaleSlope=b"1e300 ", RescaleIntercept=b"0 "),
    "slope 1e308, intercept -1e308": _set(RescaleSlope=b"1e308 ", RescaleIntercept=b"-1e308"),
    "slope NaN": _set(RescaleSlope=b"nan ", RescaleIntercept=b"0 "),
    "slope infinite": _set(RescaleSlope=b"inf ", RescaleIntercept=b"0 "),
    "slope 0": _set(RescaleSlope=0, RescaleIntercept=0),
    "slope text": _set(RescaleSlope=b"../../../etc/passwd ", RescaleIntercept=b"0 "),
    "frames 10**9": _set(NumberOfFrames=10**9),
    "frames -1": _set(NumberOfFrames=-1),
    "frames text": _set(NumberOfFrames=b"many"),
    "bits stored 32 of 16": _set(BitsStored=32, HighBit=31),
    "bits stored 65535": _set(BitsStored=65535),
    "bits stored 0": _set(BitsStored=0),
    "bits allocated 7": _set(BitsAllocated=7),
    "bits allocated 64": _set(BitsAllocated=64, BitsStored=64, HighBit=63),
    "high bit 99": _set(HighBit=99),
    "pixel representation 7": _set(PixelRepresentation=7),
    "samples 0": _set(SamplesPerPixel=0),
    "samples 255": _set(SamplesPerPixel=255),
    "colour without planes": _set(SamplesPerPixel=3, PhotometricInterpretation="RGB"),
    "palette without tables": _set(PhotometricInterpretation="PALETTE COLOR"),
    "photometric markup": _set(PhotometricInterpretation=b"<img src=x onerror=1> "),
    "modality CT": _set(Modality="CT"),
    "modality markup": _set(Modality=b"[red]<b>&amp; "),
    "patient is a path": _set(PatientID="../../../../etc/passwd/" + SECRET),
    "patient is a formula": _set(PatientID=f"=cmd|'/C calc'!A0{SECRET}"),
    "study is a page": _set(StudyDescription=b"<script>alert('" + SECRET.encode() + b"')</script>"),
    "study is escape codes": _set(StudyDescription=b"\x1b[2J\x1b[31m" + SECRET.encode()),
    "patient of a megabyte": _set(PatientID=(SECRET.encode() * (_LONG // len(SECRET)))[:65_534]),
    "text of a megabyte": lambda found: found.add_new(0x00321030 + 0x10, "UT", SECRET * (_LONG // len(SECRET))),
    "bytes that are no text": _set(PatientName=b"\xff\xfe\x00\x80" * 8, StudyDescription=b"\xc3\x28\xa0\xa1"),
    "character set unknown": _set(SpecificCharacterSet="NO SUCH SET"),
    "uid is a path": _set(SOPInstanceUID=b"../../../../tmp/x ", StudyInstanceUID=b"/etc/passwd "),
    "sequences 20 deep": _nested(20),
    "sequence of 20,000 items": _many_items,
    "pixels missing": _set(PixelData=None),
    "pixels empty": _set(PixelData=b""),
    "pixels of an odd length": lambda found: setattr(found, "PixelData", found.PixelData[:-3]),
    "padding is everything": _set(PixelPaddingValue=0, PixelPaddingRangeLimit=65535),
    "VOI table shorter than it says": _table("VOILUTSequence", [4096, 0, 16], 10),
    "VOI table of 255 bits": _table("VOILUTSequence", [16, 0, 255], 16),
    "modality table of nothing": _table("ModalityLUTSequence", [0, 65535, 0], 0),
    "view of a thousand codes": _set(ViewPosition=["PA"] * 1000),
}
"""What is changed in a film of native pixels."""


def _deep(depth: int, closed: bool) -> Callable[[Grey], bytes]:
    """View codes within view codes, of undefined length: deeper than pydicom can write."""
    opened = b"\x54\x00\x20\x02SQ\0\0\xff\xff\xff\xff" + b"\xfe\xff\x00\xe0\xff\xff\xff\xff"
    ended = b"\xfe\xff\x0d\xe0\0\0\0\0" + b"\xfe\xff\xdd\xe0\0\0\0\0"

    def write(film: Grey) -> bytes:
        plain = dicom_bytes(dataset(film))
        at = plain.index(b"\xe0\x7f\x10\x00O")
        return plain[:at] + opened * depth + ended * (depth if closed else 0) + plain[at:]

    return write


def _long_pixels(film: Grey) -> bytes:
    """A pixel element that says it has four gigabytes."""
    plain = dicom_bytes(dataset(film))
    at = plain.index(b"\xe0\x7f\x10\x00OW\0\0") + 8
    return plain[:at] + b"\xf0\xff\xff\xff" + plain[at + 4 :]


def _deflated_bomb(film: Grey) -> bytes:
    """A deflated data set that inflates to two gigabytes."""
    return _declared(DeflatedExplicitVRLittleEndian, deflated_zeros(2048))


def _declared(uid: str, body: bytes) -> bytes:
    """A file that says that ``body`` is in the transfer syntax ``uid``."""
    name = uid.encode() + bytes(len(uid) % 2)
    syntax = b"\x02\x00\x10\x00UI" + struct.pack("<H", len(name)) + name
    length = b"\x02\x00\x00\x00UL\x04\x00" + struct.pack("<I", len(syntax))
    return bytes(128) + b"DICM" + length + syntax + body


def _body(film: Grey) -> bytes:
    """A data set in explicit little endian, without preamble and file meta group."""
    plain = dicom_bytes(dataset(film))
    return plain[144 + int.from_bytes(plain[140:144], "little") :]


RAW: dict[str, Callable[[Grey], bytes]] = {
    "sequences 300 deep": _deep(300, closed=True),
    "sequences 20,000 deep": _deep(20_000, closed=True),
    "sequences 5,000 deep, never closed": _deep(5000, closed=False),
    "pixels of four gigabytes, it says": _long_pixels,
    "deflated bomb of two gigabytes": _deflated_bomb,
    "syntax unknown": lambda film: _declared("1.2.3.4.5.6", _body(film)),
    "syntax JPEG, pixels native": lambda film: _declared(JPEGBaseline8Bit, _body(film)),
    "syntax RLE, pixels native": lambda film: _declared(RLELossless, _body(film)),
    "syntax big endian, tags little": lambda film: _declared(ExplicitVRBigEndian, _body(film)),
    "no file meta": _body,
    "preamble only": lambda film: bytes(128) + b"DICM",
}
"""What no library would write."""


def hostile(number: int, film: Grey, rng: np.random.Generator) -> tuple[str, bytes]:
    """The name of what is hostile, and the file; ``number`` goes round all of them, in 8, 12 or 16 bits."""
    names = [*TAGS, *RAW]
    name = names[number % len(names)]
    if name in RAW:
        return name, RAW[name](film)
    found = dataset(film, bits=int(rng.choice([8, 12, 16])), monochrome=int(rng.integers(1, 3)))
    TAGS[name](found)
    return name, dicom_bytes(found)

"""Templates: objects of one kind differ in a few values only, so their bytes are made once and filled in for each film.

The libraries make the first object, from placeholders. It is cut at the placeholders, and a film's object is the pieces
with its own values between them: the bytes that the libraries would write, in a small fraction of the time.

Sequences are written without their lengths, so that a value may be longer or shorter than its placeholder.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from struct import pack

from pydicom.charset import convert_encodings
from pydicom.dataelem import DataElement
from pydicom.dataset import Dataset, validate_file_meta
from pydicom.filebase import DicomBytesIO
from pydicom.filewriter import write_data_element
from pydicom.tag import Tag

Elements = dict[int, bytes]
"""Of a data set, encoded, by tag."""

_LONG = (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"UC", b"UN", b"UR", b"UT")  # VRs with four bytes of length
_ZERO_PADDED = (b"UI", b"OB")
_PREAMBLE = bytes(128) + b"DICM"
_GROUP_LENGTH = 0x00020000


def encode(made: Dataset) -> Elements:
    """Every element of a data set, little endian with explicit VR."""
    encodings = convert_encodings(made.get("SpecificCharacterSet") or "ISO_IR 6")
    stream = DicomBytesIO()
    stream.is_little_endian, stream.is_implicit_VR = True, False
    ends = {}
    for element in made:
        if element.VR == "SQ":
            _leave_lengths_open(element)
        write_data_element(stream, element, encodings)
        ends[int(element.tag)] = stream.tell()
    data, starts = stream.getvalue(), [0, *ends.values()]
    return {tag: data[start:end] for (tag, end), start in zip(ends.items(), starts, strict=False)}


def _leave_lengths_open(sequence: DataElement) -> None:
    sequence.is_undefined_length = True
    for item in sequence.value:
        item.is_undefined_length_sequence_item = True
        for one in item:
            if one.VR == "SQ":
                _leave_lengths_open(one)


def ascii_text(words: str) -> bytes:
    """What every character set can write."""
    return words.encode("ascii", "replace")


def elements(**values: tuple[str, bytes]) -> Elements:
    """From VR and value by keyword."""
    made = {}
    for keyword, (vr, value) in values.items():
        tag, written = _tag(keyword)
        made[tag] = written + _with_length(vr.encode(), value)
    return made


@lru_cache(maxsize=256)
def _tag(keyword: str) -> tuple[int, bytes]:
    """A tag as a number and as it is written."""
    tag = Tag(keyword)
    return int(tag), pack("<HH", tag.group, tag.element)


def encapsulated(frame: bytes) -> bytes:
    """The element of pixels that are one compressed frame."""
    item = pack("<HHI", 0xFFFE, 0xE000, len(frame) + len(frame) % 2) + frame + bytes(len(frame) % 2)
    no_table, end = pack("<HHI", 0xFFFE, 0xE000, 0), pack("<HHI", 0xFFFE, 0xE0DD, 0)
    return pack("<HH2sHI", 0x7FE0, 0x0010, b"OB", 0, 0xFFFFFFFF) + no_table + item + end


def file_head(meta: Elements) -> bytes:
    """What a DICOM file begins with: the preamble and the file's own group, of which ``meta`` are the elements."""
    group = b"".join(meta[tag] for tag in sorted(meta))
    return _PREAMBLE + pack("<HH2sHI", 2, 0, b"UL", 4, len(group)) + group


def _with_length(kind: bytes, value: bytes) -> bytes:
    """VR, length and value, which is padded to an even length."""
    if len(value) % 2:
        value += b"\0" if kind in _ZERO_PADDED else b" "
    return kind + (pack("<HI", 0, len(value)) if kind in _LONG else pack("<H", len(value))) + value


class Mould:
    """A kind of object. ``placeholders`` are the values in ``made``, by name, that each film has its own of."""

    def __init__(self, made: Dataset, placeholders: Mapping[str, bytes]) -> None:
        self._plain: Elements = {}
        self._open: dict[int, tuple[list[bytes], list[tuple[bytes, str]]]] = {}
        found = set()
        for tag, data in encode(made).items():
            pieces, holes = _cut(data, placeholders)
            if holes:
                self._open[tag] = pieces, holes
                found |= {name for _, name in holes}
            else:
                self._plain[tag] = data
        assert found == set(placeholders), f"there is no {set(placeholders) - found} in it"
        validate_file_meta(made.file_meta)  # which adds what is missing
        self._meta = encode(made.file_meta)

    def fill(self, values: Mapping[str, bytes], own: Elements) -> bytes:
        """A DICOM file: ``values`` take the places of the placeholders, ``own`` those of whole elements."""
        whole = {**self._plain}
        for tag, (pieces, holes) in self._open.items():
            parts = [pieces[0]]
            for piece, (kind, name) in zip(pieces[1:], holes, strict=True):
                parts += [_with_length(kind, values[name]), piece]
            whole[tag] = b"".join(parts)
        whole |= own
        instance = whole[_tag("SOPInstanceUID")[0]][8:]
        return b"".join([self._head(instance), *(whole[tag] for tag in sorted(whole))])

    def _head(self, instance: bytes) -> bytes:
        """The preamble and the file's own group, whose length depends on that of the id."""
        meta = {**self._meta, **elements(MediaStorageSOPInstanceUID=("UI", instance))}
        meta.pop(_GROUP_LENGTH, None)
        return file_head(meta)


def _cut(data: bytes, placeholders: Mapping[str, bytes]) -> tuple[list[bytes], list[tuple[bytes, str]]]:
    """What lies before, between and behind the placeholders in an element, and their VRs and names."""
    places = []
    for name, placeholder in placeholders.items():
        padded = [value for value in (placeholder, placeholder + b" ", placeholder + b"\0") if len(value) % 2 == 0]
        for value in padded:
            at = data.find(value)
            while at >= 0:
                places.append((*_header(data, at, len(value)), at + len(value), name))
                at = data.find(value, at + len(value))
    pieces, holes, end = [], [], 0
    for start, kind, behind, name in sorted(places):
        pieces.append(data[end:start])
        holes.append((kind, name))
        end = behind
    return [*pieces, data[end:]], holes


def _header(data: bytes, at: int, length: int) -> tuple[int, bytes]:
    """Where VR and length of the value at ``at`` begin, and the VR."""
    for start, size in ((at - 4, pack("<H", length)), (at - 8, pack("<HI", 0, length))):
        kind = data[start : start + 2]
        if start >= 0 and data[start + 2 : at] == size and (kind in _LONG) == (at - start == 8):
            return start, kind
    raise AssertionError("a placeholder is a part of another value")

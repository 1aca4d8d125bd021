"""A JPEG file reduced to its picture: what a report may show of a film without encoding it again."""

from __future__ import annotations

import re

_START, _END, _SCAN, _MAY_TURN = 0xD8, 0xD9, 0xDA, 0xE1
_FRAMES = (0xC0, 0xC2)  # baseline and progressive, which every browser shows
_NEEDED = (*_FRAMES, 0xC4, 0xDB, 0xDD, _SCAN)  # with tables and the interval of restarts
_LEFT_OUT = (*range(0xE0, 0xF0), 0xFE)  # what programs write beside the picture, and comments
_JFIF = b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # within a scan, 0xFF is followed by a zero or a restart
_EIGHT_BITS_ONE_CHANNEL = (8, 1)


def picture_alone(data: bytes) -> bytes | None:
    """The same picture, bit by bit, without names, dates, thumbnails and whatever follows it in the file.

    None for what is not a grey JPEG of 8 bits, and where the file may ask for the picture to be turned.
    """
    if not data.startswith(bytes((0xFF, _START))):
        return None
    kept, at = [data[:2], _JFIF], 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == _MAY_TURN or marker not in (*_NEEDED, *_LEFT_OUT) or end > len(data):
            return None
        if marker in _FRAMES and (data[at + 4], data[at + 9]) != _EIGHT_BITS_ONE_CHANNEL:
            return None
        if marker == _SCAN:
            after = _AFTER_SCAN.search(data, end)
            if after is None:
                return None
            end = after.start()
        if marker in _NEEDED:
            kept.append(data[at:end])
        if marker == _SCAN and data[end + 1] == _END:
            return b"".join([*kept, data[end : end + 2]])
        at = end
    return None

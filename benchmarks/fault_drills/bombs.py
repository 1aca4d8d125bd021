"""Decompression bombs: PNG, TIFF, GIF and BMP files with huge declared or inflated sizes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from fault_drills.films import Grey, raster

_HUGE = 30_000
_LARGEST = 10_900  # squared: just below the limit of 120 million pixels, so it must be read
_IHDR_END = 33  # signature and first chunk


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, idat: bytes, depth: int = 8, colour: int = 0) -> bytes:
    header = struct.pack(">IIBBBBB", width & 0xFFFFFFFF, height & 0xFFFFFFFF, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", idat) + chunk(b"IEND", b"")


def deflated_zeros(megabytes: int) -> bytes:
    """So many megabytes of nothing, deflated a thousandfold: one flushed block over and over."""
    deflater = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = deflater.compress(bytes(1 << 20)) + deflater.flush(zlib.Z_FULL_FLUSH)
    return block * megabytes + b"\x03\x00"


def zeros(megabytes: int) -> bytes:
    """The same as zlib has it, with its checksum, so that nothing but the size is wrong."""
    return b"\x78\xda" + deflated_zeros(megabytes) + struct.pack(">HH", (megabytes << 20) % 65521, 1)


def _with_chunk(film: Grey, kind: bytes, body: bytes) -> bytes:
    plain = raster(film, "PNG")
    return plain[:_IHDR_END] + chunk(kind, body) + plain[_IHDR_END:]


def _tiff(width: int, height: int, body: bytes, next_at: int = 0) -> bytes:
    """One deflated strip; ``next_at`` is where the next image is said to be."""
    tags = [
        (256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 8), (262, 3, 1), (273, 4, 8),
        (277, 3, 1), (278, 4, height), (279, 4, len(body)),
    ]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", next_at)
    padding = bytes(len(body) % 2)
    return b"II*\0" + struct.pack("<I", 8 + len(body) + len(padding)) + body + padding + directory


def _tiff_loop(film: Grey) -> bytes:
    body = zlib.compress(bytes(64 * 64))
    at = 8 + len(body) + len(body) % 2
    return _tiff(64, 64, body, next_at=at)


def _gif(width: int, height: int) -> bytes:
    return (
        b"GIF89a"
        + struct.pack("<HHBBB", width, height, 0x80, 0, 0)
        + bytes(6)
        + (b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00;")
    )


BOMBS: dict[str, Callable[[Grey], bytes]] = {
    "PNG of 30,000 x 30,000": lambda film: png(_HUGE, _HUGE, zeros(900)),
    "PNG of 30,000 x 30,000 in colour": lambda film: png(_HUGE, _HUGE, zeros(900), colour=2),
    "PNG of 1 x 2,000,000,000": lambda film: png(1, 2_000_000_000, zeros(900)),
    "PNG of 10,900 x 10,900, allowed": lambda film: png(_LARGEST, _LARGEST, zeros(115)),
    "small PNG, pixels of a gigabyte": lambda film: png(160, 160, zeros(1024)),
    "zTXt of a gigabyte": lambda film: _with_chunk(film, b"zTXt", b"Comment\0\0" + zeros(1024)),
    "iTXt of a gigabyte": lambda film: _with_chunk(film, b"iTXt", b"Comment\0\1\0\0\0" + zeros(1024)),
    "colour profile of a gigabyte": lambda film: _with_chunk(film, b"iCCP", b"icc\0\0" + zeros(1024)),
    "TIFF of 30,000 x 30,000": lambda film: _tiff(_HUGE, _HUGE, zeros(900)),
    "TIFF whose images go in a circle": _tiff_loop,
    "GIF of 65,535 x 65,535": lambda film: _gif(65_535, 65_535),
    "archive named PNG": lambda film: b"PK\x03\x04" + zeros(64),
}

ABSURD: dict[str, Callable[[Grey], bytes]] = {
    "0 x 0": lambda film: png(0, 0, zlib.compress(b"")),
    "2**31 x 2**31": lambda film: png(1 << 31, 1 << 31, zlib.compress(b"")),
    "2**32-1 x 1": lambda film: png(0xFFFFFFFF, 1, zlib.compress(b"")),
    "10,000 x 10,000, few pixels": lambda film: png(10_000, 10_000, zlib.compress(bytes(1000))),
    "depth 77": lambda film: png(160, 160, zlib.compress(bytes(161 * 160)), depth=77),
    "colour type 5": lambda film: png(160, 160, zlib.compress(bytes(161 * 160)), colour=5),
    "palette without a palette": lambda film: png(160, 160, zlib.compress(bytes(161 * 160)), colour=3),
    "no IDAT": lambda film: b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 8, 0, 0, 0, 0)),
    "a chunk of 4 GB, it says": lambda film: raster(film, "PNG")[:_IHDR_END] + b"\xff\xff\xff\xf0IDAT",
    "BMP of 2**31 x 2**31": lambda film: raster(film, "BMP")[:18] + b"\xff\xff\xff\x7f" * 2 + raster(film, "BMP")[26:],
}
"""Headers that no film has."""

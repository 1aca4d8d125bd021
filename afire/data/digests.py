"""Digests that stand for a film: of its source file's bytes, and of its pixels in a pack.

Whoever kept them can tell later whether a film is still what it was. Bytes are compared, not sizes and times: a time of
change says when a film was taken, which is nobody's business, and copying changes it. Reading a file takes a small part
of the time that decoding it does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from afire.data.manifest import Manifest, inside_root
from afire.errors import UserError
from afire.files import sha256_bytes
from afire.progress import track

_READERS = 8


def file_digest(data: bytes) -> str:
    """What stands for the bytes of a film's file in packs and in the records of runs."""
    return sha256_bytes(data)[:24]


def pixel_digest(pixels: bytes | memoryview) -> str:
    """What stands for a film's pixels as they are stored in a pack."""
    return hashlib.blake2b(pixels, digest_size=12).hexdigest()


def source_digests(manifest: Manifest, rows: Sequence[int], what: str) -> list[str]:
    """Of the files of ``rows``, empty where there is none; ``what`` is said on the screen meanwhile."""
    return files_digests(manifest.root, manifest.table["image"].iloc[list(rows)].tolist(), what)


def files_digests(root: Path, names: Sequence[str], what: str) -> list[str]:
    """Of the files ``names`` in ``root``, empty where there is none; ``what`` is said on the screen meanwhile."""
    with ThreadPoolExecutor(_READERS) as readers:  # reading waits for the disk
        digests = readers.map(lambda name: _source_digest(root, name), names)
        return list(track(digests, what, len(names), "films"))


def _source_digest(root: Path, name: str) -> str:
    try:
        path = inside_root(root, name)
        status = path.stat()
        return _digest_of_file(path, status.st_size, status.st_mtime_ns)
    except (OSError, UserError):  # no such file, or a link out of the root: whoever reads the film will say so
        return ""


@lru_cache(maxsize=1 << 20)
def _digest_of_file(path: Path, _size: int, _modified: int) -> str:
    """Once for each film in a process: several seeds and folds ask for the same."""
    return file_digest(path.read_bytes())

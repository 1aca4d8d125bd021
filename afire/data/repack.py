"""What an earlier start of a pack has left: the films in it that are still what was packed.

The journal of a pack says by row what was packed: a digest of the pixels and one of the file they came from, or why the
film was skipped. Both are compared with what is there now, because files change, and disks fail.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from afire.data.digests import pixel_digest, source_digests
from afire.data.manifest import Manifest

Noted = dict[str, str]
_NAMED = 3  # films in a message

logger = logging.getLogger("afire")


def still_packed(
    manifest: Manifest, arrays: Sequence[Path], shape: tuple[int, ...], dtype: np.dtype[Any], journal: Path
) -> dict[int, Noted]:
    """What the journal says by row, without films that must be packed again; those are named.

    The pixels are in the first of ``arrays`` that is there. One that is not of ``shape`` and ``dtype`` is damaged, and
    removed.
    """
    opened = (_open_array(path, shape, dtype) for path in arrays)
    images = next((images for images in opened if images is not None), None)
    if images is None:
        return {}
    noted = {row: entry for row, entry in _read_journal(journal).items() if 0 <= row < len(manifest)}
    again = _changed(manifest, images, noted)
    if again:
        names = manifest.table["image"].iloc[again[:_NAMED]].tolist()
        more = f" and {len(again) - _NAMED:,} more" if len(again) > _NAMED else ""
        logger.warning("not what was packed any more, and packed again: %s%s", ", ".join(names), more)
    return {row: entry for row, entry in noted.items() if row not in set(again)}


def _open_array(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray | None:
    try:
        images: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        if images.shape == shape and images.dtype == dtype:
            return images
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError):
        pass
    path.unlink()
    return None


def _read_journal(journal: Path) -> dict[int, Noted]:
    """Entries by row; later lines win, and a line truncated by a kill is left out."""
    entries: dict[int, Noted] = {}
    if not journal.exists():
        return entries
    for line in journal.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            entries[int(entry.pop("row"))] = entry
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return entries


def _changed(manifest: Manifest, images: np.ndarray, noted: Mapping[int, Noted]) -> list[int]:
    """Rows whose file has other bytes than those that were packed, or whose pixels are not those that were stored.

    A film whose file is gone stays as it is. Earlier versions did not note the file: theirs are packed again.
    """
    rows = sorted(row for row, entry in noted.items() if "digest" in entry)
    if not rows:
        return []
    sources = source_digests(manifest, rows, "comparing films")
    return [
        row
        for row, source in zip(rows, sources, strict=True)
        if (source and source != noted[row].get("file")) or pixel_digest(images[row].data) != noted[row]["digest"]
    ]

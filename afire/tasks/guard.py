"""Leaks between parts stop a task before it starts: one patient, or one and the same film, on two sides."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.data.manifest import Manifest
from afire.data.pack import DIGEST
from afire.errors import UserError
from afire.files import sha256_file

Parts = Mapping[str, NDArray[np.int64]]
_BLOCK = 1 << 16


def check_no_leaks(manifest: Manifest, parts: Parts, digests: pd.Series | None = None) -> None:
    """Refuse parts (name -> rows) that share a patient or an exact copy of a film.

    ``digests`` are those of :func:`film_digests`, for callers who check several splits of the same films.
    """
    owner = pd.Series("", index=range(len(manifest)), dtype="object")
    for part, rows in parts.items():
        owner.iloc[rows] = part
    used = owner != ""
    _refuse(
        manifest,
        owner[used],
        manifest.table["patient"][used],
        "{count:,} patients have films in more than one part (patient {key}: {first} in {part}, {second} in {other}); "
        "split by patient with `afire data split`.",
    )
    copies = (film_digests(manifest) if digests is None else digests)[used]
    _refuse(
        manifest,
        owner[used][copies != ""],
        copies[copies != ""],
        "{count:,} films have exact copies in another part ({first} in {part} is {second} in {other}); "
        "remove one of each, or give copies the same patient id and split again.",
    )


def _refuse(manifest: Manifest, owner: pd.Series, key: pd.Series, sentence: str) -> None:
    spread = owner.groupby(key).nunique()
    crossing = spread[spread > 1]
    if len(crossing) == 0:
        return
    example = crossing.index[0]
    rows = owner[key == example].drop_duplicates()
    images = manifest.table["image"]
    raise UserError(
        sentence.format(
            count=len(crossing),
            key=example,
            first=images[rows.index[0]],
            part=rows.iloc[0],
            second=images[rows.index[1]],
            other=rows.iloc[1],
        )
    )


def film_digests(manifest: Manifest) -> pd.Series:
    """A digest for each row, equal for exact copies: the pack's, else that of the file.

    A file is read whole only where another has its size, its beginning and its end; it is empty for all others, and
    where there is no file.
    """
    if DIGEST in manifest.table:
        return manifest.table[DIGEST].astype(str)
    keys = pd.Series([_size(manifest, row) for row in range(len(manifest))], dtype="object")
    doubtful = keys.duplicated(keep=False) & (keys != "")
    for read in (_ends, sha256_file):
        for row in np.flatnonzero(doubtful).tolist():
            keys.iloc[row] = f"{keys.iloc[row]} {read(manifest.path(row))}"
        doubtful &= keys.duplicated(keep=False)
    return keys.where(doubtful, "")


def _ends(path: Path) -> str:
    """Digest of the first and the last block of a file: films of one machine often have one size, seldom one end."""
    with path.open("rb") as stream:
        first = stream.read(_BLOCK)
        stream.seek(max(path.stat().st_size - _BLOCK, 0))
        return hashlib.blake2b(first + stream.read(_BLOCK), digest_size=16).hexdigest()


def _size(manifest: Manifest, row: int) -> str:
    try:
        return str(manifest.path(row).stat().st_size)
    except OSError:
        return ""  # the reader will say what is wrong with it


def group_copies(manifest: Manifest, digests: pd.Series) -> Manifest:
    """The same films with one patient id for all patients who share an exact copy, so that a split keeps them together.

    For drawing a split only: the ids of merged groups are those of their first patient.
    """
    table = manifest.table
    shared = digests[(digests != "") & digests.duplicated(keep=False)]
    leader: dict[str, str] = {}

    def find(patient: str) -> str:
        while leader.get(patient, patient) != patient:
            patient = leader[patient]
        return patient

    for _, patients in table["patient"][shared.index].groupby(shared):
        first, *others = sorted({find(patient) for patient in patients})
        for other in others:
            leader[other] = first
    if not leader:
        return manifest
    merged = table["patient"].map(lambda patient: find(str(patient)))
    return Manifest(table.assign(patient=merged), manifest.root, manifest.info)

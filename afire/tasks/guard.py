"""Films that are not new: leaks between the subsets of a task stop it; test films that pre-training saw are reported.

A leak is one patient, or one and the same film, in two subsets. Pre-training sees films without their labels but, as it
takes normal ones only, it sees one class: test films among them differ from the others by being familiar.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.data.keys import Seen, most_seen, seen_by_weights
from afire.data.manifest import Manifest
from afire.data.pack import DIGEST, Films
from afire.errors import UserError
from afire.files import sha256_file
from afire.weights import RandomWeights, Weights

Subsets = Mapping[str, NDArray[np.int64]]
_BLOCK = 1 << 16

logger = logging.getLogger("afire")


def check_no_leaks(manifest: Manifest, subsets: Subsets, digests: pd.Series | None = None) -> None:
    """Refuse subsets (name -> rows) that share a patient or an exact copy of a film.

    ``digests`` are those of :func:`film_digests`, for callers who check several splits of the same films.
    """
    owner = pd.Series("", index=range(len(manifest)), dtype="object")
    for subset, rows in subsets.items():
        owner.iloc[rows] = subset
    in_use = owner != ""
    _refuse(
        manifest,
        owner[in_use],
        manifest.table["patient"][in_use],
        "{count:,} patients have films in more than one subset (patient {key}: {first} in {subset}, {second} in "
        "{other}); split by patient with `afire data split`.",
    )
    copies = (film_digests(manifest) if digests is None else digests)[in_use]
    _refuse(
        manifest,
        owner[in_use][copies != ""],
        copies[copies != ""],
        "{count:,} films have exact copies in another subset ({first} in {subset} is {second} in {other}); "
        "remove one of each, or give copies the same patient id and split again.",
    )


def _refuse(manifest: Manifest, owner: pd.Series, key: pd.Series, message: str) -> None:
    spread = owner.groupby(key).nunique()
    crossing = spread[spread > 1]
    if len(crossing) == 0:
        return
    example = crossing.index[0]
    rows = owner[key == example].drop_duplicates()
    images = manifest.table["image"]
    raise UserError(
        message.format(
            count=len(crossing),
            key=example,
            first=images[rows.index[0]],
            subset=rows.iloc[0],
            second=images[rows.index[1]],
            other=rows.iloc[1],
        )
    )


def seen_in_pretraining(
    weights: Mapping[str, Weights], films: Films, test: Mapping[str, NDArray[np.int64]]
) -> tuple[Seen, list[str]]:
    """What the pre-training behind the weights of each run saw of its test rows, at worst, and notes for the result.

    ``weights`` and ``test`` are by the name of the run. Weights that keep no record of their films do not say it.
    """
    answers = {name: _seen_by(weights[name], films, rows) for name, rows in test.items()}
    notes = {name: _seen_note(seen, weights[name].name, films.manifest) for name, seen in answers.items()}
    if len(set(notes.values())) > 1:
        notes = {name: f"{name}: {note}" for name, note in notes.items() if note}
    distinct = [note for note in dict.fromkeys(notes.values()) if note]
    for note in distinct:
        logger.warning("%s", note)
    return most_seen(answers.values()), distinct


def _seen_by(weights: Weights, films: Films, rows: NDArray[np.int64]) -> Seen:
    return Seen(len(rows)) if isinstance(weights, RandomWeights) else seen_by_weights(weights.run, films, rows)


def _seen_note(seen: Seen, name: str, manifest: Manifest) -> str:
    if seen.answer == "none":
        return ""
    if seen.answer == "unknown":
        return (
            f"whether {seen.unknown:,} of the {seen.films:,} test films were among those of the pre-training is not "
            f"known: {name} keeps no record that can be compared with these"
        )
    normal = int((manifest.table["normal"].iloc[seen.rows] == 1).sum())
    kind = "all of them normal" if normal == seen.seen else f"{normal:,} of them normal"
    return (
        f"{seen.seen:,} of the {seen.films:,} test films, {kind}, were among the films of the pre-training: they are "
        "not new to these weights, so the result is too good; pre-train with a --split that sets the test films aside"
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
    for digest in (_ends, sha256_file):
        for row in np.flatnonzero(doubtful).tolist():
            keys.iloc[row] = f"{keys.iloc[row]} {digest(manifest.path(row))}"
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
        return ""  # the reader reports what is wrong with it


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

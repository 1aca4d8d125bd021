"""Films that occur more than once: exactly, or nearly (recompressed, resized, other grey-scale, mirrored, negative).

Across splits copies leak, within a split they count double; so do patients in two splits, which are checked here too.

Chest films look alike: a 64-bit perceptual hash alone calls hundreds of pairs of different children the same. Two films
are near-duplicates here when their 32 x 32 rank pictures correlate above 0.99 *and* their hashes differ in few bits;
follow-up films of one person begin at about 0.985 (docs/audit.md).

Cost: pairs are looked for in 32 principal components of the rank pictures. A projection never increases a distance, so
no pair is lost; what is close there is confirmed on the full rank pictures. The films are sorted along the first
component and compared in blocks that can hold a close pair: a matrix product, no loop over pairs.

N films, P = 1024 pixels of a rank picture, D components.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from afire.data.audit.measure import THUMB_SIDE, Finding, Level, films_in_words, single
from afire.data.manifest import LABEL_PREFIX, Manifest

Relation = Literal["copy", "mirrored", "negative"]
RELATIONS: tuple[Relation, ...] = ("copy", "mirrored", "negative")
MIN_CORRELATION = 0.99
MAX_HAMMING = 12
MAX_PAIRS = 200_000
"""A set with more close pairs than this is not a set of different films; the search then stops."""
_COMPONENTS = 32
_SAMPLE = 4096
_BLOCK = 1024
Groups = list[tuple[int, ...]]


@dataclass(frozen=True)
class NearPair:
    """Two films, as rows with ``first < second``, how they are related, and how much they correlate."""

    first: int
    second: int
    relation: Relation
    correlation: float


def exact_groups(hashes: Sequence[str]) -> list[tuple[int, ...]]:
    """Rows that share a hash, two or more to a group; rows with an empty hash (unreadable) belong to none."""
    rows: dict[str, list[int]] = {}
    for row, value in enumerate(hashes):
        if value:
            rows.setdefault(value, []).append(row)
    return [tuple(group) for group in rows.values() if len(group) > 1]


def near_pairs(ranks_NP: NDArray[np.uint8], phashes_N: NDArray[np.uint64]) -> list[NearPair]:
    """All pairs of near-duplicates, best first. Rows with a constant picture (blank films) are left out."""
    usable = np.flatnonzero(ranks_NP.max(axis=1) > ranks_NP.min(axis=1)) if len(ranks_NP) else np.empty(0, np.int64)
    if len(usable) < 2:
        return []
    ranks, hashes = ranks_NP[usable], phashes_N[usable]
    basis = _principal_axes(ranks)
    plain = _project(ranks, basis)
    pairs: dict[tuple[int, int], NearPair] = {}
    for relation in RELATIONS:
        # Mirroring and negating are their own inverses, so that looking at one order of each pair is enough.
        other = plain if relation == "copy" else _project(_relate(ranks, relation), basis)
        for first, second in _candidates(plain, other):
            if len(pairs) >= MAX_PAIRS:
                break
            for a, b, correlation in _confirm(ranks, hashes, first, second, relation):
                pair = NearPair(int(usable[a]), int(usable[b]), relation, correlation)
                pairs.setdefault((pair.first, pair.second), pair)
    return sorted(pairs.values(), key=lambda pair: (-pair.correlation, pair.first, pair.second))


def group_pairs(pairs: Sequence[NearPair], count: int) -> list[tuple[int, ...]]:
    """Films connected by pairs, as groups of rows; ``count`` is the number of films."""
    if not pairs:
        return []
    first, second = [pair.first for pair in pairs], [pair.second for pair in pairs]
    graph = coo_matrix((np.ones(len(pairs), np.int8), (first, second)), shape=(count, count))
    _, component = connected_components(graph, directed=False)
    rows: dict[int, list[int]] = {}
    for row in sorted({*first, *second}):
        rows.setdefault(int(component[row]), []).append(row)
    return [tuple(group) for group in rows.values()]


def unit_vectors(ranks_NP: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Each row minus its mean, with norm one: products of two are correlations. A constant row becomes zero."""
    centred = ranks_NP.astype(np.float32)
    centred -= centred.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(centred, axis=1, keepdims=True)
    centred /= np.where(norms > 0, norms, 1)
    return centred


def hamming(first_N: NDArray[np.uint64], second_N: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Number of bits in which two arrays of 64-bit hashes differ, element by element."""
    differing = np.ascontiguousarray(first_N ^ second_N).view(np.uint8).reshape(-1, 8)
    bits: NDArray[np.int64] = np.unpackbits(differing, axis=1).sum(axis=1, dtype=np.int64)
    return bits


def _relate(ranks_NP: NDArray[np.uint8], relation: Relation) -> NDArray[np.uint8]:
    if relation == "negative":
        return 255 - ranks_NP
    if relation == "mirrored":
        return np.ascontiguousarray(ranks_NP.reshape(-1, THUMB_SIDE, THUMB_SIDE)[:, :, ::-1]).reshape(ranks_NP.shape)
    return ranks_NP


def _principal_axes(ranks_NP: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Orthonormal (P, D). Any orthonormal basis is correct, so a sample is enough; evenly spaced, no randomness."""
    rows = np.linspace(0, len(ranks_NP) - 1, min(_SAMPLE, len(ranks_NP))).astype(np.int64)
    sample = unit_vectors(ranks_NP[rows])
    sample -= sample.mean(axis=0)
    if len(sample) < sample.shape[1]:
        axes = np.linalg.svd(sample, full_matrices=False)[2].T
    else:
        axes = np.linalg.eigh(sample.T @ sample)[1][:, ::-1]
    return np.ascontiguousarray(axes[:, :_COMPONENTS], dtype=np.float32)


def _project(ranks_NP: NDArray[np.uint8], basis_PD: NDArray[np.float32]) -> NDArray[np.float32]:
    """(N, D + 1): the components, and the length of what they leave out, which tightens the bound on distances."""
    parts = []
    for start in range(0, len(ranks_NP), _BLOCK):
        inside = unit_vectors(ranks_NP[start : start + _BLOCK]) @ basis_PD
        outside = np.sqrt(np.clip(1 - (inside**2).sum(axis=1, keepdims=True), 0, None))
        parts.append(np.hstack([inside, outside]))
    return np.concatenate(parts)


def _candidates(
    plain_ND: NDArray[np.float32], other_ND: NDArray[np.float32]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Rows (i, j), i < j, whose projections are as close as near-duplicates must be: a few too many, none too few."""
    limit = 2 * (1 - MIN_CORRELATION) + 1e-4  # |a - b|^2 = 2 - 2r for unit vectors; a little slack for float32
    order, other_order = np.argsort(plain_ND[:, 0]), np.argsort(other_ND[:, 0])
    keys = other_ND[other_order, 0]
    left, right = _augment(plain_ND, half_norm_first=True), _augment(other_ND, half_norm_first=False)
    for start in range(0, len(order), _BLOCK):
        rows = order[start : start + _BLOCK]
        lower = plain_ND[rows[0], 0] - np.sqrt(limit)
        upper = plain_ND[rows[-1], 0] + np.sqrt(limit)
        first, last = np.searchsorted(keys, lower), np.searchsorted(keys, upper, side="right")
        for begin in range(int(first), int(last), _BLOCK):
            columns = other_order[begin : min(begin + _BLOCK, int(last))]
            close = np.nonzero(left[rows] @ right[columns].T >= -limit / 2)
            i, j = rows[close[0]], columns[close[1]]
            ordered = i < j
            if ordered.any():
                yield i[ordered], j[ordered]


def _augment(points_ND: NDArray[np.float32], half_norm_first: bool) -> NDArray[np.float32]:
    """(N, D + 2) such that the product of one of each kind is -|a - b|^2 / 2: a distance in one matrix product."""
    half_norm = -(points_ND**2).sum(axis=1, keepdims=True) / 2
    ones = np.ones_like(half_norm)
    return np.hstack([points_ND, *((half_norm, ones) if half_norm_first else (ones, half_norm))])


def _confirm(
    ranks_NP: NDArray[np.uint8],
    hashes_N: NDArray[np.uint64],
    first: NDArray[np.int64],
    second: NDArray[np.int64],
    relation: Relation,
) -> Iterator[tuple[int, int, float]]:
    for start in range(0, len(first), _BLOCK):
        i, j = first[start : start + _BLOCK], second[start : start + _BLOCK]
        correlations = (unit_vectors(ranks_NP[i]) * unit_vectors(_relate(ranks_NP[j], relation))).sum(axis=1)
        keep = correlations > MIN_CORRELATION
        if relation == "copy":  # the hashes of mirrored and negative films differ by design
            keep &= hamming(hashes_N[i], hashes_N[j]) <= MAX_HAMMING
        for a, b, correlation in zip(i[keep], j[keep], correlations[keep], strict=True):
            yield int(a), int(b), min(1.0, float(correlation))


def check_patients(manifest: Manifest) -> Iterator[Finding]:
    """Patients with films in more than one split; and sets that cannot be checked for it."""
    table, unknown = manifest.table, np.flatnonzero(~manifest.patient_known)
    if len(unknown) == len(table):
        yield Finding(
            "notice",
            "no-patients",
            "The manifest has no patient ids, so it cannot be checked that films of one person stay in one split.",
        )
        return
    if len(unknown):
        message = (
            f"{films_in_words(len(unknown))} {'has' if len(unknown) == 1 else 'have'} no patient id and count as a "
            "patient each, so it cannot be checked that their other films stay in one split."
        )
        yield Finding("notice", "no-patients", message, single(unknown), (), {"films": len(unknown)})
    placed = table[table["split"] != ""]
    splits = placed.groupby("patient")["split"].nunique()
    crossing = splits[splits > 1].index
    if len(crossing) == 0:
        return
    rows = placed[placed["patient"].isin(crossing)].groupby("patient", sort=True).groups
    groups = tuple(tuple(int(row) for row in films) for films in rows.values())
    message = (
        f"{len(crossing):,} patient{' has' if len(crossing) == 1 else 's have'} films in more than one split "
        f"({sum(map(len, groups)):,} films), so the test shows people that were trained on; split by patient "
        "(afire data split)."
    )
    notes = tuple(", ".join(sorted({str(table["split"].iloc[row]) for row in group})) for group in groups)
    yield Finding("error", "patients-across-splits", message, groups, notes, {"patients": len(crossing)})


def check_exact(table: pd.DataFrame, measured: pd.DataFrame) -> Iterator[Finding]:
    """The same picture twice or more, whatever the file format."""
    # Blank films of one size are all equal; that they are blank is a finding of its own.
    groups = exact_groups(measured["pixels"].where(~measured["constant"], "").to_list())
    if not groups:
        return
    same_bytes = sum(len({measured["sha256"].iloc[row] for row in group}) == 1 for group in groups)
    across, within = _across_splits(table, groups)
    conflicting = [group for group in groups if conflicting_labels(table, group)]
    if across:
        message = (
            f"{_groups(across)} of identical films {_lie(across)} in more than one split, so the test was trained on; "
            "keep each film in one split."
        )
        yield Finding(
            "error", "copies-across-splits", message, tuple(across), _splits_of(table, across), _sizes(across)
        )
    if conflicting:
        message = (
            f"{_groups(conflicting)} of identical films {_have(conflicting)} different labels; one of them is wrong."
        )
        notes = tuple("differ in " + ", ".join(conflicting_labels(table, group)) for group in conflicting)
        yield Finding("error", "copies-with-other-labels", message, tuple(conflicting), notes, _sizes(conflicting))
    if within:
        surplus = sum(len(group) - 1 for group in within)
        people = sum(_patients(table, group) > 1 for group in within)
        more = f", {people:,} under different patient ids" if people and _has_patients(table) else ""
        message = (
            f"{_groups(within)} of identical films within a split ({surplus:,} surplus{more}); they count double in "
            "training and in every test."
        )
        numbers = {
            **_sizes(within),
            "surplus": surplus,
            "byte_identical_groups": same_bytes,
            "under_two_patients": people,
        }
        yield Finding("warning", "copies", message, tuple(within), (), numbers)


def check_near(table: pd.DataFrame, pairs: Sequence[NearPair]) -> Iterator[Finding]:
    """Films that differ only in compression, size, grey-scale, or by mirroring or negation."""
    across_pairs = [pair for pair in pairs if _split_count(table, (pair.first, pair.second)) > 1]
    groups = group_pairs(pairs, len(table))
    across, within = _across_splits(table, groups)
    if across:
        message = (
            f"{_groups(across)} of nearly identical films {_lie(across)} in more than one split, so the test was "
            "trained on; keep all of a group in one split."
        )
        numbers = {**_sizes(across), "pairs": len(across_pairs)}
        yield Finding("error", "near-copies-across-splits", message, tuple(across), _relations(across, pairs), numbers)
    if not within:
        return
    strangers = [group for group in within if _patients(table, group) > 1 and _has_patients(table)]
    conflicting = [group for group in within if conflicting_labels(table, group)]
    message = f"{_groups(within)} of nearly identical films within a split"
    if strangers:
        message += f", {len(strangers):,} of them under different patient ids (one person under two ids can leak)"
    if conflicting:
        message += f", {len(conflicting):,} of them with different labels"
    if len(pairs) >= MAX_PAIRS:
        message += f" (the search stopped at {MAX_PAIRS:,} pairs)"
    numbers = {**_sizes(within), "under_two_patients": len(strangers), "with_other_labels": len(conflicting)}
    level: Level = "warning" if strangers or conflicting or not _has_patients(table) else "notice"
    yield Finding(level, "near-copies", message + ".", tuple(within), _relations(within, pairs), numbers)


def conflicting_labels(table: pd.DataFrame, group: Sequence[int]) -> list[str]:
    """Labels that are present in one film of the group and absent in another."""
    columns = ["normal", *(name for name in table.columns if str(name).startswith(LABEL_PREFIX))]
    values = table[columns].iloc[list(group)]
    return [str(name).removeprefix(LABEL_PREFIX) for name in columns if values[name].dropna().nunique() > 1]


def _across_splits(table: pd.DataFrame, groups: Groups) -> tuple[Groups, Groups]:
    across = [group for group in groups if _split_count(table, group) > 1]
    return across, [group for group in groups if group not in set(across)]


def _split_count(table: pd.DataFrame, group: Sequence[int]) -> int:
    return len({split for split in table["split"].iloc[list(group)] if split})


def _splits_of(table: pd.DataFrame, groups: Groups) -> tuple[str, ...]:
    return tuple(", ".join(sorted({str(split) for split in table["split"].iloc[list(group)]})) for group in groups)


def _patients(table: pd.DataFrame, group: Sequence[int]) -> int:
    return int(table["patient"].iloc[list(group)].nunique())


def _has_patients(table: pd.DataFrame) -> bool:
    return bool((table["patient"] != table["image"]).any())


def _relations(groups: Groups, pairs: Sequence[NearPair]) -> tuple[str, ...]:
    """The weakest relation within each group, as text."""
    of_film = {row: number for number, group in enumerate(groups) for row in group}
    notes = [""] * len(groups)
    for pair in pairs:  # best first, so that the last one written is the weakest
        number = of_film.get(pair.first)
        if number is not None:
            kind = "" if pair.relation == "copy" else f"{pair.relation}, "
            notes[number] = f"{kind}correlation {pair.correlation:.3f}"
    return tuple(notes)


def _sizes(groups: Groups) -> dict[str, int | float | str | None]:
    return {"groups": len(groups), "films": sum(map(len, groups))}


def _groups(groups: Groups) -> str:
    return f"{len(groups):,} group{'' if len(groups) == 1 else 's'}"


def _lie(groups: Groups) -> str:
    return "lies" if len(groups) == 1 else "lie"


def _have(groups: Groups) -> str:
    return "has" if len(groups) == 1 else "have"

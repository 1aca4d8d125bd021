"""Checks of films and patients that occur more than once: across splits they leak, within a split they count double."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from afire.data.audit.duplicates import MAX_PAIRS, NearPair, exact_groups, group_pairs
from afire.data.audit.findings import Finding, Level
from afire.data.manifest import LABEL_PREFIX

Groups = list[tuple[int, ...]]


def check_patients(table: pd.DataFrame) -> Iterator[Finding]:
    """Patients with films in more than one split; and sets that cannot be checked for it."""
    if (table["patient"] == table["image"]).all():
        yield Finding(
            "notice",
            "no-patients",
            "The manifest has no patient ids, so it cannot be checked that films of one person stay in one split.",
        )
        return
    placed = table[table["split"] != ""]
    splits = placed.groupby("patient")["split"].nunique()
    torn = splits[splits > 1].index
    if len(torn) == 0:
        return
    rows = placed[placed["patient"].isin(torn)].groupby("patient", sort=True).groups
    groups = tuple(tuple(int(row) for row in films) for films in rows.values())
    sentence = (
        f"{len(torn):,} patient{' has' if len(torn) == 1 else 's have'} films in more than one split "
        f"({sum(map(len, groups)):,} films), so the test shows people that were trained on; split by patient "
        "(afire data split)."
    )
    notes = tuple(", ".join(sorted({str(table["split"].iloc[row]) for row in group})) for group in groups)
    yield Finding("error", "patients-across-splits", sentence, groups, notes, {"patients": len(torn)})


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
        sentence = (
            f"{_groups(across)} of identical films {_lie(across)} in more than one split, so the test was trained on; "
            "keep each film in one split."
        )
        yield Finding(
            "error", "copies-across-splits", sentence, tuple(across), _splits_of(table, across), _sizes(across)
        )
    if conflicting:
        sentence = (
            f"{_groups(conflicting)} of identical films {_have(conflicting)} different labels; one of them is wrong."
        )
        notes = tuple("differ in " + ", ".join(conflicting_labels(table, group)) for group in conflicting)
        yield Finding("error", "copies-with-other-labels", sentence, tuple(conflicting), notes, _sizes(conflicting))
    if within:
        surplus = sum(len(group) - 1 for group in within)
        people = sum(_patients(table, group) > 1 for group in within)
        more = f", {people:,} under different patient ids" if people and _has_patients(table) else ""
        sentence = (
            f"{_groups(within)} of identical films within a split ({surplus:,} surplus{more}); they count double in "
            "training and in every test."
        )
        numbers = {
            **_sizes(within),
            "surplus": surplus,
            "byte_identical_groups": same_bytes,
            "under_two_patients": people,
        }
        yield Finding("warning", "copies", sentence, tuple(within), (), numbers)


def check_near(table: pd.DataFrame, pairs: Sequence[NearPair]) -> Iterator[Finding]:
    """Films that differ only in compression, size, grey-scale, or by mirroring or negation."""
    across_pairs = [pair for pair in pairs if _split_count(table, (pair.first, pair.second)) > 1]
    groups = group_pairs(pairs, len(table))
    across, within = _across_splits(table, groups)
    if across:
        sentence = (
            f"{_groups(across)} of nearly identical films {_lie(across)} in more than one split, so the test was "
            "trained on; keep all of a group in one split."
        )
        numbers = {**_sizes(across), "pairs": len(across_pairs)}
        yield Finding("error", "near-copies-across-splits", sentence, tuple(across), _relations(across, pairs), numbers)
    if not within:
        return
    strangers = [group for group in within if _patients(table, group) > 1 and _has_patients(table)]
    conflicting = [group for group in within if conflicting_labels(table, group)]
    sentence = f"{_groups(within)} of nearly identical films within a split"
    if strangers:
        sentence += f", {len(strangers):,} of them under different patient ids (one person under two ids can leak)"
    if conflicting:
        sentence += f", {len(conflicting):,} of them with different labels"
    if len(pairs) >= MAX_PAIRS:
        sentence += f" (the search stopped at {MAX_PAIRS:,} pairs)"
    numbers = {**_sizes(within), "under_two_patients": len(strangers), "with_other_labels": len(conflicting)}
    level: Level = "warning" if strangers or conflicting or not _has_patients(table) else "notice"
    yield Finding(level, "near-copies", sentence + ".", tuple(within), _relations(within, pairs), numbers)


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
    """For each group its weakest link, in words."""
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

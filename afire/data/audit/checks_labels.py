"""Checks of labels and views: constant columns, classes missing in a split, views mixed, shortcuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from afire.data.audit.features import Group
from afire.data.audit.findings import Finding, Level, films_in_words, single
from afire.data.audit.shortcuts import ALL_FACTS, Shortcut, label_columns
from afire.data.manifest import SPLITS

_HARDLY = 0.03  # difference of two AUCs that is not worth a second warning
_RARE = 10  # positives in a part, below which an AUC on it is mostly noise


def check_labels(table: pd.DataFrame) -> Iterator[Finding]:
    """Columns from which nothing can be learned, or that cannot be tested."""
    columns = label_columns(table)
    unknown = [name for name, values in columns if values.notna().sum() == 0]
    constant = [name for name, values in columns if values.notna().any() and values.dropna().nunique() == 1]
    if len(unknown) == len(columns):
        yield Finding("notice", "no-labels", "No film has a label; that is enough for pre-training only.")
    elif [name for name in unknown if name != "normal"]:
        names = [name for name in unknown if name != "normal"]
        yield Finding("warning", "empty-labels", f"{_columns(names, 'Label')} unknown for every film.")
    if constant:
        sentence = (
            f"{_columns(constant, 'Label')} the same for every film that has a value: nothing can be learned or tested."
        )
        yield Finding("warning", "constant-labels", sentence, numbers={"labels": ", ".join(constant)})
    both = [(name, values) for name, values in columns if values.dropna().nunique() == 2]
    for split in SPLITS:
        part = (table["split"] == split).to_numpy()
        if part.any():
            yield from _check_part(split, [(name, values[part]) for name, values in both])


def _check_part(split: str, columns: Sequence[tuple[str, pd.Series]]) -> Iterator[Finding]:
    one_class = [name for name, values in columns if values.dropna().nunique() < 2]
    if one_class:
        sentence = f"In the {split} films {_columns(one_class)} never both present and absent: no AUC can be given."
        yield Finding("warning", "one-class-split", sentence, numbers={"split": split, "labels": ", ".join(one_class)})
    rare = {name: int((values == 1).sum()) for name, values in columns if 0 < int((values == 1).sum()) < _RARE}
    rare = {name: count for name, count in rare.items() if name not in one_class}
    if rare and split == "test":
        listed = ", ".join(f"{name} ({count})" for name, count in rare.items())
        sentence = (
            f"In the test films these are present fewer than {_RARE} times, so numbers on them will be noise: {listed}."
        )
        yield Finding("notice", "rare-labels", sentence, numbers=dict(rare))


def _columns(names: Sequence[str], word: str = "label") -> str:
    return f"{word} {names[0]} is" if len(names) == 1 else f"{word}s {', '.join(names)} are"


def check_views(table: pd.DataFrame, measured: pd.DataFrame) -> Iterator[Finding]:
    """Views mixed in one set, and views that the file and the manifest disagree on."""
    view = table["view"].where(table["view"] != "", measured["file_view"])
    counts = view.where(view != "", "unknown").value_counts()
    known = [str(name) for name in counts.index if name != "unknown"]
    if len(known) > 1:
        lateral = "LATERAL" in known
        listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        advice = (
            "frontal and lateral films have no common anatomy by position; keep one kind."
            if lateral
            else "AP films come from the bedside of sicker people, so the view alone can pass for disease."
        )
        level: Level = "warning" if lateral else "notice"
        sentence = f"Views are mixed ({listed}): {advice}"
        numbers = {str(name): int(count) for name, count in counts.items()}
        yield Finding(level, "views-mixed", sentence, numbers=dict(numbers))
    stated = (table["view"] != "") & (measured["file_view"] != "") & (table["view"] != measured["file_view"])
    if stated.any():
        rows = np.flatnonzero(stated)
        notes = tuple(f"manifest {table['view'].iloc[r]}, file {measured['file_view'].iloc[r]}" for r in rows)
        sentence = f"{films_in_words(len(rows))} with another view in the file than in the manifest."
        yield Finding("warning", "view-contradicted", sentence, single(rows), notes, {"films": len(rows)})


_MEANING: dict[Group, str] = {
    "file": "a model may learn the scanner instead of the disease. Report a metadata-only row beside every result.",
    "pixels": "that may be disease, or the way films were processed. Report this row beside every result.",
    "other": "if this number was known before the film was read, a model may learn it instead of the disease.",
    "demographics": "age and sex go with disease, and a model can see them. Report this row beside every result.",
}
_WITHOUT: dict[Group, str] = {
    "file": "can be guessed without looking at the picture",
    "pixels": "can be guessed from summaries of the film",
    "other": "can be guessed from a number of the manifest",
    "demographics": "can be guessed from age or sex",
}


def check_shortcuts(shortcuts: Sequence[Shortcut]) -> Iterator[Finding]:
    """One finding for each label with a severe shortcut, and one for all milder ones of a kind."""
    groups: tuple[Group, ...] = ("file", "pixels", "other", "demographics")
    for group in groups:
        flagged = [
            one for one in shortcuts if one.group == group and one.level is not None and _says_more(one, shortcuts)
        ]
        severe = [one for one in flagged if one.level != "notice"]
        for label in dict.fromkeys(one.label for one in severe):
            yield _severe(label, group, [one for one in flagged if one.label == label])
        mild = [one for one in flagged if one.label not in {other.label for other in severe}]
        if mild:
            yield _mild(group, mild)


def _says_more(one: Shortcut, shortcuts: Sequence[Shortcut]) -> bool:
    """False for all facts together when they guess hardly better than the facts about the file alone."""
    if one.feature != ALL_FACTS:
        return True
    rivals = [other.auc for other in shortcuts if other.label == one.label and other.group == "file"]
    return one.auc > max(rivals, default=0.5) + _HARDLY


def _severe(label: str, group: Group, found: list[Shortcut]) -> Finding:
    level: Level = "error" if any(one.level == "error" for one in found) else "warning"
    # Ordered by the training films: which fact to name first is a choice, and the test must not make it.
    named = sorted(found, key=lambda one: (one.level == "notice", not one.single, -one.train_auc))
    first = named[0]
    towards = f" ({first.direction} means {label})" if first.direction else ""
    by = f"{first.feature}{' alone' if first.single else ''}{towards}"
    sentence = (
        f"{label} {_WITHOUT[group]}: {by} {'gives' if first.single else 'give'} AUC {first.auc:.2f} "
        f"({first.low:.2f} to {first.high:.2f}) {_where(first)}"
    )
    others = [f"{one.feature} {one.auc:.2f}" for one in named[1:] if one.level != "notice"]
    sentence += f", {', '.join(others)}; {_MEANING[group]}" if others else f"; {_MEANING[group]}"
    numbers: dict[str, int | float | str | None] = {one.feature: round(one.auc, 4) for one in named}
    return Finding(level, "shortcut", sentence, numbers={"label": label, **numbers})


def _mild(group: Group, found: list[Shortcut]) -> Finding:
    best: dict[str, Shortcut] = {}
    for one in sorted(found, key=lambda one: (not one.single, -one.train_auc)):
        best.setdefault(one.label, one)
    listed = ", ".join(f"{one.label} by {one.feature} (AUC {one.auc:.2f})" for one in best.values())
    more = f"Partly guessable: {listed}; {_MEANING[group]}"
    return Finding("notice", "shortcut", more, numbers={one.label: round(one.auc, 4) for one in best.values()})


def _where(one: Shortcut) -> str:
    return "by cross-validation over patients" if one.judged == "cross-validated" else f"on the {one.judged} films"

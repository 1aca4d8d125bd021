"""Checks of single films, of labels and of views; each yields findings.

Negatives: the main direction of the films (the leading singular vector of their rank pictures, not centred) does not
care how many of them are negatives, because a film and its negative span the same line. It says which films disagree;
anatomy shows which side is the right one: lungs are darker than spine, belly and shoulders, and the corners are
darkest.

N films, P = 1024 pixels of a rank picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.data.audit.copies import unit_vectors
from afire.data.audit.measure import THUMB_SIDE, Finding, Group, Level, films_in_words, it_or_them, single
from afire.data.audit.shortcuts import ALL_FACTS, Shortcut, label_columns
from afire.data.manifest import SPLITS

SUSPECT = -0.2
"""Films that agree with the typical film less than this are taken for negatives."""
UNLIKE = 0.1
"""Films below this are not negatives but unlike the rest: lying on their side, collimated, not a chest."""
_SURE = 0.3  # agreement with the anatomical template from which on the template decides what is positive
_FEWEST = 20  # films from which a typical film can be made
_SAMPLE = 4096
TINY = 64
"""Films with a side shorter than this (in pixels) hold too little for any task of this package."""
_BLANK_CONTRAST = 0.005  # a standard deviation of one grey level of 255, or less
_MOSTLY_NEGATIVE = 0.2  # share of suspected negatives from which on the set, not a film, is the problem
_HARDLY = 0.03  # difference of two AUCs that is not worth a second warning
_RARE = 10  # positives in a split, below which an AUC on it is mostly noise
_MEANING: dict[Group, str] = {
    "file": "a model may learn the scanner instead of the disease. Report a metadata-only row beside every result.",
    "edge": "hardly any lung lies there: a model may learn how films were framed, or who was filmed, instead of the "
    "disease. Report this row beside every result.",
    "pixels": "that may be disease, or the way films were processed. Report this row beside every result.",
    "other": "if this number was known before the film was read, a model may learn it instead of the disease.",
    "demographics": "age and sex go with disease, and a model can see them. Report this row beside every result.",
}
_WITHOUT: dict[Group, str] = {
    "file": "can be guessed without looking at the picture",
    "edge": "can be guessed without looking at the lungs",
    "pixels": "can be guessed from summaries of the film",
    "other": "can be guessed from a number of the manifest",
    "demographics": "can be guessed from age or sex",
}


def check_readable(measured: pd.DataFrame) -> Iterator[Finding]:
    """Films that cannot be read."""
    rows = np.flatnonzero(measured["error"] != "")
    if len(rows):
        it = it_or_them(len(rows))
        yield Finding(
            "error",
            "unreadable",
            f"{films_in_words(len(rows))} cannot be read; repair {it} or drop {it} from the manifest.",
            single(rows),
            tuple(measured["error"].iloc[rows]),
            {"films": len(rows)},
        )


def check_content(measured: pd.DataFrame) -> Iterator[Finding]:
    """Films without content, too small ones, and photos."""
    readable = measured["error"] == ""
    blank = readable & (measured["constant"] | (measured["contrast"] < _BLANK_CONTRAST))
    short = measured[["width", "height"]].min(axis=1)
    tiny, colour = readable & ~blank & (short < TINY), readable & measured["colour"]
    if blank.any():
        count = int(blank.sum())
        message = (
            f"{films_in_words(count)} {_have(blank)} the same grey value (almost) everywhere; drop {it_or_them(count)}."
        )
        yield Finding("warning", "blank", message, single(np.flatnonzero(blank)), (), {"films": count})
    if tiny.any():
        rows = np.flatnonzero(tiny)
        sizes = tuple(f"{measured['width'].iloc[row]} x {measured['height'].iloc[row]}" for row in rows)
        message = f"{films_in_words(len(rows))} {_have(tiny)} a side shorter than {TINY} pixels: no film is that small."
        yield Finding("warning", "tiny", message, single(rows), sizes, {"films": len(rows)})
    if colour.any():
        message = f"{films_in_words(int(colour.sum()))} {_have(colour)} colours: a photo or a screenshot of a film?"
        yield Finding("warning", "coloured", message, single(np.flatnonzero(colour)), (), {"films": int(colour.sum())})


def check_range(measured: pd.DataFrame) -> Iterator[Finding]:
    """Files of 16 bits that hold fewer: each film is read by the depth that it uses, so all should use the same."""
    unused = (measured["error"] == "") & (measured["unused_bits"] > 0)
    if not unused.any():
        return
    rows = np.flatnonzero(unused)
    deep = (measured["error"] == "") & ~measured["constant"] & (measured["bits"] + measured["unused_bits"] > 8)
    deep &= measured["file_kind"] != "dicom"
    depths = measured["bits"][deep].value_counts().sort_index()
    notes = tuple(f"{measured['bits'].iloc[row]} bits used" for row in rows)
    numbers = {f"{bits} bits": int(count) for bits, count in depths.items()}
    listed = ", ".join(f"{bits} bits in {films_in_words(int(count))}" for bits, count in depths.items())
    statement = (
        f"{films_in_words(len(rows))} {'does' if len(rows) == 1 else 'do'} not use all bits of the file ({listed})"
    )
    if len(depths) == 1:
        yield Finding(
            "notice", "unused-bits", f"{statement}; white is taken to be that depth's.", single(rows), notes, numbers
        )
        return
    message = f"{statement}, so what is white differs from film to film; export all films alike."
    yield Finding("warning", "unused-bits", message, single(rows), notes, numbers)


@dataclass(frozen=True)
class Polarity:
    """``agreement`` (N,) with the typical film, NaN where unknown; ``anatomy``: how much that one is like a chest."""

    agreement: NDArray[np.float64]
    anatomy: float

    @property
    def judged_by_anatomy(self) -> bool:
        """Whether the typical film is enough like a chest to tell positive from negative; else the majority decides."""
        return abs(self.anatomy) >= _SURE

    @property
    def suspects(self) -> NDArray[np.int64]:
        """Rows of suspected negatives, surest first."""
        rows = np.flatnonzero(np.nan_to_num(self.agreement, nan=1.0) < SUSPECT)
        return rows[np.argsort(self.agreement[rows], kind="stable")]

    @property
    def unlike(self) -> NDArray[np.int64]:
        """Rows of films that are unlike the rest, least like first."""
        agreement = np.nan_to_num(self.agreement, nan=1.0)
        rows = np.flatnonzero((agreement >= SUSPECT) & (agreement < UNLIKE))
        return rows[np.argsort(agreement[rows], kind="stable")]


def judge_polarity(ranks_NP: NDArray[np.uint8], views: Sequence[str]) -> Polarity:
    """Agreement of every film with the typical film of its view (frontal views count as one)."""
    agreement = np.full(len(ranks_NP), np.nan)
    usable = ranks_NP.max(axis=1) > ranks_NP.min(axis=1) if len(ranks_NP) else np.zeros(0, bool)
    lateral = np.array([view.upper() == "LATERAL" for view in views], bool)
    anatomy = 0.0
    for side in (False, True):
        rows = np.flatnonzero(usable & (lateral == side))
        if len(rows) < _FEWEST:
            continue
        typical = _typical_film(unit_vectors(ranks_NP[_spread(rows)]))
        likeness = float(typical @ chest_template())
        for start in range(0, len(rows), _SAMPLE):
            block = rows[start : start + _SAMPLE]
            agreement[block] = unit_vectors(ranks_NP[block]) @ typical
        # A lateral film is not like the template, so there the majority is taken to be right.
        right_way = likeness >= 0 if not side and abs(likeness) >= _SURE else np.median(agreement[rows]) >= 0
        if not right_way:
            agreement[rows] *= -1
        if not side:
            anatomy = abs(likeness)
    return Polarity(agreement, anatomy)


def _spread(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """As many rows as a typical film needs at most, evenly spaced."""
    return rows[np.linspace(0, len(rows) - 1, min(_SAMPLE, len(rows))).astype(np.int64)]


def _typical_film(films_NP: NDArray[np.float32]) -> NDArray[np.float32]:
    """The median film (P,), unit norm, after turning every film to the side of the leading direction."""
    typical = chest_template() + films_NP[0]  # any start that is not at right angles to the result
    for _ in range(50):  # power iteration: far cheaper than all singular vectors
        typical = films_NP.T @ (films_NP @ typical)
        typical = typical / max(float(np.linalg.norm(typical)), 1e-12)
    for _ in range(3):  # the median is less moved by odd films than the singular vector it starts from
        typical = np.median(films_NP * np.where(films_NP @ typical < 0, -1, 1)[:, None], axis=0)
        typical = typical / max(float(np.linalg.norm(typical)), 1e-12)
    return np.asarray(typical, dtype=np.float32)


def chest_template() -> NDArray[np.float32]:
    """A frontal chest film in a few strokes (P,), mean zero and unit norm."""
    y, x = np.mgrid[0:THUMB_SIDE, 0:THUMB_SIDE] / (THUMB_SIDE - 1)
    chest = np.full((THUMB_SIDE, THUMB_SIDE), 0.6)
    for centre in (0.3, 0.7):
        chest -= 0.45 * np.exp(-(((x - centre) / 0.13) ** 2 + ((y - 0.42) / 0.25) ** 2))
    chest += 0.25 * np.exp(-(((x - 0.5) / 0.09) ** 2))
    chest += 0.25 / (1 + np.exp(-(y - 0.75) / 0.05))
    chest -= 0.5 / (1 + np.exp((np.minimum(x, 1 - x) - 0.06) / 0.03))
    chest -= 0.3 / (1 + np.exp((y - 0.04 - 0.8 * np.clip(0.35 - np.minimum(x, 1 - x), 0, None)) / 0.03))
    flat = (chest - chest.mean()).ravel()
    return np.asarray(flat / np.linalg.norm(flat), dtype=np.float32)


def _have(which: pd.Series) -> str:
    return "has" if int(which.sum()) == 1 else "have"


def check_polarity(polarity: Polarity) -> Iterator[Finding]:
    """Suspected negatives, and films that are unlike all others."""
    known = int(np.isfinite(polarity.agreement).sum())
    suspects, unlike = polarity.suspects, polarity.unlike
    if len(suspects):
        share = len(suspects) / known
        most = share >= _MOSTLY_NEGATIVE
        judged = "anatomy (lungs darker than spine)" if polarity.judged_by_anatomy else "the majority of films"
        advice = "so black and white are not used in one sense" if most else f"look at {it_or_them(len(suspects))}"
        percent = f" ({share:.0%})" if share >= 0.01 else ""
        like = "looks like a negative" if len(suspects) == 1 else "look like negatives"
        message = f"{films_in_words(len(suspects))} of {known:,}{percent} {like}, judged by {judged}; {advice}."
        yield Finding(
            "error" if most else "warning",
            "polarity",
            message,
            single(suspects),
            tuple(f"agreement {polarity.agreement[row]:+.2f}" for row in suspects),
            {"films": len(suspects), "share": share, "anatomy": polarity.anatomy},
        )
    if len(unlike):
        message = (
            f"{films_in_words(len(unlike))} {'is' if len(unlike) == 1 else 'are'} unlike the typical film of this set: "
            "lying on the side, collimated to a piece, or not a chest."
        )
        notes = tuple(f"agreement {polarity.agreement[row]:+.2f}" for row in unlike)
        yield Finding("notice", "unlike", message, single(unlike), notes, {"films": len(unlike)})


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
        message = (
            f"{_columns(constant, 'Label')} the same for every film that has a value: nothing can be learned or tested."
        )
        yield Finding("warning", "constant-labels", message, numbers={"labels": ", ".join(constant)})
    both = [(name, values) for name, values in columns if values.dropna().nunique() == 2]
    for split in SPLITS:
        inside = (table["split"] == split).to_numpy()
        if inside.any():
            yield from _check_split(split, [(name, values[inside]) for name, values in both])


def _check_split(split: str, columns: Sequence[tuple[str, pd.Series]]) -> Iterator[Finding]:
    one_class = [name for name, values in columns if values.dropna().nunique() < 2]
    if one_class:
        message = f"In the {split} films {_columns(one_class)} never both present and absent: no AUC can be given."
        yield Finding("warning", "one-class-split", message, numbers={"split": split, "labels": ", ".join(one_class)})
    rare = {name: int((values == 1).sum()) for name, values in columns if 0 < int((values == 1).sum()) < _RARE}
    rare = {name: count for name, count in rare.items() if name not in one_class}
    if rare and split == "test":
        listed = ", ".join(f"{name} ({count})" for name, count in rare.items())
        message = (
            f"In the test films these are present fewer than {_RARE} times, so numbers on them will be noise: {listed}."
        )
        yield Finding("notice", "rare-labels", message, numbers=dict(rare))


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
        message = f"Views are mixed ({listed}): {advice}"
        numbers = {str(name): int(count) for name, count in counts.items()}
        yield Finding(level, "views-mixed", message, numbers=dict(numbers))
    stated = (table["view"] != "") & (measured["file_view"] != "") & (table["view"] != measured["file_view"])
    if stated.any():
        rows = np.flatnonzero(stated)
        notes = tuple(f"manifest {table['view'].iloc[r]}, file {measured['file_view'].iloc[r]}" for r in rows)
        message = f"{films_in_words(len(rows))} with another view in the file than in the manifest."
        yield Finding("warning", "view-contradicted", message, single(rows), notes, {"films": len(rows)})


def check_shortcuts(shortcuts: Sequence[Shortcut], drawn_over: str = "patients") -> Iterator[Finding]:
    """One finding for each label with a severe shortcut, and one for all milder ones of a kind."""
    groups: tuple[Group, ...] = ("file", "edge", "pixels", "other", "demographics")
    for group in groups:
        flagged = [
            shortcut
            for shortcut in shortcuts
            if shortcut.group == group and shortcut.level is not None and _says_more(shortcut, shortcuts)
        ]
        severe = {shortcut.label: None for shortcut in flagged if shortcut.level != "notice"}
        for label in severe:
            yield _severe(label, group, [shortcut for shortcut in flagged if shortcut.label == label], drawn_over)
        mild = [shortcut for shortcut in flagged if shortcut.label not in severe]
        if mild:
            yield _mild(group, mild)


def _says_more(shortcut: Shortcut, shortcuts: Sequence[Shortcut]) -> bool:
    """False for all facts together when they guess hardly better than the facts about the file alone."""
    if shortcut.feature != ALL_FACTS:
        return True
    rivals = [other.auc for other in shortcuts if other.label == shortcut.label and other.group == "file"]
    return shortcut.auc > max(rivals, default=0.5) + _HARDLY


def _severe(label: str, group: Group, shortcuts: list[Shortcut], drawn_over: str) -> Finding:
    level: Level = "error" if any(shortcut.level == "error" for shortcut in shortcuts) else "warning"
    # Ordered by the training films: which fact to name first is a choice, and the test must not make it.
    named = sorted(shortcuts, key=lambda each: (each.level == "notice", not each.single, -each.train_auc))
    first = named[0]
    towards = f" ({first.direction} means {label})" if first.direction else ""
    by = f"{first.feature}{' alone' if first.single else ''}{towards}"
    message = (
        f"{label} {_WITHOUT[group]}: {by} {'gives' if first.single else 'give'} AUC {first.auc:.2f} "
        f"({first.low:.2f} to {first.high:.2f}) {_where(first, drawn_over)}"
    )
    others = [f"{other.feature} {other.auc:.2f}" for other in named[1:] if other.level != "notice"]
    message += f", {', '.join(others)}; {_MEANING[group]}" if others else f"; {_MEANING[group]}"
    numbers: dict[str, int | float | str | None] = {each.feature: round(each.auc, 4) for each in named}
    return Finding(level, "shortcut", message, numbers={"label": label, **numbers})


def _mild(group: Group, shortcuts: list[Shortcut]) -> Finding:
    best: dict[str, Shortcut] = {}
    for shortcut in sorted(shortcuts, key=lambda each: (not each.single, -each.train_auc)):
        best.setdefault(shortcut.label, shortcut)
    listed = ", ".join(f"{label} by {each.feature} (AUC {each.auc:.2f})" for label, each in best.items())
    message = f"Partly guessable: {listed}; {_MEANING[group]}"
    return Finding("notice", "shortcut", message, numbers={label: round(each.auc, 4) for label, each in best.items()})


def _where(shortcut: Shortcut, drawn_over: str) -> str:
    by_folds = shortcut.judged == "cross-validated"
    return f"by cross-validation over {drawn_over}" if by_folds else f"on the {shortcut.judged} films"

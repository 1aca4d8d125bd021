"""Readers' marks on a detector's verdicts: what the page of `afire detect run` saves, read as labels.

A mark agrees or disagrees with the verdict that stood beside the film when it was made. Both are in the file, so that a
mark means the same whatever the threshold is later. The reader has seen the verdict, so such labels favour the
detector, and results say so.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from afire.data.manifest import Manifest
from afire.data.splits import Split
from afire.detect.protocol import Name, TestFilms, plan_test
from afire.errors import UserError
from afire.files import require_file, sha256_bytes

AGREE, DISAGREE, UNSURE = "agree", "disagree", "unsure"
FLAGGED, NOT_FLAGGED = "flagged", "not flagged"
COLUMNS = (
    "file", "mark", "verdict", "score", "threshold", "false_alarm_rate", "region", "note", "model", "afire",
)  # fmt: skip
_NEEDED = ("file", "mark", "verdict", "threshold", "model")
_VERDICTS = (FLAGGED, NOT_FLAGGED, "out of domain", "unreadable")
_SEPARATORS = (",", ";", "\t")  # spreadsheets save with the one of their language
FORMULA = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")  # what a spreadsheet takes for a formula's start
_SAME_THRESHOLD = 1e-6
_TAKES = "--labels takes the marks.csv that the page of `afire detect run` saves"


@dataclass(frozen=True)
class Mark:
    """A reader's mark on a film's verdict; ``threshold`` is the score from which films were flagged at the time."""

    file: str
    mark: str
    verdict: str
    threshold: float | None
    model: str

    @property
    def abnormal(self) -> float | None:
        """1 or 0; None where the mark does not say: unsure, or a film that has no verdict."""
        if self.mark not in (AGREE, DISAGREE) or self.verdict not in (FLAGGED, NOT_FLAGGED):
            return None
        return float((self.mark == AGREE) == (self.verdict == FLAGGED))


@dataclass(frozen=True)
class Marks:
    """The marks of a file, by film, and the hash of the file."""

    name: str
    hash: str
    films: Mapping[str, Mark]


def read_marks(path: Path) -> Marks:
    """Read the CSV that the page saves, as it is or after a spreadsheet has saved it again."""
    data = require_file(path, "the file of marks").read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8; {_TAKES}.") from None
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(text))
    try:
        header = [name.strip().lower() for name in next(lines, [])]
        missing = [name for name in _NEEDED if name not in header]
        if missing:
            raise UserError(f"{path} has no column {missing[0]!r}; {_TAKES}.")
        films: dict[str, Mark] = {}
        for cells in lines:
            if any(cell.strip() for cell in cells):
                mark = _mark(dict(zip(header, cells, strict=False)), f"{path}, line {lines.line_num}")
                if mark.file in films:
                    raise UserError(f"{path}, line {lines.line_num}: {mark.file} is there twice; keep one of the two.")
                films[mark.file] = mark
    except csv.Error as error:
        raise UserError(f"{path} is not a CSV file ({error}); save the marks again.") from None
    if not films:
        raise UserError(f"{path} holds no marks.")
    return Marks(path.name, sha256_bytes(data), films)


def _separator(text: str) -> str:
    header = text.partition("\n")[0]
    return max(_SEPARATORS, key=header.count)


def _mark(cells: Mapping[str, str], position: str) -> Mark:
    absent = [name for name in _NEEDED if name not in cells]
    if absent:
        raise UserError(f"{position}: the line ends before the column {absent[0]!r}; save the marks again.")
    mark, verdict = cells["mark"].strip().lower(), cells["verdict"].strip().lower()
    if mark not in (AGREE, DISAGREE, UNSURE, ""):
        raise UserError(f"{position}: the mark is {cells['mark']!r}; marks are {AGREE}, {DISAGREE} and {UNSURE}.")
    if verdict not in _VERDICTS:
        raise UserError(f"{position}: the verdict is {cells['verdict']!r}; verdicts are {', '.join(_VERDICTS)}.")
    threshold = cells["threshold"].strip()
    try:
        number = float(threshold) if threshold else None
    except ValueError:
        raise UserError(f"{position}: the threshold {threshold!r} is not a number; save the marks again.") from None
    return Mark(as_written(cells["file"]), mark, verdict, number, cells["model"].strip())


def as_written(cell: str) -> str:
    """Undo the apostrophe that keeps a spreadsheet from running a text."""
    guarded = cell.startswith("'") and cell[1:].startswith((*FORMULA, "'"))
    return cell[1:] if guarded else cell


def label_by_marks(marks: Marks, manifest: Manifest) -> tuple[Manifest, str]:
    """The manifest in which only marked films are normal or not, and a message that counts them."""
    row_of = {name: row for row, name in enumerate(manifest.table["image"])}
    matches = [mark for file, mark in marks.films.items() if file in row_of]
    if not matches:
        example = next(iter(marks.films))
        raise UserError(
            f"none of the {len(marks.films):,} films in {marks.name} (the first is {example}) is in --data; build that "
            "from the folder that was given to `afire detect run`."
        )
    normal = np.full(len(manifest), np.nan)
    for mark in matches:
        if mark.abnormal is not None:
            normal[row_of[mark.file]] = 1 - mark.abnormal
    table = manifest.table.assign(normal=normal)
    return Manifest(table, manifest.root, manifest.info), _counts(marks, matches)


def plan_marked_test(marks: Marks, manifest: Manifest, split: Split | None, protocol: Name) -> TestFilms:
    """The test by marks instead of labels: every marked film, unless a split or a protocol says which."""
    if protocol == "chexpert250":
        raise UserError("--protocol chexpert250 is about labels of CheXpert; leave out --labels.")
    marked, summary = label_by_marks(marks, manifest)
    test = plan_test(marked, split, "all" if protocol == "auto" and split is None else protocol)
    return replace(test, message=f"{test.message}; {summary}", own_labels=True)


def _counts(marks: Marks, matches: Sequence[Mark]) -> str:
    kinds = Counter(_kind(mark) for mark in matches)
    left_out = {name: kinds[name] for name in ("unsure", "without a mark", "without a verdict")}
    left_out["not in --data"] = len(marks.films) - len(matches)
    summary = ", ".join(f"{count:,} {name}" for name, count in left_out.items() if count)
    return f"labels are the marks of {marks.name}: {kinds['abnormal']:,} films abnormal, {kinds['normal']:,} normal" + (
        f"; left out: {summary}" if summary else ""
    )


def _kind(mark: Mark) -> str:
    if mark.abnormal is not None:
        return "abnormal" if mark.abnormal else "normal"
    if not mark.mark:
        return "without a mark"
    return "unsure" if mark.mark == UNSURE else "without a verdict"


def mark_notes(marks: Marks, detectors: Mapping[str, tuple[str, float]]) -> list[str]:
    """What a reader must know about labels that are marks; ``detectors`` are hash and threshold by name."""
    notes = [
        "whoever made the marks saw the verdict of the detector, so they favour it; they are no test by independent "
        "labels"
    ]
    made_on = {mark.model for mark in marks.films.values() if mark.abnormal is not None}
    own_thresholds = {name: threshold for name, (model_hash, threshold) in detectors.items() if model_hash in made_on}
    other_models = sorted(made_on - {model_hash for model_hash, _ in detectors.values()})
    strange = [name for name in detectors if name not in own_thresholds]
    if other_models:
        hashes = ", ".join(model[:12] or "unknown" for model in other_models)
        notes.append(f"marks in {marks.name} were made on verdicts of a detector that is not tested here ({hashes})")
    if strange and own_thresholds:
        notes.append(f"no mark in {marks.name} was made on verdicts of {', '.join(strange)}")
    thresholds = sorted({mark.threshold for mark in marks.films.values() if mark.threshold is not None})
    moved = [
        value for value in thresholds if not any(_equal(value, threshold) for threshold in own_thresholds.values())
    ]
    if own_thresholds and moved:
        span = f"{moved[0]:.4g}" if len(moved) == 1 else f"{moved[0]:.4g} to {moved[-1]:.4g}"
        theirs = ", ".join(f"{threshold:.4g}" for threshold in own_thresholds.values())
        notes.append(f"some marks were made at other thresholds ({span}) than that of the detector ({theirs})")
    return notes


def _equal(first: float, second: float) -> bool:
    return abs(first - second) <= _SAME_THRESHOLD * max(1.0, abs(second))

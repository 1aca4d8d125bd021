"""What `afire detect run` says about films, and the files it says it in: journal, CSV and JSON.

Among it is where a film deviates most, in words: the patient's side and the zone of the chest. Sides are the
patient's, for a frontal film that hangs as usual: the patient's right lung is on the left of the film. Zones are thirds
of the height of the lung field (:func:`afire.lesions.lung_field`, a rough one), or of the film where none is found.

Shapes: B films of S x S pixels, heat of R x C cells.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import adaptive_avg_pool2d

from afire._version import __version__
from afire.detect.base import DISCLAIMER, AnomalyDetector, Heat
from afire.detect.normals import Calibration
from afire.errors import UserError
from afire.files import write_json, write_text
from afire.lesions.places import lung_field

SIDES = "Sides are the patient's: the right lung is on the left of the film."
_FIELD_SIDE = 56  # what the lung field is found on anyway
_IN_LUNG = 0.25  # share of a cell that must be lung
_WHOLE_FILM = 0.9  # a lung field this large is none
_SMALLEST_LUNG = 0.02  # of the film, on either side of its middle
_ZONES = ("upper", "middle", "lower")


@dataclass(frozen=True)
class Region:
    """The most deviating place of a film: ``x`` and ``y`` in fractions of the square film, ``sd`` of its heat there."""

    words: str
    x: float
    y: float
    sd: float


@dataclass(frozen=True)
class _Lungs:
    """The lung field (S, S) of a film, with its edges in fractions of the film; nothing where none was found."""

    field: NDArray[np.bool_] | None
    top: float = 0.0
    bottom: float = 1.0
    inner: tuple[float, float] = (0.42, 0.58)  # between these lies the mediastinum
    outer: tuple[float, float] = (0.0, 1.0)


def regions(films_BSS: NDArray[np.float32], heat_BRC: Heat) -> list[Region]:
    """The most deviating region of each film."""
    small = adaptive_avg_pool2d(torch.from_numpy(np.ascontiguousarray(films_BSS))[:, None], _FIELD_SIDE)[:, 0]
    fields = lung_field(small).numpy()
    return [_region(lungs, heat) for lungs, heat in zip(_lungs(fields), heat_BRC, strict=True)]


def region_message(region: Region, low: float) -> str:
    """``right lower zone, 4.2 sd above normal films there``; below ``low``, the foot of the scale, nothing does."""
    if region.sd < low:
        return f"nothing stands out (highest: {region.words}, {region.sd:.1f} sd)"
    return f"{region.words}, {region.sd:.1f} sd above normal films there"


def _region(lungs: _Lungs, heat_RC: Heat) -> Region:
    rows, columns = heat_RC.shape
    row, column = divmod(int(heat_RC.argmax()), columns)
    x, y = (column + 0.5) / columns, (row + 0.5) / rows
    return Region(_words(lungs, x, y, 1 / columns, 1 / rows), x, y, float(heat_RC[row, column]))


def _words(lungs: _Lungs, x: float, y: float, width: float, height: float) -> str:
    """The place (x, y), the centre of a cell of the given width and height."""
    left, right = lungs.inner
    side = "right" if x < (left + right) / 2 else "left"
    if lungs.field is None:
        return "central" if left <= x <= right else f"{side} {_zone(lungs, y)} zone of the film"
    if _share(lungs.field, x, y, width, height) >= _IN_LUNG:
        return f"{side} {_zone(lungs, y)} zone"
    if y < lungs.top:
        return f"above the lungs, {side}"
    if y > lungs.bottom:
        return f"below the lungs, {side}"
    if left <= x <= right:
        return f"central (mediastinum), {_zone(lungs, y)} third"
    if lungs.outer[0] <= x <= lungs.outer[1]:  # heart, diaphragm, or a lung too bright to be seen as one
        return f"{side} {_zone(lungs, y)} zone, dense part"
    return f"outside the lungs, {side}"


def _zone(lungs: _Lungs, y: float) -> str:
    third = int(3 * (y - lungs.top) / max(lungs.bottom - lungs.top, 1e-6))
    return _ZONES[min(max(third, 0), 2)]


def _share(field: NDArray[np.bool_], x: float, y: float, width: float, height: float) -> float:
    rows, columns = field.shape
    cell = field[
        round((y - height / 2) * rows) : round((y + height / 2) * rows),
        round((x - width / 2) * columns) : round((x + width / 2) * columns),
    ]
    return float(cell.mean()) if cell.size else 0.0


def _lungs(fields_BSS: NDArray[np.bool_]) -> Iterator[_Lungs]:
    """Edges of the two lungs of each film; no field where either side of the film has too little of one."""
    _, height, width = fields_BSS.shape
    across_BS, down_BS = fields_BSS.sum(axis=2), fields_BSS.sum(axis=1)  # of all films at once
    for lungs, across, down in zip(fields_BSS, across_BS, down_BS, strict=True):
        halves = down[: width // 2], down[width // 2 :]
        rows = np.flatnonzero(across > 0.02 * width)
        columns = [np.flatnonzero(half > 0.1 * len(rows)) for half in halves]
        whole = across.sum() > _WHOLE_FILM * lungs.size
        small = min(half.sum() for half in halves) < _SMALLEST_LUNG * lungs.size
        if whole or small or not (len(rows) and len(columns[0]) and len(columns[1])):
            yield _Lungs(None)
            continue
        inner = (float(columns[0][-1] + 1) / width, float(columns[1][0] + width // 2) / width)
        outer = (float(columns[0][0]) / width, float(columns[1][-1] + 1 + width // 2) / width)
        yield _Lungs(lungs, float(rows[0]) / height, float(rows[-1] + 1) / height, inner, outer)


JOURNAL, CSV, JSON = "results.jsonl", "results.csv", "results.json"
SCORED: Final = "scored"
OUT_OF_DOMAIN: Final = "out of domain"
UNREADABLE: Final = "unreadable"
Status = Literal["scored", "out of domain", "unreadable"]
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes for the start of a formula


@dataclass(frozen=True)
class FilmResult:
    """One film as the journal keeps it: what was measured, before any threshold."""

    number: int  # names its pictures
    file: str  # relative to the folder that was given
    status: Status
    score: float | None = None  # also of a film out of domain, where it is not to be trusted
    region: str = ""  # a message
    region_words: str = ""
    region_sd: float | None = None
    x: float | None = None  # of the hottest cell, in fractions of the film
    y: float | None = None
    view: str = ""
    stored_inverted: bool = False
    objections: tuple[str, ...] = ()  # why it is out of domain or unreadable
    pictures: dict[str, str] = field(default_factory=dict)  # kind -> file relative to the results' folder
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """A film's score among the calibration normals."""

    percentile: float
    p_value: float
    alarm: bool


@dataclass(frozen=True)
class Rule:
    """When a film is flagged: from ``threshold`` on. ``words`` states what that means for normal films."""

    threshold: float
    false_alarms: float  # the rate that the threshold stands for
    words: str
    calibration: Calibration

    def judge(self, result: FilmResult) -> Judgement | None:
        """Only for films that were scored: the others have no place among the normals."""
        if result.status != SCORED or result.score is None:
            return None
        percentile = float(self.calibration.percentiles(result.score))
        p_value = float(self.calibration.p_values(result.score))
        return Judgement(percentile, p_value, result.score >= self.threshold)


def rule_of(detector: AnomalyDetector, threshold: float | None = None, false_alarms: float | None = None) -> Rule:
    """The detector's own rule, or the user's: a score, or a false-alarm rate."""
    calibration = detector.calibration
    films = f"{len(calibration):,} calibration normals"
    if threshold is not None and false_alarms is not None:
        raise UserError("--threshold and --false-alarms both say when a film is flagged; give one of them.")
    if threshold is not None:
        if not np.isfinite(threshold):
            raise UserError(f"--threshold {threshold} is not a finite score.")
        rate = float(calibration.p_values(threshold))
        words = (
            f"score of at least {threshold:g}, your own threshold; at most {_percent(rate)} of normal films reach it"
        )
        return Rule(threshold, rate, f"{words}, judged by {films}", calibration)
    rate = detector.false_alarms if false_alarms is None else false_alarms
    if not 0 < rate < 1:
        raise UserError(f"--false-alarms {rate:g} is not a rate between 0 and 1, such as 0.05.")
    if rate < calibration.smallest_rate():
        raise UserError(
            f"--false-alarms {rate:g}: {films} can vouch for no rate below {calibration.smallest_rate():.3f}; "
            "ask for a higher rate, or fit a detector with more normal films."
        )
    lowest = calibration.threshold(rate)
    whose = "the detector's own rate" if false_alarms is None else "your own rate"
    words = f"p-value of at most {rate:g} ({whose}), that is a score of at least {lowest:.3g}"
    words = f"{words}; at most {_percent(rate)} of normal films are flagged, judged by {films}"
    return Rule(lowest, rate, words, calibration)


def _percent(rate: float) -> str:
    return f"{100 * rate:.3g} %"


def shown_name(path: str) -> str:
    """A file's name as text that can be written anywhere: bytes that are not UTF-8 are spelt out."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def to_line(result: FilmResult) -> str:
    """A line of the journal."""
    return json.dumps(vars(result), allow_nan=False) + "\n"


def read_journal(path: Path) -> tuple[dict[str, Any], list[FilmResult]]:
    """The header and the films of a journal. Truncated lines are left out, and of a film the last line counts."""
    lines = path.read_text(encoding="utf-8").splitlines()
    header = _object(lines[0]) if lines else None
    if header is None or "run" not in header:
        raise UserError(f"{path} does not start like a journal of `afire detect run`; choose another --out.")
    known = {entry.name for entry in fields(FilmResult)}
    results: dict[str, FilmResult] = {}
    for line in lines[1:]:
        entry = _object(line)
        if entry is None or not known.issuperset(entry) or "file" not in entry:
            continue
        entry["objections"], entry["notes"] = tuple(entry["objections"]), tuple(entry["notes"])
        results[entry["file"]] = FilmResult(**entry)
    return header["run"], list(results.values())


def _object(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) else None


def counts(results: Iterable[FilmResult], rule: Rule) -> dict[str, int]:
    """How many films are in each group: alarm, no alarm, out of domain, unreadable."""
    groups: Counter[str] = Counter(group(result, rule) for result in results)
    return {name: groups[name] for name in ("alarm", "no alarm", OUT_OF_DOMAIN, UNREADABLE)}


def group(result: FilmResult, rule: Rule) -> str:
    judged = rule.judge(result)
    if judged is None:
        return result.status
    return "alarm" if judged.alarm else "no alarm"


def ranked(results: Iterable[FilmResult]) -> list[FilmResult]:
    """Highest score first, then films out of domain, then those that could not be read."""
    order = {SCORED: 0, OUT_OF_DOMAIN: 1, UNREADABLE: 2}
    return sorted(results, key=lambda result: (order[result.status], -(result.score or 0.0), result.number))


def row(result: FilmResult, rule: Rule, model_hash: str) -> dict[str, Any]:
    """A film as the results' files show it. The score of a film out of domain has a name that says what it is worth."""
    judged = rule.judge(result)
    trusted = result.status == SCORED
    return {
        "file": result.file,
        "status": result.status,
        "score": result.score if trusted else None,
        "percentile": judged.percentile if judged else None,
        "p_value": judged.p_value if judged else None,
        "alarm": judged.alarm if judged else None,
        "region": result.region if trusted else "",
        "region_sd": result.region_sd if trusted else None,
        "hottest_x": result.x if trusted else None,
        "hottest_y": result.y if trusted else None,
        "view": result.view,
        "stored_inverted": result.stored_inverted,
        "reason": "; ".join(result.objections),
        "score_not_to_be_trusted": None if trusted else result.score,
        **{f"{kind}_picture": result.pictures.get(kind, "") for kind in ("overlay", "restored", "difference")},
        "notes": "; ".join(result.notes),
        "model": model_hash,
        "afire": __version__,
        "note": DISCLAIMER,
    }


def write_results(out: Path, results: Sequence[FilmResult], rule: Rule, header: dict[str, Any]) -> None:
    """``results.csv`` and ``results.json``, highest score first."""
    rows = [row(result, rule, header["model"]["hash"]) for result in ranked(results)]
    write_json(out / JSON, {**header, "counts": counts(results, rule), "films": rows})
    write_text(out / CSV, _csv(rows))


def header_of(detector: AnomalyDetector, rule: Rule, model: dict[str, str]) -> dict[str, Any]:
    """What ``results.json`` says once for all films."""
    return {
        "format": 1,
        "note": DISCLAIMER,
        "afire": __version__,
        "model": model,
        "score": {
            "name": detector.choice.name,
            "direction": "larger is more abnormal",
            "mean_auc_on_drawn_lesions": detector.choice.mean_auc if np.isfinite(detector.choice.mean_auc) else None,
        },
        "rule": {
            "words": rule.words,
            "threshold": rule.threshold if np.isfinite(rule.threshold) else None,
            "false_alarm_rate": rule.false_alarms,
        },
        "calibration_films": len(rule.calibration),
        "heat_scale_sd": {"low": detector.scale.low, "high": detector.scale.high},
        "sides": SIDES,
        "warnings": list(detector.origin.get("notes") or []),
    }


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(rows[0] if rows else [])
    writer.writerows([[_cell(value) for value in film.values()] for film in rows])
    return stream.getvalue()


def _cell(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula starts with an apostrophe; numbers stay numbers."""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return "'" + value
    return str(value).lower() if isinstance(value, bool) else value

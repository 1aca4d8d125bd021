"""What `afire detect run` says about films, and the files it says it in: journal, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from afire._version import __version__
from afire.detect.base import DISCLAIMER, AnomalyDetector
from afire.detect.normals import CALIBRATE, Calibration
from afire.errors import UserError
from afire.files import write_json, write_text
from afire.lesions.places import SIDES

JOURNAL, CSV, JSON = "results.jsonl", "results.csv", "results.json"
SCORED: Final = "scored"
OUT_OF_DOMAIN: Final = "out of domain"
UNREADABLE: Final = "unreadable"
Status = Literal["scored", "out of domain", "unreadable"]
_FEWEST_FOR_A_SHARE = 20  # films
_MOST_FLAGGED = 0.5  # of the films, before it is said that the threshold may not fit them
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
        message = (
            f"score of at least {threshold:g}, your own threshold; at most {_percent(rate)} of normal films reach it"
        )
        return Rule(threshold, rate, f"{message}, judged by {films}", calibration)
    rate = detector.false_alarms if false_alarms is None else false_alarms
    if not 0 < rate < 1:
        raise UserError(f"--false-alarms {rate:g} is not a rate between 0 and 1, such as 0.05.")
    if rate < calibration.smallest_rate():
        raise UserError(
            f"--false-alarms {rate:g}: {films} can vouch for no rate below {calibration.smallest_rate():.3f}; "
            "ask for a higher rate, or fit a detector with more normal films."
        )
    lowest = calibration.threshold(rate)
    owner = "the detector's own rate" if false_alarms is None else "your own rate"
    message = f"p-value of at most {rate:g} ({owner}), that is a score of at least {lowest:.3g}"
    message = f"{message}; at most {_percent(rate)} of normal films are flagged, judged by {films}"
    return Rule(lowest, rate, message, calibration)


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
    header = read_header(path)
    names = {entry.name for entry in fields(FilmResult)}
    results: dict[str, FilmResult] = {}
    for line in lines[1:]:
        entry = _object(line)
        if entry is None or not names.issuperset(entry) or "file" not in entry:
            continue
        entry["objections"], entry["notes"] = tuple(entry["objections"]), tuple(entry["notes"])
        results[entry["file"]] = FilmResult(**entry)
    return header, list(results.values())


def read_header(path: Path) -> dict[str, Any]:
    """What the first line of a journal says about the run."""
    with path.open(encoding="utf-8") as stream:
        header = _object(stream.readline())
    if header is None or not isinstance(header.get("run"), dict):
        raise UserError(f"{path} does not start like a journal of `afire detect run`; choose another --out.")
    run: dict[str, Any] = header["run"]
    return run


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


def warnings_of(detector: AnomalyDetector, groups: Mapping[str, int], rule: Rule) -> list[str]:
    """What a reader must know before believing a verdict. ``groups`` are those of :func:`counts`."""
    flagged, scored = groups.get("alarm", 0), groups.get("alarm", 0) + groups.get("no alarm", 0)
    warnings = list(detector.origin.get("notes") or [])
    if scored < _FEWEST_FOR_A_SHARE:
        return warnings
    share = flagged / scored
    if share >= max(_MOST_FLAGGED, 2 * rule.false_alarms):
        warnings.append(
            f"{_percent(round(share, 2))} of the films are flagged, where at most "
            f"{_percent(rule.false_alarms)} of normal ones should be; unless most of them are abnormal, the threshold "
            f"does not fit them: {CALIBRATE}"
        )
    return warnings


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
    """A film as the results' files show it. The score of a film out of domain is called not to be trusted."""
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
    write_json(out / JSON, {**header, "films": rows})
    write_text(out / CSV, _csv(rows))


def header_of(
    detector: AnomalyDetector, rule: Rule, model: dict[str, str], groups: Mapping[str, int]
) -> dict[str, Any]:
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
        "warnings": warnings_of(detector, groups, rule),
        "counts": dict(groups),
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

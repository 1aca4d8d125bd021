"""Results of a run: what alarms, what is written, and that names can do no harm."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from afire.detect.base import AnomalyDetector
from afire.detect.findings import (
    CSV,
    JSON,
    FilmResult,
    counts,
    header_of,
    ranked,
    read_journal,
    rule_of,
    shown_name,
    to_line,
    warnings_of,
    write_results,
)
from afire.errors import UserError

MODEL = {"name": "model", "hash": "ab" * 32}


def results(detector: AnomalyDetector) -> list[FilmResult]:
    high = detector.threshold
    return [
        FilmResult(0, "=cmd|' /C calc'!A0.png", "scored", score=high + 1, region="right upper zone, 4.2 sd"),
        FilmResult(1, "b.png", "scored", score=high - 1e-6, x=0.5, y=0.25),
        FilmResult(2, "@sum.png", "out of domain", score=99.0, objections=("looks inverted",)),
        FilmResult(3, "new\nline.png", "unreadable", objections=("is empty",)),
    ]


def test_only_scored_films_are_judged(detector: AnomalyDetector) -> None:
    rule = rule_of(detector)
    judged = [rule.judge(one) for one in results(detector)]
    assert [one and one.alarm for one in judged] == [True, False, None, None]
    assert judged[0] and judged[0].p_value <= detector.false_alarms
    assert judged[1] and judged[1].p_value > detector.false_alarms
    assert counts(results(detector), rule) == {"alarm": 1, "no alarm": 1, "out of domain": 1, "unreadable": 1}


def test_ranked_by_score_with_the_rest_behind(detector: AnomalyDetector) -> None:
    assert [one.number for one in ranked(reversed(results(detector)))] == [0, 1, 2, 3]


def test_a_threshold_that_most_films_exceed_is_doubted(detector: AnomalyDetector) -> None:
    rule = rule_of(detector)
    own = list(detector.origin.get("notes") or [])
    for flagged, not_flagged in ((19, 0), (10, 11), (0, 40), (0, 0)):
        groups = {"alarm": flagged, "no alarm": not_flagged, "out of domain": 90, "unreadable": 0}
        assert warnings_of(detector, groups, rule) == own
    (warning,) = warnings_of(detector, {"alarm": 15, "no alarm": 5}, rule)[len(own) :]
    assert warning.startswith("75 % of the films are flagged") and "`afire detect calibrate`" in warning
    assert f"{100 * rule.false_alarms:g} %" in warning
    assert warnings_of(detector, {"alarm": 15, "no alarm": 5}, rule_of(detector, false_alarms=0.5)) == own


def test_own_thresholds_are_stated(detector: AnomalyDetector) -> None:
    own = rule_of(detector, threshold=1.5)
    assert own.threshold == 1.5 and "your own threshold" in own.words
    assert own.false_alarms == pytest.approx(float(detector.calibration.p_values(1.5)))
    rate = rule_of(detector, false_alarms=0.5)
    assert rate.threshold == detector.calibration.threshold(0.5) and "50 %" in rate.words
    for threshold, false_alarms in ((1.0, 0.5), (float("nan"), None), (None, 0.0), (None, 1e-6)):
        with pytest.raises(UserError):
            rule_of(detector, threshold, false_alarms)


def test_csv_and_json(detector: AnomalyDetector, tmp_path: Path) -> None:
    rule = rule_of(detector)
    groups = counts(results(detector), rule)
    write_results(tmp_path, results(detector), rule, header_of(detector, rule, MODEL, groups))
    with (tmp_path / CSV).open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["file"] for row in rows] == ["'=cmd|' /C calc'!A0.png", "b.png", "'@sum.png", "new\nline.png"]
    assert rows[0]["alarm"] == "true" and rows[1]["alarm"] == "false" and rows[2]["alarm"] == ""
    assert float(rows[0]["score"]) == pytest.approx(detector.threshold + 1)
    assert rows[2]["score"] == "" and rows[2]["score_not_to_be_trusted"] == "99.0" and rows[2]["reason"]
    assert all(row["note"] == "Research software, not a medical device." for row in rows)
    stored = json.loads((tmp_path / JSON).read_text(encoding="utf-8"))
    assert stored["films"][0]["file"] == "=cmd|' /C calc'!A0.png", "JSON is data and stays as it is"
    assert stored["counts"]["alarm"] == 1
    assert stored["calibration_films"] == len(detector.calibration)
    assert stored["heat_scale_sd"] == {"low": detector.scale.low, "high": detector.scale.high}
    assert stored["note"] == "Research software, not a medical device."


def test_the_journal_comes_back_and_survives_a_torn_line(detector: AnomalyDetector, tmp_path: Path) -> None:
    made = results(detector)
    later = dataclasses.replace(made[1], score=7.0)
    text = json.dumps({"run": {"model": "x"}}) + "\n" + "".join(map(to_line, [*made, later])) + '{"number": 9, "fi'
    (tmp_path / "journal").write_text(text, encoding="utf-8")
    header, again = read_journal(tmp_path / "journal")
    assert header == {"model": "x"}
    assert again == [made[0], later, made[2], made[3]]
    (tmp_path / "journal").write_text("what\n", encoding="utf-8")
    with pytest.raises(UserError, match="journal"):
        read_journal(tmp_path / "journal")


def test_a_name_that_is_no_text_can_be_written() -> None:
    assert shown_name("film\udcff.png") == "film\\xff.png"
    assert shown_name("胸.png") == "胸.png"

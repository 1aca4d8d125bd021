"""The audit log: lines of JSON, films by keyed hashes, counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afire.errors import UserError
from afire.pacs.journal import Journal, Keyed


def test_hashes_need_the_key_of_the_spool(tmp_path: Path) -> None:
    one, again, other = Keyed(tmp_path / "a"), Keyed(tmp_path / "a"), Keyed(tmp_path / "b")
    assert one("film", "1.2.3") == again("film", "1.2.3") != other("film", "1.2.3")
    assert one("film", "1.2.3") != one("pixels", "1.2.3") and one("ab", "c") != one("a", "bc")
    assert (tmp_path / "a" / "key").stat().st_mode & 0o077 == 0


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        Keyed(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_damaged_key_is_said(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("")
    with pytest.raises(UserError, match="damaged"):
        Keyed(tmp_path)


def test_lines_and_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "audit.jsonl")
    journal.note("received", "abc", caller="EVIL\n{}\x1b[0m@127.0.0.1")
    journal.note("received", "def", reason="why", kind="sc")
    journal.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["received", "received"] and lines[1]["kind"] == "sc"
    assert lines[0]["caller"] == "EVIL?????0m@127.0.0.1" and lines[0]["time"].endswith("+00:00")
    assert journal.counts() == {"received": 2}
    Journal(tmp_path / "audit.jsonl").note("started")
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 3, "a log is never begun anew"

"""Reading the tables that come with a set: any defect is one message that names the file."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from afire.data.sources.disk import find_source, read_list, read_source
from afire.errors import UserError


def test_text_stays_text(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\ufeffid , value\n007,NA\n8,\n", encoding="utf-8")
    table = read_source(tmp_path / "t.csv", ["id", "value"])
    assert table["id"].tolist() == ["007", "8"]
    assert table["value"].tolist() == ["NA", ""]


def test_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(b"id,value\n" + b"1,2\n" * 1000)
    (tmp_path / "t.csv.gz").write_bytes(whole)
    assert len(read_source(tmp_path / "t.csv.gz", ["id"])) == 1000
    for broken in (whole[: len(whole) // 2], b"not gzip at all", whole[:-6] + b"\0" * 6):
        (tmp_path / "t.csv.gz").write_bytes(broken)
        with pytest.raises(UserError, match=r"t\.csv\.gz is not a whole gzip file; download it again"):
            read_source(tmp_path / "t.csv.gz", ["id"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable CSV"),
        (b"a,b\n1,2\n1,2,3,4\n", "not a readable CSV"),
        (b"a,b\n1,2,3\n", "not a readable CSV"),
        ("a\nü\n".encode("latin-1"), r"t.csv is not UTF-8 text \(byte 2\); save it as CSV UTF-8"),
        (b"a;b\n1;2\n", "t.csv has semicolons between its columns; save it with commas"),
        (b"a\tb\n1\t2\n", "t.csv has tabs between its columns; save it with commas"),
        (b"name,b\n1,2\n", "t.csv has no column 'a'; its columns are name, b"),
    ],
)
def test_broken_tables(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_source(tmp_path / "t.csv", ["a"])
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the table is missing: looked for a.csv \(or b.csv\) in "):
        find_source(tmp_path, ["a.csv", "b.csv"], "the table")
    (tmp_path / "b.csv").touch()
    assert find_source(tmp_path, ["a.csv", "b.csv"], "the table") == tmp_path / "b.csv"


def test_lists(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_bytes(b"a.png\r\n\r\nb.png")
    assert read_list(tmp_path / "l.txt") == ["a.png", "b.png"]
    (tmp_path / "l.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file"):
        read_list(tmp_path / "l.txt")

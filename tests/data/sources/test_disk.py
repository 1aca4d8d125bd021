"""Listing a folder: everything that is a film and may be named, nothing else."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pandas as pd
import pytest

from afire.data.sources.disk import by_name, by_stem, keep_present, list_films, require_films, strip_ending, subfolder
from afire.errors import UserError


def test_films_are_found_in_subfolders_and_sorted(tmp_path: Path, touch) -> None:
    touch(tmp_path, "b/2.PNG", "b/1.jpg", "a.dcm", "b/c/x.jpeg", "notes.txt", "b/list.csv", "no_ending")
    assert list_films(tmp_path) == ["a.dcm", "b/1.jpg", "b/2.PNG", "b/c/x.jpeg"]
    assert list_films(tmp_path, "b/c") == ["b/c/x.jpeg"]


def test_hidden_files_and_resource_forks_are_passed_over(tmp_path: Path, touch) -> None:
    touch(tmp_path, "a.png", "._a.png", ".cache/b.png", "__MACOSX/c.png")
    assert list_films(tmp_path) == ["a.png"]


def test_dicom_without_ending_is_found_by_content(tmp_path: Path) -> None:
    (tmp_path / "1.2.840.17").write_bytes(b"\0" * 128 + b"DICM")
    (tmp_path / "README").write_bytes(b"hello" * 50)
    assert list_films(tmp_path) == []
    assert list_films(tmp_path, look_inside=True) == ["1.2.840.17"]


def test_links_out_of_the_root_are_left_out_with_a_warning(
    tmp_path: Path, touch, caplog: pytest.LogCaptureFixture
) -> None:
    touch(tmp_path, "outside/x.png", "root/a.png", "root/sub/b.png")
    root = tmp_path / "root"
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "one.png").symlink_to(tmp_path / "outside" / "x.png")
    (root / "within.png").symlink_to(root / "a.png")
    (root / "again").symlink_to(root / "sub")
    (root / "loop").symlink_to(root)
    with caplog.at_level(logging.WARNING, "afire"):
        assert list_films(root) == ["a.png", "sub/b.png", "within.png"]
    assert "a link that leaves the root" in caplog.text and "and 1 more" in caplog.text


def test_names_that_no_manifest_can_hold(tmp_path: Path, touch, caplog: pytest.LogCaptureFixture) -> None:
    touch(tmp_path, "a.png", "new\nline.png", "ü.png", "back\\slash.png", "c:drive.png")
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")).write_bytes(b"")
    except OSError:
        pytest.skip("this file system refuses such names itself")
    with caplog.at_level(logging.WARNING, "afire"):
        assert list_films(tmp_path) == ["a.png", "ü.png"]
    assert "a name that no manifest can hold (and 3 more); rename it" in caplog.text
    assert len(list_films(tmp_path, any_name=True)) == 6


def test_a_relative_root(tmp_path: Path, touch, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "set/images/a.png")
    monkeypatch.chdir(tmp_path)
    assert list_films(Path("set")) == ["images/a.png"]
    assert list_films(Path("set"), "images") == ["images/a.png"]
    assert list_films(Path("set"), "set/images") == ["images/a.png"], "also as typed from where the user stands"
    monkeypatch.chdir(tmp_path / "set")
    assert list_films(Path(), "images") == ["images/a.png"]


def test_subfolders_stay_inside(tmp_path: Path) -> None:
    (tmp_path / "root" / "in").mkdir(parents=True)
    root = tmp_path / "root"
    assert subfolder(root, root / "in") == root / "in"
    for wrong, message in (("../x", "leaves"), (tmp_path, "leaves"), ("missing", "missing does not exist")):
        with pytest.raises(UserError, match=message):
            subfolder(root, wrong)
    with pytest.raises(UserError, match=r"root .*nowhere does not exist"):
        list_films(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no films in .*in or its subfolders"):
        require_films([], root, "in")


def test_endings() -> None:
    assert strip_ending("a/b.JPG") == "a/b"
    assert strip_ending("1.2.276.0.7230010.850819.dcm") == "1.2.276.0.7230010.850819"
    assert strip_ending("1.2.276.0.7230010.850819") == "1.2.276.0.7230010.850819"


def test_names_are_found_once(tmp_path: Path) -> None:
    assert by_stem(["a.jpg", "a.png", "b/a.jpg"]) == {"a": "a.png", "b/a": "b/a.jpg"}
    assert by_name(["x/a.jpg", "y/b.png"], tmp_path) == {"a": "x/a.jpg", "b": "y/b.png"}
    with pytest.raises(UserError, match=r"holds a twice, as .*; choose one folder of films with --images"):
        by_name(["x/a.jpg", "y/a.png"], tmp_path)


def test_rows_without_a_film_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = pd.DataFrame({"image": ["a", "b", "c"], "n": [1, 2, 3]})
    with caplog.at_level(logging.INFO, "afire"):
        kept = keep_present(table, pd.Series([None, "x/b.png", "x/c.png"]), tmp_path, "list.csv")
    assert kept["image"].tolist() == ["x/b.png", "x/c.png"] and kept["n"].tolist() == [2, 3]
    assert f"2 of 3 listed films are in {tmp_path}; missing: a\n" in caplog.text
    with pytest.raises(UserError, match=r"none of the 3 films listed in list.csv is in .*; the first looked for is a"):
        keep_present(table, pd.Series([None] * 3), tmp_path, "list.csv")

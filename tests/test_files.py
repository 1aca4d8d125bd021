"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import stat
from pathlib import Path
from typing import IO

import pytest

from afire.errors import UserError
from afire.files import (
    LOCK,
    FolderBusyError,
    _warn_of_no_locks,
    folder_lock,
    making_sense_of,
    read_json,
    remove_unfinished,
    require_file,
    require_folder,
    require_own,
    sha256_file,
    write_atomic,
    write_json,
    write_text,
)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    write_text(target, "old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("stopped halfway")

    with pytest.raises(RuntimeError):
        write_atomic(target, fail)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_written_files_are_readable_by_others(tmp_path: Path) -> None:
    write_text(tmp_path / "deep/a.txt", "x")
    ordinary = tmp_path / "b.txt"
    ordinary.write_text("x")
    assert stat.S_IMODE((tmp_path / "deep/a.txt").stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


def test_json_round_trips_and_nan_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"é": [1, None]})
    assert read_json(tmp_path / "a.json") == {"é": [1, None]}
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "b.json", float("nan"))
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(tmp_path / "c.json")
    with pytest.raises(UserError, match="does not exist"):
        read_json(tmp_path / "d.json")


def test_a_lock_is_released(tmp_path: Path) -> None:
    with folder_lock(tmp_path, "the pack"), pytest.raises(UserError), folder_lock(tmp_path, "the pack"):
        pass
    with folder_lock(tmp_path, "the pack"):
        pass


def test_nothing_tells_of_a_lock_afterwards(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="refused"), folder_lock(tmp_path / "new" / "below", "the run in"):
        raise UserError("refused")
    assert not any(tmp_path.iterdir()), "folders that were made for the lock alone"
    with folder_lock(tmp_path / "new", "the run in"):
        (tmp_path / "new" / "data.json").touch()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["data.json"]


def test_a_lock_that_is_removed_while_it_is_opened_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder lets go between our opening and our locking: what we have open is then nobody's file any more."""
    flock, calls = fcntl.flock, []

    def late(stream: IO[str], how: int) -> None:
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(how)
        flock(stream, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with folder_lock(tmp_path, "the run in"):
        assert len(calls) == 2 and (tmp_path / LOCK).exists()
        with pytest.raises(FolderBusyError, match="is writing the run in"), folder_lock(tmp_path, "the run in"):
            pass


def test_a_file_system_without_locks_is_said_once_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    _warn_of_no_locks.cache_clear()
    monkeypatch.setattr(fcntl, "flock", unsupported)
    for name in ("first", "second"):
        with folder_lock(tmp_path / name, "the run in"):
            (tmp_path / name / "data.json").touch()
        assert [path.name for path in (tmp_path / name).iterdir()] == ["data.json"]
    assert caplog.text.count("folders cannot be locked here (Operation not supported)") == 1


def test_paths_of_the_wrong_kind_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("abc")
    with pytest.raises(UserError, match="is a file, not a folder"):
        require_folder(tmp_path / "f", "root")
    with pytest.raises(UserError, match="is a folder, not a file"):
        require_file(tmp_path, "manifest")
    with pytest.raises(UserError, match="does not exist"):
        require_file(tmp_path / "g", "manifest")
    assert sha256_file(tmp_path / "f").startswith("ba7816bf")


def test_a_full_disk_is_said_of_the_file_and_not_of_its_temporary_name(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        write_atomic(tmp_path / "a.txt", fail)
    assert caught.value.filename == str(tmp_path / "a.txt")


def test_who_takes_the_lock_removes_what_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / ".part-step/below").mkdir(parents=True)
    for name in (".part-1.json", "whole.json", "inside/.part-2.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with folder_lock(tmp_path, "the pack"):
        assert {path.name for path in tmp_path.iterdir()} == {"whole.json", "inside", ".lock"}
    assert (tmp_path / "inside/.part-2.json").exists(), "another folder may have another writer"
    remove_unfinished(tmp_path / "inside")
    assert not any((tmp_path / "inside").iterdir())
    remove_unfinished(tmp_path / "nowhere")


def test_the_folder_of_another_command_is_refused(tmp_path: Path) -> None:
    require_own(tmp_path / "new", "data.json", ["README.md"])
    (tmp_path / "log.txt").touch()
    require_own(tmp_path, "data.json", ["README.md"])
    (tmp_path / "README.md").touch()
    with pytest.raises(UserError, match=r"already holds README\.md"):
        require_own(tmp_path, "data.json", ["README.md"])
    (tmp_path / "data.json").touch()
    require_own(tmp_path, "data.json", ["README.md"])
    with pytest.raises(UserError, match="already holds a run"):
        require_own(tmp_path, "detector.json")


def test_odd_values_in_a_file_are_a_message(tmp_path: Path) -> None:
    for value in ({}, [], None, "text"):
        message = pytest.raises(UserError, match=r"a\.json is damaged or not written by afire .*; write it again\.")
        with message, making_sense_of(tmp_path / "a.json", "write it again"):
            value["missing"]["key"]  # type: ignore[index, call-overload]

"""Files that a power cut does not undo, past the system's memory of files where it can be."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from afire.pacs import sync
from afire.pacs.sync import write_synced

SIZES = (0, 1, sync._BLOCK, sync._CHUNK, 2 * sync._CHUNK + 5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("direct", [False, True])
def test_what_is_written_is_read(tmp_path: Path, size: int, direct: bool) -> None:
    data = os.urandom(size)
    write_synced(tmp_path / "film", data, direct=direct)
    assert (tmp_path / "film").read_bytes() == data
    assert (tmp_path / "film").stat().st_mode & 0o777 == 0o600


def test_a_name_is_not_taken_from_another(tmp_path: Path) -> None:
    (tmp_path / "film").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_synced(tmp_path / "film", b"yours", direct=True)
    assert (tmp_path / "film").read_bytes() == b"mine"


@pytest.mark.skipif(not sync._DIRECT, reason="there is no such flag here")
@pytest.mark.parametrize("refusing", ["open", "write"])
def test_file_systems_that_do_not_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: str) -> None:
    real_open, real_write = os.open, os.write
    handles: set[int] = set()

    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        is_direct = bool(flags & sync._DIRECT)
        if is_direct and refusing == "open":
            real_write(handle := real_open(path, flags & ~sync._DIRECT, mode), b"")
            os.close(handle)  # as some do, it is made all the same
            raise OSError(errno.EINVAL, "no")
        handle = real_open(path, flags & ~sync._DIRECT, mode)
        (handles.add if is_direct else handles.discard)(handle)
        return handle

    def write(handle: int, data: bytes) -> int:
        if handle in handles:
            raise OSError(errno.EINVAL, "no")
        return real_write(handle, data)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "write", write)
    write_synced(tmp_path / "film", b"a film", direct=True)
    assert (tmp_path / "film").read_bytes() == b"a film"


@pytest.mark.skipif(not sync._DIRECT, reason="there is no such flag here")
def test_a_descriptor_is_closed_once_when_there_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed twice, it could be the descriptor that another thread was given in between."""
    real_open, real_close = os.open, os.close
    opened, closed = list[int](), list[int]()

    def open_once(path: Path, flags: int, mode: int = 0o777) -> int:
        if opened:
            raise OSError(errno.EMFILE, "too many")
        opened.append(real_open(path, flags & ~sync._DIRECT, mode))
        return opened[0]

    def refuse(_handle: int, _data: bytes) -> None:
        raise OSError(errno.EINVAL, "no")

    def close(handle: int) -> None:
        closed.append(handle)
        real_close(handle)

    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        patch.setattr(os, "open", open_once)
        patch.setattr(os, "close", close)
        patch.setattr(sync, "_write_direct", refuse)
        write_synced(tmp_path / "film", b"a film", direct=True)
    assert caught.value.errno == errno.EMFILE
    assert closed == opened and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("written", [0, 100])
def test_a_disk_that_fills_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    def full(handle: int, data: bytes) -> int:
        if not written:
            raise OSError(errno.ENOSPC, "full")
        return written

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError) as caught:
        write_synced(tmp_path / "film", bytes(5000), direct=True)
    assert caught.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []


def test_it_is_synced_before_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    write_synced(tmp_path / "film", bytes(5000), direct=True)
    assert sizes == [5000], "whole, and cut to its own length"

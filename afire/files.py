"""Files appear whole or not at all: write beside, fsync, ``os.replace``. And hashes of what was written."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from afire.errors import UserError

_UNFINISHED = ".part-"  # start of the name of every unfinished file
LOCK = ".lock"  # in a folder while a process writes there; left behind only by a kill
_TRIES = 10  # at a lock whose file comes and goes

logger = logging.getLogger("afire")


@contextmanager
def names_path(path: Path) -> Iterator[None]:
    """Errors of writing to ``path`` name it: the error of a write to a full disk carries no file name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` on a temporary file in ``path``'s folder, then move it into place in one step.

    The temporary file carries the suffix of ``path`` because some writers choose the format by it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED, suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        with names_path(path):
            write(temporary)
            temporary.chmod(ORDINARY_MODE)  # mkstemp makes 0600; the result should be readable like any other file
            with temporary.open("rb+") as stream:
                os.fsync(stream.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left half-written in ``folder`` (not below it). Only where nobody else writes."""
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _ordinary_mode() -> int:
    """What ``open`` would give a new file. The umask can only be read by setting it: once, before there are threads."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


ORDINARY_MODE = _ordinary_mode()


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_atomic(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically. NaN is not JSON and raises."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or broken one is a :class:`UserError`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); it may be truncated, or not written by afire.") from None


@contextmanager
def making_sense_of(path: Path, remedy: str) -> Iterator[None]:
    """Turn errors in reading values from ``path`` into one message: the file is damaged."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{path} is damaged or not written by afire ({type(error).__name__}: {reason}); {remedy}."
        ) from None


def sha256_text(text: str) -> str:
    """Hex SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def sha256_bytes(data: bytes) -> str:
    """Hex SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def require_folder(path: Path, description: str) -> Path:
    """``path`` if it is an existing folder, else a message that starts with ``description``."""
    if not path.exists():
        raise UserError(f"{description} {path} does not exist; check the path.")
    if not path.is_dir():
        raise UserError(f"{description} {path} is a file, not a folder.")
    return path


def require_file(path: Path, description: str) -> Path:
    """``path`` if it is an existing file, else a message that starts with ``description``."""
    if not path.exists():
        raise UserError(f"{description} {path} does not exist; check the path.")
    if not path.is_file():
        raise UserError(f"{description} {path} is a folder, not a file.")
    return path


_MARKS = {  # a file that only one command writes -> what its folder holds
    "data.json": "a run",
    "detector.json": "a detector",
    "manifest.json": "a bundle",
    "begun.json": "a pack",
    "result.json": "a result",
    "results.jsonl": "results of `afire detect run`",
    "phantom.json": "a phantom",
}


def require_own(out: Path, mark: str, writes: Iterable[str] = ()) -> None:
    """Refuse a folder that another command has filled: what it wrote there might be overwritten.

    ``mark`` is the file by which this command knows its own folders. A folder without it must not
    hold any of the files in ``writes`` either: they belong to someone else.
    """
    for filename, content in _MARKS.items():
        if filename != mark and (out / filename).exists():
            raise UserError(f"{out} already holds {content}; choose another --out.")
    theirs = [name for name in writes if (out / name).exists()] if not (out / mark).exists() else []
    if theirs:
        raise UserError(f"{out} already holds {theirs[0]}, which would be overwritten; choose another --out.")


class FolderBusyError(UserError):
    """Another process holds the folder, perhaps only for a moment."""


@contextmanager
def folder_lock(folder: Path, description: str) -> Iterator[None]:
    """Hold ``folder`` for this process; a second one fails at once. The lock ends with its process.

    What a killed holder left half-written in the folder is removed. Afterwards the lock file is removed, and so are the
    folders that were made for it if nothing was written there.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    stream = _take_lock(folder / LOCK, f"{description} {folder}")
    try:
        if stream is not None:
            remove_unfinished(folder)
        yield
    finally:
        if stream is not None:
            (folder / LOCK).unlink(missing_ok=True)  # while held: a process that has it open sees it gone
            stream.close()
        remove_empty(new_folders)


def _take_lock(path: Path, description: str) -> TextIO | None:
    """The file ``path``, open and locked; None where files cannot be locked, which is logged once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        _warn_of_no_locks("this system has none that afire knows")
        return None
    for _ in range(_TRIES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = path.open("w")
        except FileNotFoundError:  # a holder who wrote nothing has just removed the folder
            continue
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            break
        except OSError as error:  # a network file system without locks
            stream.close()
            path.unlink(missing_ok=True)
            _warn_of_no_locks(error.strerror or str(error))
            return None
        if _is_at(path, stream):
            return stream
        stream.close()  # its holder removed it before we could lock it
    raise FolderBusyError(f"another process is writing {description}; wait for it or choose another folder.")


def _is_at(path: Path, stream: TextIO) -> bool:
    """Whether the open file is the one that is at ``path`` now."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders, from the innermost outwards, as far as they are empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # something was written there
            return


@cache
def _warn_of_no_locks(reason: str) -> None:
    logger.warning("folders cannot be locked here (%s): let no two commands write one folder at the same time", reason)

"""A folder that appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from afire.errors import UserError

_MARKERS = ("manifest.json", "preprocessing.json")  # what every export leaves: only such a folder is replaced


def check_target(out: Path, force: bool) -> None:
    """Refuse a place that holds something, and with ``force`` still one that no export made."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; --out needs a folder.")
    if not out.exists() or not any(out.iterdir()):
        return
    if not force:
        raise UserError(f"{out} already holds something; add --force to replace an export, or choose another --out.")
    if not any((out / marker).is_file() for marker in _MARKERS):
        raise UserError(f"{out} holds something that afire did not export, and --force does not delete it.")


@contextmanager
def new_folder(out: Path, force: bool) -> Iterator[Path]:
    """A folder beside ``out`` to write into; it becomes ``out`` when the body ends well, else it is gone."""
    check_target(out, force)
    final = out.resolve()
    part, old = final.with_name(f".part-{final.name}"), final.with_name(f".old-{final.name}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.replace(old)
        part.replace(final)
        shutil.rmtree(old, ignore_errors=True)
    except SafetensorError as error:  # a full disk, reported in its own way
        raise UserError(f"cannot write {out}: {error}; free space or choose another folder.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)

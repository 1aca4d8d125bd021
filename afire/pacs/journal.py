"""What the service did: an audit log of JSON lines, and the counts that `/metrics` shows.

Both name a film only by a keyed hash of its SOP Instance UID. With the key one can check whether a line is about a
given film; without it the hash says nothing. Only the fields of :meth:`Journal.note` can be written, and none of them
is a tag of a film.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
from collections import Counter
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from threading import Lock

from afire.errors import UserError
from afire.files import write_atomic

KEY, AUDIT = "key", "audit.jsonl"
_HASH_DIGITS = 32
_UNUSUAL = re.compile(r"[^A-Za-z0-9 ._:@-]")  # of what a caller says about himself


class Keyed:
    """Hashes with the spool's own key, which is created with the spool."""

    def __init__(self, spool: Path) -> None:
        path = spool / KEY
        if not path.exists():
            _require_ours_or_empty(spool)
            write_atomic(path, _write_key)
            path.chmod(0o600)
        self._key = path.read_bytes().strip()
        if len(self._key) < _HASH_DIGITS:
            raise UserError(f"{path} is damaged; a spool without its key is of no use: choose another --spool.")

    def __call__(self, *parts: bytes | str) -> str:
        code = hmac.new(self._key, digestmod=sha256)
        for part in parts:
            data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
            code.update(len(data).to_bytes(8, "big"))  # so that no two lists of parts are the same bytes
            code.update(data)
        return code.hexdigest()[:_HASH_DIGITS]


def _require_ours_or_empty(spool: Path) -> None:
    if spool.exists() and any(entry.name != ".lock" for entry in spool.iterdir()):
        raise UserError(f"--spool {spool} holds other files; choose an empty folder, or a spool of `afire serve`.")
    spool.mkdir(mode=0o700, parents=True, exist_ok=True)


def _write_key(path: Path) -> None:
    path.write_text(secrets.token_hex(32) + "\n", encoding="ascii")


class Journal:
    """The audit log and the counts. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lost, self._is_torn = 0, False  # lines that a full disk did not take; whether it took a part of one

    def note(self, event: str, film: str = "", *, caller: str = "", reason: str = "", kind: str = "") -> None:
        """Write one line; it is with the system, not synced, when this returns. ``film`` is a keyed hash.

        A full disk must not end the service: lines that could not be written are counted, and their number is the
        first line that is written when there is space again.
        """
        named = {"film": film, "caller": _UNUSUAL.sub("?", caller)[:80], "reason": reason, "kind": kind}
        line = {"time": _now(), "event": event, **{name: value for name, value in named.items() if value}}
        with self._lock:
            self._counts[event] += 1
            if self._lost and self._write({"time": _now(), "event": "lines lost", "reason": f"{self._lost} lines"}):
                self._lost = 0
            if self._lost or not self._write(line):
                self._lost += 1
                self._counts["lines lost"] += 1

    def _write(self, line: dict[str, str]) -> bool:
        """Whether the disk took the whole line."""
        data = ("\n" if self._is_torn else "").encode() + json.dumps(line, ensure_ascii=True).encode() + b"\n"
        try:
            written = os.write(self._handle, data)
        except OSError:
            return False
        self._is_torn = written < len(data)
        return not self._is_torn

    def counts(self) -> dict[str, int]:
        """How often each event happened since the start."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def close(self) -> None:
        """A line that comes later is lost; it must not go to a file that has the same number by then."""
        with self._lock:
            os.close(self._handle)
            self._handle = -1


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")

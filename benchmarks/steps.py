"""What the search and the study share: settings laid over each other, and commands whose processor time is told."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Settings in sections, ``change`` over ``base``."""
    both = {section: dict(values) for section, values in base.items()}
    for section, values in change.items():
        both[section] = {**both.get(section, {}), **values}
    return both


def call(words: Sequence[object], log: Path, folder: Path | None = None) -> tuple[int, float]:
    """Run a command, one thread unless OMP_NUM_THREADS says otherwise; its exit code and its processor seconds."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with log.open("a") as stream:
        process = subprocess.Popen(
            [str(word) for word in words], cwd=folder, stdout=stream, stderr=stream, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)  # tells the time of this child alone
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime

"""Shared by the search and the study: merging settings, one thread per step, and when a run is finished."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# One thread unless the user says otherwise: several steps run side by side.
ENVIRONMENT = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Settings in sections, ``change`` over ``base``."""
    both = {section: dict(values) for section, values in base.items()}
    for section, values in change.items():
        both[section] = {**both.get(section, {}), **values}
    return both


def is_finished(summary: Path) -> bool:
    """Whether the ``summary.json`` of a pre-training says so; one that was stopped writes it as well."""
    return summary.exists() and bool(json.loads(summary.read_text(encoding="utf-8"))["status"] == "finished")

"""What the paper prints, from ``presets/published.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PUBLISHED = Path(__file__).parents[2] / "presets" / "published.yaml"
OURS = "AFiRe"  # the paper's own row


@dataclass(frozen=True)
class Column:
    """One set's part of a table: rows of methods, numbers as shares of 1 by their column's name."""

    source: str
    title: str
    rows: Mapping[str, Mapping[str, float]]


@cache
def published() -> Mapping[str, Any]:
    """The whole file."""
    found: Mapping[str, Any] = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    return found


def column(table: str, name: str | None) -> Column | None:
    """The part of ``table`` about the set ``name``; None where the paper has none."""
    if name is None:
        return None
    raw = published()[table]
    part = raw[name]
    rows = {
        method: {str(key): value / 100 for key, value in numbers.items()} for method, numbers in part["rows"].items()
    }
    return Column(str(raw["source"]), str(part["title"]), rows)


def protocol() -> Mapping[str, Any]:
    """How the paper's numbers were made."""
    found: Mapping[str, Any] = published()["protocol"]
    return found

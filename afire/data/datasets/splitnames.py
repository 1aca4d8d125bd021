"""The many names of train, val and test."""

from __future__ import annotations

_NAMES = {
    "train": ("train", "training", "trn"),
    "val": ("val", "valid", "validate", "validation", "dev"),
    "test": ("test", "testing", "tst"),
}
SPLIT_OF = {name: split for split, names in _NAMES.items() for name in names}
"""``validation`` -> ``val``, for names in lower case."""


def split_of(name: str) -> str | None:
    """``train``, ``val`` or ``test`` for one of their usual names, whatever its case; else None."""
    return SPLIT_OF.get(name.strip().lower())

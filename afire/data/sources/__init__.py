"""Builders of manifests, one for each kind of dataset: ``build("nih", root)``.

Every builder takes the root first and its own options by keyword, leaves out listed films that are not on disk (and
says how many), and returns a :class:`~afire.data.manifest.Manifest`. What it did is logged at level INFO.

Knows the lists and folders of each set; knows no pixels.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from afire.data.manifest import Manifest
from afire.data.sources.chexpert import build_chexpert, build_mimic
from afire.data.sources.folders import build_childcxr, build_classes, build_folder, build_lungmasks
from afire.data.sources.nih import build_nih, build_rsna, build_siim
from afire.data.sources.table import Columns, build_table
from afire.errors import UserError

__all__ = [
    "BUILDERS",
    "Columns",
    "build",
    "build_chexpert",
    "build_childcxr",
    "build_classes",
    "build_folder",
    "build_lungmasks",
    "build_mimic",
    "build_nih",
    "build_rsna",
    "build_siim",
    "build_table",
]

BUILDERS: Mapping[str, Callable[..., Manifest]] = {
    "folder": build_folder,
    "classes": build_classes,
    "csv": build_table,
    "childcxr": build_childcxr,
    "nih": build_nih,
    "chexpert": build_chexpert,
    "mimic": build_mimic,
    "rsna": build_rsna,
    "siim": build_siim,
    "lungmasks": build_lungmasks,
    "shenzhen": build_lungmasks,
}
"""Builder functions by the name of their kind."""


def build(kind: str, root: Path, **options: Any) -> Manifest:
    """The manifest of a dataset of ``kind`` in ``root``; ``options`` are those of the builder."""
    if kind not in BUILDERS:
        close = difflib.get_close_matches(kind, BUILDERS, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; kinds are {', '.join(BUILDERS)}."
        raise UserError(f"there is no dataset kind {kind!r}{hint}")
    return BUILDERS[kind](root, **options)

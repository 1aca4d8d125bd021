"""Class folders: ``class/film.png``, or ``split/class/film.png`` with folders called train, val and test."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from afire.data.datasets.disk import list_films, require_films
from afire.data.datasets.patients import patients_from_pattern
from afire.data.datasets.source import about
from afire.data.datasets.splitnames import split_of
from afire.data.manifest import LABEL_PREFIX, Manifest, make_manifest
from afire.errors import UserError

logger = logging.getLogger(__name__)

NORMAL_RULE = "1 in the normal class, 0 in the others; unknown when no class is the normal one"
_NORMAL_NAMES = ("normal", "no finding", "no_finding", "nofinding", "healthy")


def build_classes(root: Path, *, normal_class: str | None = None, patient_pattern: str | None = None) -> Manifest:
    """Each class folder is a label, 1 for its own films and 0 for the others'.

    The normal class (``normal_class``, or a folder called normal or no finding) fills the column ``normal`` instead:
    as a label it would only say the same twice.
    """
    films = require_films(list_films(root), root)
    placed = _place(films, root)
    classes = sorted(placed["class"].unique())
    normal = _normal_class(classes, normal_class)
    table = placed[["image", "split"]].copy()
    table["patient"] = patients_from_pattern(table["image"].tolist(), patient_pattern)
    if normal is not None:
        table["normal"] = (placed["class"] == normal).astype("float64")
    for name in classes:
        if name != normal:
            table[LABEL_PREFIX + name] = (placed["class"] == name).astype("float64")
    options = {"normal_class": normal, "patient_pattern": patient_pattern}
    return make_manifest(table, root, about("classes", NORMAL_RULE, **options))


def _place(films: Sequence[str], root: Path) -> pd.DataFrame:
    """Columns image, split and class; films that lie outside the layout are counted and left out."""
    parts = [film.split("/") for film in films]
    has_splits = any(len(part) > 2 and split_of(part[0]) for part in parts)
    rows = []
    for film, part in zip(films, parts, strict=True):
        folders = part[:-1]
        split = split_of(folders[0]) if has_splits and folders else ""
        if has_splits:
            folders = folders[1:]
        if folders and split is not None:
            rows.append((film, split, folders[0]))
    layout = "split/class/film" if has_splits else "class/film"
    if not rows:
        raise UserError(f"{root} holds no class folders, only films; use `afire data build folder` for a flat folder.")
    if len(rows) < len(films):
        left_out = len(films) - len(rows)
        logger.warning("left out: %s films in %s that do not lie in %s", f"{left_out:,}", root, layout)
    return pd.DataFrame(rows, columns=["image", "split", "class"])


def _normal_class(classes: Sequence[str], wanted: str | None) -> str | None:
    if wanted is not None:
        matching = [name for name in classes if name.lower() == wanted.lower()]
        exact = wanted if wanted in classes else next(iter(matching), None)
        if exact is None:
            raise UserError(f"there is no class folder {wanted!r}; the classes are {', '.join(classes)}.")
        return exact
    found = next((name for name in classes if name.lower() in _NORMAL_NAMES), None)
    if found is None:
        logger.info("no class is called normal; name it with --normal-class to fill the column `normal`")
    return found

"""Several manifests as one, for a pre-training on more than one set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from afire.data.manifest import META_PREFIX, Manifest, clean_paths, make_manifest
from afire.data.splits import Split
from afire.errors import UserError

SOURCE = f"{META_PREFIX}source"


def listed_as(manifest: Manifest, split: Split) -> Manifest:
    """The manifest with a split file's parts as its lists; films that are in no part have an empty split."""
    table = manifest.table.copy()
    table["split"] = ""
    for part, rows in split.rows(manifest).items():
        table.loc[rows, "split"] = part
    return Manifest(table, manifest.root, {**manifest.info, "split": split.hash})


def join_manifests(parts: Mapping[str, Manifest]) -> Manifest:
    """The films of all ``parts``, by name, under the folder that all their roots share.

    Patients are told apart by the set's name: ``12`` of one set is not ``12`` of another. A finding that a set does not
    label is unknown in its films, not absent. Official splits, boxes and masks stay.
    """
    if len(parts) < 2:
        raise UserError("joining needs two manifests or more; give --data once for each.")
    for name, part in parts.items():
        if SOURCE in part.table:
            raise UserError(f"{name} is itself joined; join the sets that it was made of.")
    root = _common_root(parts)
    tables = [_moved(name, part, root) for name, part in parts.items()]
    table = pd.concat(tables, ignore_index=True)
    info = {
        "dataset": "joined",
        "sources": [{"name": name, "films": len(part), "hash": part.hash} for name, part in parts.items()],
        "normal": "; ".join(f"{name}: {part.info.get('normal', 'not said')}" for name, part in parts.items()),
    }
    return make_manifest(table, root, info)


def _common_root(parts: Mapping[str, Manifest]) -> Path:
    roots = {name: part.root.resolve() for name, part in parts.items()}
    try:
        common = Path(os.path.commonpath(list(roots.values())))
    except ValueError:  # different drives
        common = Path(Path.cwd().anchor)
    if common == Path(common.anchor):
        places = ", ".join(f"{name} in {root}" for name, root in roots.items())
        raise UserError(f"the films share no folder ({places}); move or link them below one folder and build again.")
    return common


def _moved(name: str, part: Manifest, root: Path) -> pd.DataFrame:
    """The table of one set with paths from the common root and patients that carry the set's name."""
    table = part.table.copy()
    prefix = part.root.resolve().relative_to(root).as_posix()
    for column in ("image", "mask"):
        moved = clean_paths(prefix + "/" + table[column], column) if prefix != "." else table[column]
        table[column] = moved.where(table[column] != "", "")
    table["patient"] = name + ":" + part.table["patient"]
    table[SOURCE] = name
    return table

"""ChildCXR (Kermany et al. 2018): paediatric films, normal or pneumonia by bacteria or virus.

The official split is train and test. Kaggle's copy moved 16 training films into a folder ``val``; they go back to
train, because eight films of a class validate nothing. A ``manifest.csv`` that tells the size of the original files is
used where there is one: size alone separates the classes of this set, so every table about it needs that baseline.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pandas as pd

from afire.data.datasets.disk import list_films, require_films
from afire.data.datasets.source import about, read_source
from afire.data.manifest import LABEL_PREFIX, META_PREFIX, Manifest, is_manifest, make_manifest
from afire.errors import UserError
from afire.files import require_folder

logger = logging.getLogger(__name__)

NORMAL_RULE = "1 in NORMAL, 0 in PNEUMONIA"
_SPLITS = {"train": "train", "val": "train", "test": "test"}
_CLASSES = ("NORMAL", "PNEUMONIA")
_OFFICIAL = {("train", 1.0): 1349, ("train", 0.0): 3883, ("test", 1.0): 234, ("test", 0.0): 390}
# person12_virus_34.jpeg; IM-0115-0001.jpeg; NORMAL2-IM-1427-0001.jpeg. What follows the group counts its films.
_GROUP = re.compile(r"^(person\d+_(?:virus|bacteria)|(?:NORMAL2-)?IM-\d+)[-_.]")


def build_childcxr(root: Path) -> Manifest:
    """``{train,test,val}/{NORMAL,PNEUMONIA}`` in ``root`` or in ``root/chest_xray``, with the official split."""
    base = _base(root)
    parts = [(base / part).relative_to(root) for part in _SPLITS if (base / part).is_dir()]
    films = [film for part in parts for film in list_films(root, part)]
    table = _from_names(require_films(films, root), root)
    table = _with_sizes(table, base)
    _say_counts(table)
    return make_manifest(table, root, about("childcxr", NORMAL_RULE))


def _base(root: Path) -> Path:
    require_folder(root, "root")
    for folder in (root, root / "chest_xray"):
        if all((folder / part / name).is_dir() for part in ("train", "test") for name in _CLASSES):
            return folder
    raise UserError(
        f"{root} does not look like ChildCXR: looked for train/NORMAL, train/PNEUMONIA, test/NORMAL and test/PNEUMONIA "
        "in it and in its folder chest_xray."
    )


def _from_names(films: list[str], root: Path) -> pd.DataFrame:
    """Split, class, kind of pneumonia and patient from ``.../split/class/name``."""
    parts = [film.split("/") for film in films]
    table = pd.DataFrame({"image": films, "split": [part[-3] for part in parts], "class": [part[-2] for part in parts]})
    names = pd.Series([part[-1] for part in parts])
    known = table["class"].isin(_CLASSES) & table["split"].isin(list(_SPLITS))
    if not known.all():
        example = table["image"][~known].iloc[0]
        raise UserError(f"{root / example} is not in a folder NORMAL or PNEUMONIA of train, val or test; move it away.")
    groups = names.str.extract(_GROUP.pattern, expand=False).fillna("")
    if (groups == "").any():
        logger.warning(
            "%s films, such as %s, do not follow the naming of the set: are they part of it?",
            f"{int((groups == '').sum()):,}",
            table["image"][groups == ""].iloc[0],
        )
    pneumonia = table["class"] == "PNEUMONIA"
    named = names.str.extract(r"^person\d+_(virus|bacteria)_", expand=False)
    table["normal"] = np.where(pneumonia, 0.0, 1.0)
    table[LABEL_PREFIX + "Pneumonia"] = np.where(pneumonia, 1.0, 0.0)
    for label in ("Bacteria", "Virus"):
        cause = np.where(named.isna(), np.nan, (named == label.lower()).astype("float64"))
        table[LABEL_PREFIX + label] = np.where(pneumonia, cause, 0.0)
    table["patient"] = groups
    table["view"] = "AP"
    table[META_PREFIX + "kaggle_val"] = (table["split"] == "val").astype(int)
    table["split"] = table["split"].map(_SPLITS)
    return table


def _with_sizes(table: pd.DataFrame, base: Path) -> pd.DataFrame:
    """Add the size of the original files, and which films Kaggle had moved, from ``manifest.csv`` if it is there."""
    path = base / "manifest.csv"
    if not path.is_file() or is_manifest(path):
        logger.info("no manifest.csv with the original sizes in %s: the size baseline will not be possible", base)
        return table.drop(columns="class")
    sizes = read_source(path, ["split", "class", "file", "orig_w", "orig_h"])
    sizes.index = pd.Index(sizes["split"] + "/" + sizes["class"] + "/" + sizes["file"])
    if sizes.index.has_duplicates:
        raise UserError(f"{path} lists {sizes.index[sizes.index.duplicated()][0]} more than once.")
    keys = table["split"] + "/" + table["class"] + "/" + table["image"].str.rpartition("/")[2]
    matched = sizes.reindex(keys).reset_index(drop=True)
    for name, column in (("orig_width", "orig_w"), ("orig_height", "orig_h")):
        table[META_PREFIX + name] = pd.to_numeric(matched[column], errors="coerce").astype("float64")
    if "kaggle_val" in matched:
        moved = pd.to_numeric(matched["kaggle_val"], errors="coerce").fillna(0).astype(int)
        table[META_PREFIX + "kaggle_val"] = np.maximum(table[META_PREFIX + "kaggle_val"], moved)
    missing = int(matched["file"].isna().sum())
    if missing:
        logger.warning("%s films are not in %s: their original size is unknown", f"{missing:,}", path)
    return table.drop(columns="class")


def _say_counts(table: pd.DataFrame) -> None:
    for split in ("train", "test"):
        films = table[table["split"] == split]
        normal, sick = int((films["normal"] == 1).sum()), int((films["normal"] == 0).sum())
        official = _OFFICIAL[split, 1.0], _OFFICIAL[split, 0.0]
        note = "as published" if (normal, sick) == official else f"published: {official[0]:,} + {official[1]:,}"
        logger.info("%s: %s normal + %s pneumonia (%s)", split, f"{normal:,}", f"{sick:,}", note)

"""NIH ChestX-ray14 (Wang et al. 2017): 112,120 frontal films, 14 findings read from reports by a program.

The official lists are ``train_val_list.txt`` and ``test_list.txt``; they share no patient. The tables name films
``.png``; copies with another ending are found by name, in any subfolder.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pandas as pd

from afire.data.datasets.disk import by_name, keep_present, list_films, strip_ending
from afire.data.datasets.findings import NO_FINDING, ages, sexes, view_names
from afire.data.datasets.source import about, find_optional, find_source, read_list, read_source
from afire.data.manifest import LABEL_PREFIX, META_PREFIX, Manifest, make_manifest
from afire.errors import UserError
from afire.files import require_folder

logger = logging.getLogger(__name__)

LABELS = (
    "Atelectasis", "Cardiomegaly", "Effusion", "Infiltration", "Mass", "Nodule", "Pneumonia", "Pneumothorax",
    "Consolidation", "Edema", "Emphysema", "Fibrosis", "Pleural_Thickening", "Hernia",
)  # fmt: skip
NORMAL_RULE = "1 where the only finding is No Finding, else 0"
_TABLES = ("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv")
# The header reads OriginalImage[Width,Height]: the comma inside makes two columns of it.
_WIDTH, _HEIGHT = "OriginalImage[Width", "Height]"
_COLUMNS = ("Image Index", "Finding Labels", "Patient ID", "Patient Age", "Patient Gender", "View Position")
_BOX_FRAME = 1024.0  # boxes are in pixels of the published films, which are all 1024 x 1024
_BOX_NAMES = {"Infiltrate": "Infiltration"}


def build_nih(root: Path, *, images: str = "") -> Manifest:
    """The films of ``root`` (or of its folder ``images``) with the official split, 14 labels and the 984 boxes."""
    require_folder(root, "root")
    path = find_source(root, _TABLES, "the table of NIH ChestX-ray14")
    source = read_source(path, [*_COLUMNS, _WIDTH, _HEIGHT])
    names = source["Image Index"].map(strip_ending)
    table = pd.DataFrame({"image": source["Image Index"], "split": _splits(root, names)})
    table["patient"] = source["Patient ID"].str.strip()
    table["view"] = view_names(source["View Position"])
    table = table.join(_labels(source["Finding Labels"], path))
    boxes = _boxes(root)
    table["boxes"] = [boxes.get(name, "") for name in names]
    for name, column in (("orig_width", _WIDTH), ("orig_height", _HEIGHT)):
        table[META_PREFIX + name] = pd.to_numeric(source[column], errors="coerce").astype("float64")
    table[META_PREFIX + "age"] = ages(source["Patient Age"])
    table[META_PREFIX + "sex"] = sexes(source["Patient Gender"])
    table = keep_present(table, names.map(by_name(list_films(root, images), root)), root, path)
    unlisted = int((table["split"] == "").sum())
    if unlisted:
        logger.warning("%s films are in neither official list: their split is empty", f"{unlisted:,}")
    return make_manifest(table, root, about("nih", NORMAL_RULE, images=images, table=path.name))


def _splits(root: Path, names: pd.Series) -> pd.Series:
    """``train``, ``test`` or empty. Validation is carved from train by ``afire data split``; the lists have none."""
    splits = pd.Series("", index=names.index)
    for split, file in (("train", "train_val_list.txt"), ("test", "test_list.txt")):
        listed = read_list(find_source(root, [file], "an official list of NIH ChestX-ray14"))
        inside = names.isin([strip_ending(line) for line in listed])
        both = inside & (splits != "")
        if both.any():
            raise UserError(f"{names[both].iloc[0]} is in both official lists in {root}; download them again.")
        splits = splits.where(~inside, split)
    return splits


def _labels(findings: pd.Series, path: Path) -> pd.DataFrame:
    """Columns normal and label:X from ``Cardiomegaly|Emphysema`` or ``No Finding``."""
    present = findings.str.strip().str.get_dummies("|")
    unknown = sorted(set(present.columns) - {*LABELS, NO_FINDING})
    if unknown:
        raise UserError(f"{path} names the finding {unknown[0]!r}, which is not one of the set's 14.")
    present = present.reindex(columns=[*LABELS, NO_FINDING], fill_value=0).astype("float64")
    normal = (present[NO_FINDING] == 1) & (present[list(LABELS)].sum(axis=1) == 0)
    table = present[list(LABELS)].add_prefix(LABEL_PREFIX)
    table.insert(0, "normal", normal.astype("float64"))
    return table


def _boxes(root: Path) -> dict[str, str]:
    """Cells of the column ``boxes`` by film, from ``BBox_List_2017.csv`` if it is there."""
    path = find_optional(root, ["BBox_List_2017.csv"])
    if path is None:
        logger.info("no BBox_List_2017.csv in %s: the manifest will have no boxes", root)
        return {}
    source = read_source(path, ["Image Index", "Finding Label"])
    if source.shape[1] < 6:
        raise UserError(f"{path} has {source.shape[1]} columns; expected film, finding, x, y, w, h.")
    # The header names one column "Bbox [x,y,w,h]" and leaves the rest nameless, so they are taken by position.
    pixels = source.iloc[:, 2:6].apply(pd.to_numeric, errors="coerce").to_numpy("float64")
    if np.isnan(pixels).any():
        row = int(np.isnan(pixels).any(axis=1).argmax())
        raise UserError(f"{path} has a box that is not four numbers, in row {row + 1}.")
    start = np.clip(pixels[:, :2] / _BOX_FRAME, 0, 1)
    end = np.clip((pixels[:, :2] + pixels[:, 2:]) / _BOX_FRAME, 0, 1)
    fractions = np.round(np.concatenate([start, end - start], axis=1), 6)
    boxes: dict[str, list[dict[str, object]]] = {}
    for name, label, (x, y, w, h) in zip(
        source["Image Index"], source["Finding Label"], fractions.tolist(), strict=True
    ):
        label = _BOX_NAMES.get(label.strip(), label.strip())
        boxes.setdefault(strip_ending(name), []).append({"label": label, "x": x, "y": y, "w": w, "h": h})
    return {name: json.dumps(found) for name, found in boxes.items()}

"""MIMIC-CXR-JPG (Johnson et al. 2019): labels per study, split per film, both as gzipped tables.

The normal films of its training part are what the paper pre-trains on: No Finding is 1 and no disease is, with or
without Support Devices (rows 1 and 2 of the paper's table of label combinations).
"""

from __future__ import annotations

import logging
from pathlib import Path

import pandas as pd

from afire.data.datasets.disk import by_stem, keep_present, list_films
from afire.data.datasets.findings import (
    NO_FINDING,
    SUPPORT_DEVICES,
    Blank,
    Uncertain,
    normal_from,
    raw_findings,
    view_names,
    with_policy,
)
from afire.data.datasets.source import about, find_optional, find_source, read_source
from afire.data.manifest import Manifest, make_manifest
from afire.errors import UserError
from afire.files import require_folder

logger = logging.getLogger(__name__)

LABELS = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Enlarged Cardiomediastinum", "Fracture", "Lung Lesion",
    "Lung Opacity", NO_FINDING, "Pleural Effusion", "Pleural Other", "Pneumonia", "Pneumothorax", SUPPORT_DEVICES,
)  # fmt: skip
NORMAL_RULE = (
    "1 where No Finding is 1 and no disease is 1 (Support Devices allowed), 0 where a disease is 1, else unknown"
)
_SPLITS = {"train": "train", "validate": "val", "test": "test"}


def build_mimic(
    root: Path, *, uncertain: Uncertain = "ignore", blank: Blank = "zeros", all_views: bool = False
) -> Manifest:
    """The films below ``root/files`` with the official split and the 14 CheXpert labels of their study.

    PA and AP films only, unless ``all_views``; that needs the metadata table, and without it all films are taken.
    """
    require_folder(root, "root")
    path = _required(root, "split")
    films = read_source(path, ["dicom_id", "study_id", "subject_id", "split"])
    films = _with_views(films, root, all_views)
    raw, labelled = _study_labels(films, root)
    subject, study = films["subject_id"], films["study_id"]
    stems = "files/p" + subject.str[:2] + "/p" + subject + "/s" + study + "/" + films["dicom_id"]
    table = pd.DataFrame({"image": stems + ".jpg", "split": _splits(films["split"], path), "patient": subject})
    table["view"] = films["view"]
    table["normal"] = normal_from(raw, uncertain_is_disease=False)
    labels = with_policy(raw, uncertain, blank)
    # A study that the labeller never saw is unknown in everything, whatever `blank` says about what it did not mention.
    labels.loc[~labelled] = float("nan")
    table = table.join(labels)
    listing = list_films(root, "files") if (root / "files").is_dir() else []
    table = keep_present(table, stems.map(by_stem(listing)), root, path)
    options = {"uncertain": uncertain, "blank": blank, "all_views": all_views}
    return make_manifest(table, root, about("mimic", NORMAL_RULE, **options))


def _names(kind: str) -> list[str]:
    return [f"mimic-cxr-{version}-{kind}.csv{end}" for version in ("2.0.0", "2.1.0") for end in (".gz", "")]


def _required(root: Path, kind: str) -> Path:
    return find_source(root, _names(kind), f"the {kind} table of MIMIC-CXR-JPG")


def _splits(values: pd.Series, path: Path) -> pd.Series:
    splits = values.str.strip().map(_SPLITS)
    if splits.isna().any():
        raise UserError(f"{path} names the split {values[splits.isna()].iloc[0]!r}; expected {', '.join(_SPLITS)}.")
    return splits


def _with_views(films: pd.DataFrame, root: Path, all_views: bool) -> pd.DataFrame:
    """Add the column ``view``, and keep PA and AP unless all are wanted."""
    path = find_optional(root, _names("metadata"))
    if path is None:
        logger.warning(
            "no %s in %s: views are unknown, so lateral films are taken with the others", _names("metadata")[0], root
        )
        return films.assign(view="")
    metadata = read_source(path, ["dicom_id", "ViewPosition"]).drop_duplicates("dicom_id").set_index("dicom_id")
    films = films.assign(view=view_names(films["dicom_id"].map(metadata["ViewPosition"]).fillna("")))
    if all_views:
        return films
    frontal = films["view"].isin(["PA", "AP"])
    logger.info("%s of %s films are PA or AP; the others are left out", f"{frontal.sum():,}", f"{len(films):,}")
    return films[frontal].reset_index(drop=True)


def _study_labels(films: pd.DataFrame, root: Path) -> tuple[pd.DataFrame, pd.Series]:
    """Raw findings (1, 0, -1, NaN) of each film's study, and whether the study is in the table at all."""
    path = _required(root, "chexpert")
    studies = read_source(path, ["subject_id", "study_id", *LABELS])
    raw = raw_findings(studies, LABELS, path).set_index(studies["study_id"])
    if raw.index.has_duplicates:
        raise UserError(f"{path} lists study {raw.index[raw.index.duplicated()][0]} more than once.")
    labelled = films["study_id"].isin(raw.index)
    if not labelled.all():
        logger.warning("%s films are of studies without labels: theirs are unknown", f"{(~labelled).sum():,}")
    return raw.reindex(films["study_id"]).reset_index(drop=True), labelled

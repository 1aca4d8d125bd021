"""CheXpert and MIMIC-CXR-JPG: sets with the 14 labels that the CheXpert labeller reads from reports."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pandas as pd

from afire.data.film import view_names
from afire.data.manifest import META_PREFIX, Manifest, make_manifest
from afire.data.sources.disk import (
    about,
    by_stem,
    find_optional,
    find_source,
    keep_present,
    list_films,
    read_source,
    strip_ending,
)
from afire.data.sources.table import (
    NO_FINDING,
    SUPPORT_DEVICES,
    Blank,
    Uncertain,
    ages,
    normal_from,
    raw_findings,
    sexes,
    with_policy,
)
from afire.errors import UserError
from afire.files import require_folder

logger = logging.getLogger(__name__)

CHEXPERT_LABELS = (
    NO_FINDING, "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema", "Consolidation",
    "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other", "Fracture", SUPPORT_DEVICES,
)  # fmt: skip
COMPETITION_LABELS = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")
CHEXPERT_NORMAL = (
    "1 where No Finding is stated and no disease is positive or uncertain (Support Devices allowed), "
    "0 where a disease is positive, else unknown"
)
_FILES = {"train.csv": "train", "valid.csv": "test"}
_CHEXPERT_COLUMNS = ("Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *CHEXPERT_LABELS)


def build_chexpert(
    root: Path,
    *,
    labels: Literal[5, 14] = 5,
    uncertain: Uncertain = "ones",
    blank: Blank = "zeros",
    all_views: bool = False,
) -> Manifest:
    """CheXpert (Irvin et al. 2019): ``train.csv`` (train) and ``valid.csv`` (test), frontal films unless ``all_views``.

    ``valid.csv`` is read by radiologists and serves as the test set, as in the paper and most work since; validation is
    carved from train. ``Path`` starts with the name of the set's folder (``CheXpert-v1.0-small/``), so the root may be
    that folder or the one above it.

    ``uncertain`` says what -1 becomes, ``blank`` what a finding that is not mentioned becomes; ``ignore`` is NaN.
    """
    base = _base(root)
    source = pd.concat([_read(base / file, split) for file, split in _FILES.items()], ignore_index=True)
    if not all_views:
        frontal = source["Frontal/Lateral"].str.strip().str.lower() == "frontal"
        logger.info("%s of %s films are frontal; lateral ones are left out", f"{frontal.sum():,}", f"{len(source):,}")
        source = source[frontal].reset_index(drop=True)
    table = _films(source, base.relative_to(root))
    raw = source[list(CHEXPERT_LABELS)]
    table["normal"] = normal_from(raw, uncertain_is_disease=True)
    names = list(COMPETITION_LABELS if labels == 5 else CHEXPERT_LABELS)
    table = table.join(with_policy(raw[names], uncertain, blank))
    listing = [
        film
        for folder in ("train", "valid")
        if (base / folder).is_dir()
        for film in list_films(root, (base / folder).relative_to(root))
    ]
    table = keep_present(table, table["image"].map(strip_ending).map(by_stem(listing)), root, f"{base}/*.csv")
    options = {"labels": labels, "uncertain": uncertain, "blank": blank, "all_views": all_views}
    return make_manifest(table, root, about("chexpert", CHEXPERT_NORMAL, **options))


def _base(root: Path) -> Path:
    """The folder with ``train.csv``: the root, or one folder below it."""
    require_folder(root, "root")
    if (root / "train.csv").is_file():
        return root
    below = sorted(path.parent for path in root.glob("CheXpert-v1.0*/train.csv"))
    if not below:
        raise UserError(
            f"the table of CheXpert is missing: looked for train.csv in {root} and its CheXpert-v1.0 folders."
        )
    if len(below) > 1:
        names = ", ".join(folder.name for folder in below)
        raise UserError(f"{root} holds several copies of CheXpert ({names}); give one of them as --root.")
    return below[0]


def _read(path: Path, split: str) -> pd.DataFrame:
    """One table with its split, and its labels as numbers."""
    if not path.is_file():
        raise UserError(f"a table of CheXpert is missing: looked for {path.name} in {path.parent}.")
    table = read_source(path, _CHEXPERT_COLUMNS)
    return (
        table.drop(columns=list(CHEXPERT_LABELS)).join(raw_findings(table, CHEXPERT_LABELS, path)).assign(split=split)
    )


def _films(source: pd.DataFrame, prefix: Path) -> pd.DataFrame:
    """Path below the root, split, patient, view, age and sex."""
    # Whatever the folder was called when the tables were made: what follows from train/ or valid/ on is what counts.
    inner = source["Path"].str.strip().str.extract(r"(?:^|/)((?:train|valid)/.+)$", expand=False)
    if inner.isna().any():
        wrong = source["Path"][inner.isna()].iloc[0]
        raise UserError(f"the CheXpert path {wrong!r} names neither train/ nor valid/.")
    start = "" if prefix == Path() else prefix.as_posix() + "/"
    table = pd.DataFrame({"image": start + inner, "split": source["split"]})
    table["patient"] = inner.str.extract(r"/(patient\d+)/", expand=False).fillna("")
    lateral = source["Frontal/Lateral"].str.strip().str.lower() == "lateral"
    position = view_names(source["AP/PA"])
    table["view"] = position.where(position.isin(["AP", "PA"]), "FRONTAL").mask(lateral, "LATERAL")
    table[META_PREFIX + "age"] = ages(source["Age"])
    table[META_PREFIX + "sex"] = sexes(source["Sex"])
    return table


MIMIC_LABELS = (
    "Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Enlarged Cardiomediastinum", "Fracture", "Lung Lesion",
    "Lung Opacity", NO_FINDING, "Pleural Effusion", "Pleural Other", "Pneumonia", "Pneumothorax", SUPPORT_DEVICES,
)  # fmt: skip
MIMIC_NORMAL = (
    "1 where No Finding is 1 and no disease is 1 (Support Devices allowed), 0 where a disease is 1, else unknown"
)
_SPLITS = {"train": "train", "validate": "val", "test": "test"}


def build_mimic(
    root: Path, *, uncertain: Uncertain = "ignore", blank: Blank = "zeros", all_views: bool = False
) -> Manifest:
    """MIMIC-CXR-JPG (Johnson et al. 2019): the films below ``root/files`` with the official split and the 14 CheXpert
    labels of their study, both from gzipped tables.

    The normal films of its training list are what the paper pre-trains on: No Finding is 1 and no disease is, with or
    without Support Devices (rows 1 and 2 of the paper's table of label combinations).
    PA and AP films only, unless ``all_views``; that needs the metadata table, and without it all films are taken.
    """
    require_folder(root, "root")
    path = _required(root, "split")
    films = read_source(path, ["dicom_id", "study_id", "subject_id", "split"])
    films = _with_views(films, root, all_views)
    raw, labelled = _study_labels(films, root)
    subject, study = films["subject_id"], films["study_id"]
    stems = "files/p" + subject.str[:2] + "/p" + subject + "/s" + study + "/" + films["dicom_id"]
    table = pd.DataFrame({"image": stems + ".jpg", "split": _mimic_splits(films["split"], path), "patient": subject})
    table["view"] = films["view"]
    table["normal"] = normal_from(raw, uncertain_is_disease=False)
    labels = with_policy(raw, uncertain, blank)
    # A study that the labeller never saw is unknown in everything, whatever `blank` says about what it did not mention.
    labels.loc[~labelled] = float("nan")
    table = table.join(labels)
    listing = list_films(root, "files") if (root / "files").is_dir() else []
    table = keep_present(table, stems.map(by_stem(listing)), root, path)
    options = {"uncertain": uncertain, "blank": blank, "all_views": all_views}
    return make_manifest(table, root, about("mimic", MIMIC_NORMAL, **options))


def _names(kind: str) -> list[str]:
    return [f"mimic-cxr-{version}-{kind}.csv{end}" for version in ("2.0.0", "2.1.0") for end in (".gz", "")]


def _required(root: Path, kind: str) -> Path:
    return find_source(root, _names(kind), f"the {kind} table of MIMIC-CXR-JPG")


def _mimic_splits(values: pd.Series, path: Path) -> pd.Series:
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
    studies = read_source(path, ["subject_id", "study_id", *MIMIC_LABELS])
    raw = raw_findings(studies, MIMIC_LABELS, path).set_index(studies["study_id"])
    if raw.index.has_duplicates:
        raise UserError(f"{path} lists study {raw.index[raw.index.duplicated()][0]} more than once.")
    labelled = films["study_id"].isin(raw.index)
    if not labelled.all():
        logger.warning("%s films are of studies without labels: theirs are unknown", f"{(~labelled).sum():,}")
    return raw.reindex(films["study_id"]).reset_index(drop=True), labelled

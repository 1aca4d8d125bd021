"""Builders of public sets with tables of their own: CheXpert, MIMIC-CXR-JPG, NIH ChestX-ray14, RSNA pneumonia."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from afire.data.film import view_names
from afire.data.manifest import LABEL_PREFIX, META_PREFIX, Manifest, make_manifest
from afire.data.sources.disk import (
    about,
    by_name,
    by_stem,
    find_optional,
    find_source,
    keep_present,
    list_films,
    read_list,
    read_source,
    strip_ending,
)
from afire.data.sources.readers import READERS_NORMAL, with_readers
from afire.data.sources.table import (
    NO_FINDING,
    SUPPORT_DEVICES,
    Blank,
    Uncertain,
    ages,
    normal_from,
    raw_findings,
    read_headers,
    sexes,
    with_policy,
)
from afire.errors import UserError
from afire.files import read_json, require_folder

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


NIH_LABELS = (
    "Atelectasis", "Cardiomegaly", "Effusion", "Infiltration", "Mass", "Nodule", "Pneumonia", "Pneumothorax",
    "Consolidation", "Edema", "Emphysema", "Fibrosis", "Pleural_Thickening", "Hernia",
)  # fmt: skip
NIH_NORMAL = "1 where the only finding is No Finding, else 0"
_TABLES = ("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv")
# The header reads OriginalImage[Width,Height]: the comma inside makes two columns of it.
_WIDTH, _HEIGHT = "OriginalImage[Width", "Height]"
_NIH_COLUMNS = ("Image Index", "Finding Labels", "Patient ID", "Patient Age", "Patient Gender", "View Position")
_BOX_FRAME = 1024.0  # boxes are in pixels of the published films, which are all 1024 x 1024
_BOX_NAMES = {"Infiltrate": "Infiltration"}


def build_nih(root: Path, *, images: str = "", readers: Path | None = None) -> Manifest:
    """NIH ChestX-ray14 (Wang et al. 2017): the films of ``root`` (or of its folder ``images``) with the official split,
    14 labels read from reports by a program, and the 984 boxes.

    ``readers`` is a table of what radiologists said of some of the films (:mod:`afire.data.sources.readers`): their
    findings stand beside the others, and whether a test film is normal is for them alone to say.
    The official lists are ``train_val_list.txt`` and ``test_list.txt``; they share no patient. The tables name films
    ``.png``; copies with another ending are found by name, in any subfolder.
    """
    require_folder(root, "root")
    path = find_source(root, _TABLES, "the table of NIH ChestX-ray14")
    source = read_source(path, [*_NIH_COLUMNS, _WIDTH, _HEIGHT])
    names = source["Image Index"].map(strip_ending)
    table = pd.DataFrame({"image": source["Image Index"], "split": _nih_splits(root, names)})
    table["patient"] = source["Patient ID"].str.strip()
    table["view"] = view_names(source["View Position"])
    table = table.join(_labels(source["Finding Labels"], path))
    boxes = _boxes(root)
    table["boxes"] = [boxes.get(name, "") for name in names]
    if readers is not None:
        table = with_readers(table, names, readers)
    for name, column in (("orig_width", _WIDTH), ("orig_height", _HEIGHT)):
        table[META_PREFIX + name] = pd.to_numeric(source[column], errors="coerce").astype("float64")
    table[META_PREFIX + "age"] = ages(source["Patient Age"])
    table[META_PREFIX + "sex"] = sexes(source["Patient Gender"])
    table = keep_present(table, names.map(by_name(list_films(root, images), root)), root, path)
    unlisted = int((table["split"] == "").sum())
    if unlisted:
        logger.warning("%s films are in neither official list: their split is empty", f"{unlisted:,}")
    normal = NIH_NORMAL if readers is None else READERS_NORMAL + NIH_NORMAL
    options = {"images": images, "table": path.name, **({"readers": readers.name} if readers is not None else {})}
    return make_manifest(table, root, about("nih", normal, **options))


def _nih_splits(root: Path, names: pd.Series) -> pd.Series:
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
    unknown = sorted(set(present.columns) - {*NIH_LABELS, NO_FINDING})
    if unknown:
        raise UserError(f"{path} names the finding {unknown[0]!r}, which is not one of the set's 14.")
    present = present.reindex(columns=[*NIH_LABELS, NO_FINDING], fill_value=0).astype("float64")
    normal = (present[NO_FINDING] == 1) & (present[list(NIH_LABELS)].sum(axis=1) == 0)
    table = present[list(NIH_LABELS)].add_prefix(LABEL_PREFIX)
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
    return {name: json.dumps(listed) for name, listed in boxes.items()}


OPACITY = "Lung Opacity"
RSNA_NORMAL = "1 in the class Normal, 0 in the others, as radiologists read the film"
_RSNA_CLASSES = ("Normal", OPACITY, "No Lung Opacity / Not Normal")
_RSNA_LABELS, _RSNA_DETAILS = "stage_2_train_labels.csv", "stage_2_detailed_class_info.csv"
_RSNA_MAPPINGS = "pneumonia-challenge-dataset-mappings_2018.json"


def build_rsna(root: Path, *, images: str = "", headers: bool = False) -> Manifest:
    """RSNA pneumonia challenge (Shih et al. 2019): films ``<patientId>.dcm`` (or .png, .jpg) anywhere below ``root``,
    read by radiologists as normal, with a lung opacity (boxes), or not normal without one.

    What the tables call a patient is a film. The films are of NIH ChestX-ray14, and the file of mappings names the
    patients there; without it every film is its own patient, and films of one patient may come apart in a split. There
    is no official test list with labels. ``headers`` reads the views from DICOM: opacities are more often filmed AP.
    """
    require_folder(root, "root")
    path = find_source(root, [_RSNA_LABELS], "the table of boxes of the RSNA pneumonia challenge")
    details = find_source(root, [_RSNA_DETAILS], "the table of classes of the RSNA pneumonia challenge")
    classes = read_source(details, ["patientId", "class"]).drop_duplicates()
    unknown = sorted(set(classes["class"]) - set(_RSNA_CLASSES))
    if unknown:
        raise UserError(f"{details} names the class {unknown[0]!r}; expected {', '.join(_RSNA_CLASSES)}.")
    if classes["patientId"].duplicated().any():
        film = classes["patientId"][classes["patientId"].duplicated()].iloc[0]
        raise UserError(f"{details} puts the film {film} into two classes.")
    table = pd.DataFrame({"image": classes["patientId"].to_numpy(), "class": classes["class"].to_numpy()})
    boxes = _rsna_boxes(path)
    table["boxes"] = [boxes.get(film, "") for film in table["image"]]
    patients = _rsna_patients(root)
    table["patient"] = [patients.get(film, "") for film in table["image"]]
    table["normal"] = (table["class"] == "Normal").astype("float64")
    table[LABEL_PREFIX + OPACITY] = (table.pop("class") == OPACITY).astype("float64")
    table = keep_present(table, table["image"].map(by_name(list_films(root, images), root)), root, details)
    if headers:
        table["view"] = read_headers(root, table["image"].tolist())["view"]
    return make_manifest(table, root, about("rsna", RSNA_NORMAL, images=images, headers=headers))


def _rsna_boxes(path: Path) -> dict[str, str]:
    """Cells of the column ``boxes`` by film; a row without numbers is a film without an opacity."""
    source = read_source(path, ["patientId", "x", "y", "width", "height", "Target"])
    pixels = source[["x", "y", "width", "height"]].apply(pd.to_numeric, errors="coerce")
    drawn = (source["Target"].str.strip() == "1").to_numpy()
    if pixels[drawn].isna().any(axis=None):
        row = int(np.flatnonzero(drawn & pixels.isna().any(axis=1).to_numpy())[0])
        raise UserError(f"{path} has a box that is not four numbers, in row {row + 1}.")
    boxes: dict[str, list[dict[str, object]]] = {}
    fractions = np.round(pixels[drawn].to_numpy("float64") / _BOX_FRAME, 6)
    for film, (x, y, w, h) in zip(source["patientId"][drawn], fractions.tolist(), strict=True):
        boxes.setdefault(film, []).append({"label": OPACITY, "x": x, "y": y, "w": min(w, 1 - x), "h": min(h, 1 - y)})
    return {film: json.dumps(listed) for film, listed in boxes.items()}


def _rsna_patients(root: Path) -> dict[str, str]:
    """Patients of NIH ChestX-ray14 by film, where the file of mappings is there."""
    path = find_optional(root, [_RSNA_MAPPINGS])
    if path is None:
        logger.warning(
            "no %s in %s: patients are unknown, every film counts as one, and films of one patient may come apart in a "
            "split",
            _RSNA_MAPPINGS,
            root,
        )
        return {}
    listed = read_json(path)
    try:
        return {str(film["subset_img_id"]): str(film["img_id"]).partition("_")[0].lstrip("0") for film in listed}
    except (KeyError, TypeError):
        raise UserError(f"{path} does not list subset_img_id and img_id of each film; download it again.") from None

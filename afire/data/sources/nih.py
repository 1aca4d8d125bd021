"""NIH ChestX-ray14, and sets of films that come from it: RSNA pneumonia and SIIM-ACR pneumothorax.

Labels of NIH were read from reports by a program. Radiologists read some of the films again; two public tables hold
what they found (Majkowska et al., Radiology 2020; Nabulsi et al., Scientific Reports 2021), told apart by their
columns:

four findings   ``Image Index`` and Fracture, Pneumothorax, Airspace opacity, Nodule or mass: YES or NO. Nothing else
                was asked, so a film without the four is normal only where the report says so too.
all findings    ``Image ID``, findings as YES or NO, and Abnormal: 1 or 0, which is asked about the whole film.

SIIM-ACR comes as published, films and a table of masks, or as the common copy in PNG, with a test list.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pandas as pd

from afire.data.film import view_names
from afire.data.manifest import LABEL_PREFIX, META_PREFIX, Manifest, make_manifest
from afire.data.rle import decode_siim, encode_rle, encode_runs
from afire.data.sources.disk import (
    about,
    by_name,
    find_optional,
    find_source,
    keep_present,
    list_films,
    read_list,
    read_source,
    strip_ending,
)
from afire.data.sources.table import NO_FINDING, ages, read_headers, sexes
from afire.errors import UserError
from afire.files import read_json, require_folder
from afire.progress import track

logger = logging.getLogger(__name__)

NIH_LABELS = (
    "Atelectasis", "Cardiomegaly", "Effusion", "Infiltration", "Mass", "Nodule", "Pneumonia", "Pneumothorax",
    "Consolidation", "Edema", "Emphysema", "Fibrosis", "Pleural_Thickening", "Hernia",
)  # fmt: skip
NIH_NORMAL = "1 where the only finding is No Finding, else 0"
_NIH_TABLES = ("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv")
# The header reads OriginalImage[Width,Height]: the comma inside makes two columns of it.
_WIDTH, _HEIGHT = "OriginalImage[Width", "Height]"
_NIH_COLUMNS = ("Image Index", "Finding Labels", "Patient ID", "Patient Age", "Patient Gender", "View Position")
_BOX_FRAME = 1024.0  # boxes are in pixels of the published films, which are all 1024 x 1024
_BOX_NAMES = {"Infiltrate": "Infiltration"}


def build_nih(root: Path, *, images: str = "", readers: Path | None = None) -> Manifest:
    """NIH ChestX-ray14 (Wang et al. 2017): the films of ``root`` (or of its folder ``images``) with the official split,
    14 labels read from reports by a program, and the 984 boxes.

    ``readers`` is a table of what radiologists found on some of the films: their findings stand beside the others, and
    they alone decide whether a test film is normal.
    The official lists are ``train_val_list.txt`` and ``test_list.txt``; they share no patient. The tables name films
    ``.png``; copies with another ending are found by name, in any subfolder.
    """
    require_folder(root, "root")
    path = find_source(root, _NIH_TABLES, "the table of NIH ChestX-ray14")
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


FOUR_FINDINGS = ("Fracture", "Pneumothorax", "Airspace opacity", "Nodule or mass")
READERS_NORMAL = (
    "test films, and training films that were read: as radiologists read them, unknown where nobody did; a film "
    "without any of four findings is normal only if its report has none either; other films: "
)
_READERS_FILM = ("Image Index", "Image ID")
_READERS_ABNORMAL = "Abnormal"
_ABOUT_THE_FILM = (
    *("Finding Labels", "Follow-up #", "Patient ID", "Patient Age", "Patient Gender", "View Position", "Set Id"),
    *("OriginalImage[Width", "Height]", "OriginalImagePixelSpacing[x", "y]", _READERS_ABNORMAL, *_READERS_FILM),
)
_ANSWERS = {"YES": 1.0, "NO": 0.0, "1": 1.0, "0": 0.0}


def with_readers(table: pd.DataFrame, names: pd.Series, path: Path) -> pd.DataFrame:
    """The table of NIH with a column ``label:X (read)`` for each finding, and ``normal`` as radiologists see it.

    ``names`` are the films' names without ending, row by row.
    """
    source = read_source(path, [])
    film = next((name for name in _READERS_FILM if name in source.columns), None)
    if film is None:
        raise UserError(f"{path} has no column 'Image Index' or 'Image ID'; it is no table of what radiologists read.")
    read = source[film].str.strip().map(strip_ending)
    if read.duplicated().any():
        raise UserError(f"{path} has {read[read.duplicated()].iloc[0]} twice; give adjudicated labels, one row a film.")
    whole = _READERS_ABNORMAL in source.columns
    findings = [name for name in source.columns if name and name not in _ABOUT_THE_FILM]
    if not whole and not set(FOUR_FINDINGS) <= set(findings):
        raise UserError(
            f"{path} has neither a column 'Abnormal' nor all of {', '.join(FOUR_FINDINGS)}; its columns are "
            f"{', '.join(source.columns[:20])}."
        )
    findings = findings if whole else list(FOUR_FINDINGS)
    answers = pd.DataFrame(
        {name: _as_numbers(source, name, path) for name in (*findings, *([_READERS_ABNORMAL] if whole else []))}
    )
    answers = answers.set_index(read).reindex(names).reset_index(drop=True)
    normal = 1 - answers.pop(_READERS_ABNORMAL) if whole else _without_the_four(answers, table["normal"])
    was_read = pd.Series(names.isin(read).to_numpy())
    verdict = table["normal"].where(~was_read & (table["split"] != "test"), normal)
    logger.info("radiologists read %s of the %s films of the table", f"{was_read.sum():,}", f"{len(table):,}")
    return table.assign(normal=verdict).join(answers.add_prefix(LABEL_PREFIX).add_suffix(" (read)"))


def _as_numbers(source: pd.DataFrame, name: str, path: Path) -> pd.Series:
    texts = source[name].str.strip().str.upper()
    numbers = texts.map(_ANSWERS)
    wrong = numbers.isna() & (texts != "")
    if wrong.any():
        raise UserError(
            f"{path}: column {name!r} holds {source[name][wrong].iloc[0]!r}; expected YES, NO, 1, 0 or empty."
        )
    return numbers


def _without_the_four(answers: pd.DataFrame, by_report: pd.Series) -> pd.Series:
    """0 with one of the four, 1 with none of them and a report without a finding, else unknown."""
    positive, none = (answers == 1).any(axis=1), (answers == 0).all(axis=1)
    normal = pd.Series(float("nan"), index=answers.index).mask(none & (by_report == 1), 1.0)
    return normal.mask(positive, 0.0)


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


PNEUMOTHORAX = "Pneumothorax"
SIIM_NORMAL = "0 with a pneumothorax, else unknown: other diseases are not labelled"
SIIM_NO_LABEL = "1 without a pneumothorax, though other diseases are not labelled; 0 with one"
_SIIM_TABLES = ("train-rle.csv", "stage_2_train.csv")
_SIIM_LISTS = {"stage_1_train_images.csv": "train", "stage_1_test_images.csv": "test"}
_SIIM_FILMS, _SIIM_MASKS = "png_images", "png_masks"
_NOTHING = ("", "-1")


def build_siim(
    root: Path,
    *,
    csv: Path | None = None,
    images: str = "",
    size: int = 1024,
    headers: bool = False,
    no_label_is_normal: bool = False,
) -> Manifest:
    """SIIM-ACR pneumothorax: films named ``<ImageId>.dcm`` (or .png, .jpg) anywhere below ``root``, with their masks.

    A film with several pneumothoraces has several rows in the table. They are merged, because a split made over rows
    puts one film into both train and test. There is no official test set with masks, so the split is left empty: draw
    one by patient with ``afire data split``.

    ``size`` is the side of the film that the masks were drawn on, not of your copy of it. ``headers`` reads patient
    (as a hash) and view from DICOM; without it every film is its own patient. The common copy in PNG (folders
    ``png_images`` and ``png_masks``, lists ``stage_1_train_images.csv`` and ``stage_1_test_images.csv``) brings masks
    as films and a split. ``no_label_is_normal`` calls films without a pneumothorax normal, which detectors need.
    """
    require_folder(root, "root")
    if csv is None and any(find_optional(root, [name]) for name in _SIIM_LISTS):
        return _build_siim_png(root, no_label_is_normal)
    path = csv or find_source(root, _SIIM_TABLES, "the table of SIIM-ACR")
    source = read_source(path, ["ImageId", "EncodedPixels"])
    ids = source["ImageId"].str.strip().map(strip_ending)
    rows = pd.DataFrame({"image": ids, "mask": source["EncodedPixels"].str.strip()})
    masks = rows.groupby("image", sort=True)["mask"].agg(list)
    table = pd.DataFrame({"image": masks.index, "masks": masks.to_numpy()})
    logger.info("%s rows are of %s films", f"{len(rows):,}", f"{len(table):,}")
    films = table["image"].map(by_name(list_films(root, images), root))
    table = keep_present(table, films, root, path)
    texts = track(table["masks"].tolist(), "reading masks", unit="films")
    table["rle"] = [_merged_masks(text, size, film, path) for film, text in zip(table["image"], texts, strict=True)]
    present = pd.Series([any(text not in _NOTHING for text in texts) for texts in table.pop("masks")])
    table[LABEL_PREFIX + PNEUMOTHORAX] = present.astype("float64")
    table["normal"] = _siim_normal(table, no_label_is_normal)
    if headers:
        tags = read_headers(root, table["image"].tolist())
        table["patient"], table["view"] = tags["patient"], tags["view"]
    options = {"images": images, "size": size, "headers": headers}
    return _siim_manifest(table, root, no_label_is_normal, **options)


def _build_siim_png(root: Path, no_label_is_normal: bool) -> Manifest:
    """The copy in PNG: a mask for every film, black where there is no pneumothorax."""
    lists = []
    for name, split in _SIIM_LISTS.items():
        path = find_source(root, [name], "a list of SIIM-ACR in PNG")
        source = read_source(path, ["new_filename", "has_pneumo"])
        wrong = ~source["has_pneumo"].str.strip().isin(["0", "1"])
        if wrong.any():
            raise UserError(f"{path} holds {source['has_pneumo'][wrong].iloc[0]!r} in has_pneumo; expected 0 or 1.")
        lists.append(source.assign(split=split))
    source = pd.concat(lists, ignore_index=True)
    names = source["new_filename"].str.strip().map(strip_ending)
    if names.duplicated().any():
        raise UserError(f"the lists in {root} name {names[names.duplicated()].iloc[0]} twice; download them again.")
    table = pd.DataFrame({"image": source["new_filename"], "split": source["split"]})
    table[LABEL_PREFIX + PNEUMOTHORAX] = source["has_pneumo"].str.strip().astype("float64")
    table["normal"] = _siim_normal(table, no_label_is_normal)
    masks = by_name(list_films(root, _SIIM_MASKS), root) if (root / _SIIM_MASKS).is_dir() else {}
    table["mask"] = names.map(masks).fillna("")
    table = keep_present(table, names.map(by_name(list_films(root, _SIIM_FILMS), root)), root, f"{root}/stage_1_*.csv")
    without = int(((table["mask"] == "") & (table[LABEL_PREFIX + PNEUMOTHORAX] == 1)).sum())
    if without:
        logger.warning("%s films with a pneumothorax have no mask in %s", f"{without:,}", root / _SIIM_MASKS)
    return _siim_manifest(table, root, no_label_is_normal, images=_SIIM_FILMS)


def _siim_normal(table: pd.DataFrame, no_label_is_normal: bool) -> pd.Series:
    present = table[LABEL_PREFIX + PNEUMOTHORAX]
    return 1.0 - present if no_label_is_normal else (1.0 - present).where(present == 1)


def _siim_manifest(table: pd.DataFrame, root: Path, no_label_is_normal: bool, **options: object) -> Manifest:
    rule = SIIM_NO_LABEL if no_label_is_normal else SIIM_NORMAL
    options["no_label_is_normal"] = no_label_is_normal
    return make_manifest(table, root, {**about("siim", rule, **options), "mask": PNEUMOTHORAX})


def _merged_masks(texts: list[str], size: int, film: str, path: Path) -> str:
    """The union of a film's masks as a cell of the column ``rle``; a film without pneumothorax has an empty mask."""
    drawn = [text for text in texts if text not in _NOTHING]
    if not drawn:
        return encode_runs([], (size, size))
    try:
        return encode_rle(np.logical_or.reduce([decode_siim(text, size, size) for text in drawn]))
    except UserError as error:
        raise UserError(f"{path}, film {film}: {error}") from None

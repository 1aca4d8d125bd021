"""SIIM-ACR pneumothorax: as published, films and a table of masks, or as the common copy in PNG, with a test list."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pandas as pd

from afire.data.manifest import LABEL_PREFIX, Manifest, make_manifest
from afire.data.rle import decode_siim, encode_rle, encode_runs
from afire.data.sources.disk import (
    about,
    by_name,
    find_optional,
    find_source,
    keep_present,
    list_films,
    read_source,
    strip_ending,
)
from afire.data.sources.table import read_headers
from afire.errors import UserError
from afire.files import require_folder
from afire.progress import track

logger = logging.getLogger(__name__)

PNEUMOTHORAX = "Pneumothorax"
SIIM_NORMAL = "0 with a pneumothorax, else unknown: other diseases are not labelled"
SIIM_NO_LABEL = "1 without a pneumothorax, though other diseases are not labelled; 0 with one"
_TABLES = ("train-rle.csv", "stage_2_train.csv")
_LISTS = {"stage_1_train_images.csv": "train", "stage_1_test_images.csv": "test"}
_FILMS, _MASKS = "png_images", "png_masks"
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
    if csv is None and any(find_optional(root, [name]) for name in _LISTS):
        return _build_png(root, no_label_is_normal)
    path = csv or find_source(root, _TABLES, "the table of SIIM-ACR")
    source = read_source(path, ["ImageId", "EncodedPixels"])
    ids = source["ImageId"].str.strip().map(strip_ending)
    rows = pd.DataFrame({"image": ids, "mask": source["EncodedPixels"].str.strip()})
    masks = rows.groupby("image", sort=True)["mask"].agg(list)
    table = pd.DataFrame({"image": masks.index, "masks": masks.to_numpy()})
    logger.info("%s rows are of %s films", f"{len(rows):,}", f"{len(table):,}")
    films = table["image"].map(by_name(list_films(root, images), root))
    table = keep_present(table, films, root, path)
    texts = track(table["masks"].tolist(), "reading masks", unit="films")
    table["rle"] = [_merged(text, size, film, path) for film, text in zip(table["image"], texts, strict=True)]
    present = pd.Series([any(text not in _NOTHING for text in texts) for texts in table.pop("masks")])
    table[LABEL_PREFIX + PNEUMOTHORAX] = present.astype("float64")
    table["normal"] = _normal(table, no_label_is_normal)
    if headers:
        tags = read_headers(root, table["image"].tolist())
        table["patient"], table["view"] = tags["patient"], tags["view"]
    options = {"images": images, "size": size, "headers": headers}
    return _manifest(table, root, no_label_is_normal, **options)


def _build_png(root: Path, no_label_is_normal: bool) -> Manifest:
    """The copy in PNG: a mask for every film, black where there is no pneumothorax."""
    lists = []
    for name, split in _LISTS.items():
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
    table["normal"] = _normal(table, no_label_is_normal)
    masks = by_name(list_films(root, _MASKS), root) if (root / _MASKS).is_dir() else {}
    table["mask"] = names.map(masks).fillna("")
    table = keep_present(table, names.map(by_name(list_films(root, _FILMS), root)), root, f"{root}/stage_1_*.csv")
    without = int(((table["mask"] == "") & (table[LABEL_PREFIX + PNEUMOTHORAX] == 1)).sum())
    if without:
        logger.warning("%s films with a pneumothorax have no mask in %s", f"{without:,}", root / _MASKS)
    return _manifest(table, root, no_label_is_normal, images=_FILMS)


def _normal(table: pd.DataFrame, no_label_is_normal: bool) -> pd.Series:
    present = table[LABEL_PREFIX + PNEUMOTHORAX]
    return 1.0 - present if no_label_is_normal else (1.0 - present).where(present == 1)


def _manifest(table: pd.DataFrame, root: Path, no_label_is_normal: bool, **options: object) -> Manifest:
    rule = SIIM_NO_LABEL if no_label_is_normal else SIIM_NORMAL
    options["no_label_is_normal"] = no_label_is_normal
    return make_manifest(table, root, {**about("siim", rule, **options), "mask": PNEUMOTHORAX})


def _merged(texts: list[str], size: int, film: str, path: Path) -> str:
    """The union of a film's masks as a cell of the column ``rle``; a film without pneumothorax has an empty mask."""
    drawn = [text for text in texts if text not in _NOTHING]
    if not drawn:
        return encode_runs([], (size, size))
    try:
        return encode_rle(np.logical_or.reduce([decode_siim(text, size, size) for text in drawn]))
    except UserError as error:
        raise UserError(f"{path}, film {film}: {error}") from None

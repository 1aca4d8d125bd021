"""SIIM-ACR pneumothorax segmentation: masks in a run-length coding of their own, several rows per film.

A film with several pneumothoraces has several rows. They are merged here, because a split made over rows puts one
film into both train and test. There is no official test set with masks, so the split is left empty: draw one by
patient with ``afire data split``.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pandas as pd

from afire.data.datasets.disk import by_name, keep_present, list_films, strip_ending
from afire.data.datasets.findings import view_names
from afire.data.datasets.patients import read_headers
from afire.data.datasets.source import about, find_source, read_source
from afire.data.manifest import LABEL_PREFIX, Manifest, make_manifest
from afire.data.rle import decode_siim, encode_rle, encode_runs
from afire.errors import UserError
from afire.files import require_folder
from afire.progress import track

logger = logging.getLogger(__name__)

LABEL = "Pneumothorax"
NORMAL_RULE = "0 with a pneumothorax, else unknown: other diseases are not labelled"
_TABLES = ("train-rle.csv", "stage_2_train.csv")
_NOTHING = ("", "-1")


def build_siim(
    root: Path, *, csv: Path | None = None, images: str = "", size: int = 1024, headers: bool = False
) -> Manifest:
    """Films named ``<ImageId>.dcm`` (or .png, .jpg) anywhere below ``root``, with label and mask.

    ``size`` is the side of the film that the masks were drawn on, not of your copy of it. ``headers`` reads patient
    (as a hash) and view from DICOM; without it every film is its own patient.
    """
    require_folder(root, "root")
    path = csv or find_source(root, _TABLES, "the table of SIIM-ACR")
    source = read_source(path, ["ImageId", "EncodedPixels"])
    ids = source["ImageId"].str.strip().map(strip_ending)
    rows = pd.DataFrame({"image": ids, "mask": source["EncodedPixels"].str.strip()})
    masks = rows.groupby("image", sort=True)["mask"].agg(list)
    table = pd.DataFrame({"image": masks.index, "masks": masks.to_numpy()})
    logger.info("%s rows are of %s films", f"{len(rows):,}", f"{len(table):,}")
    found = table["image"].map(by_name(list_films(root, images), root))
    table = keep_present(table, found, root, path)
    texts = track(table["masks"].tolist(), "reading masks", unit="films")
    table["rle"] = [_merged(text, size, film, path) for film, text in zip(table["image"], texts, strict=True)]
    present = pd.Series([any(text not in _NOTHING for text in texts) for texts in table.pop("masks")])
    table[LABEL_PREFIX + LABEL] = present.astype("float64")
    table["normal"] = (1.0 - table[LABEL_PREFIX + LABEL]).where(present)
    if headers:
        tags = read_headers(root, table["image"].tolist())
        table["patient"], table["view"] = tags["patient"], view_names(tags["view"])
    options = {"images": images, "size": size, "headers": headers}
    return make_manifest(table, root, {**about("siim", NORMAL_RULE, **options), "mask": LABEL})


def _merged(texts: list[str], size: int, film: str, path: Path) -> str:
    """The union of a film's masks as a cell of the column ``rle``; a film without pneumothorax has an empty mask."""
    drawn = [text for text in texts if text not in _NOTHING]
    if not drawn:
        return encode_runs([], (size, size))
    try:
        return encode_rle(np.logical_or.reduce([decode_siim(text, size, size) for text in drawn]))
    except UserError as error:
        raise UserError(f"{path}, film {film}: {error}") from None

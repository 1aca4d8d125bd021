"""CheXpert (Irvin et al. 2019): labels with an uncertain value, frontal and lateral films.

``valid.csv`` is read by radiologists and serves as the test set, as in the paper and most work since; validation is
carved from train. ``Path`` starts with the name of the set's folder (``CheXpert-v1.0-small/``), so the root may be that
folder or the one above it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pandas as pd

from afire.data.datasets.disk import by_stem, keep_present, list_films, strip_ending
from afire.data.datasets.findings import (
    NO_FINDING,
    SUPPORT_DEVICES,
    Blank,
    Uncertain,
    ages,
    normal_from,
    raw_findings,
    sexes,
    view_names,
    with_policy,
)
from afire.data.datasets.source import about, read_source
from afire.data.manifest import META_PREFIX, Manifest, make_manifest
from afire.errors import UserError
from afire.files import require_folder

logger = logging.getLogger(__name__)

LABELS = (
    NO_FINDING, "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema", "Consolidation",
    "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other", "Fracture", SUPPORT_DEVICES,
)  # fmt: skip
COMPETITION_LABELS = ("Atelectasis", "Cardiomegaly", "Consolidation", "Edema", "Pleural Effusion")
NORMAL_RULE = (
    "1 where No Finding is stated and no disease is positive or uncertain (Support Devices allowed), "
    "0 where a disease is positive, else unknown"
)
_FILES = {"train.csv": "train", "valid.csv": "test"}
_COLUMNS = ("Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *LABELS)


def build_chexpert(
    root: Path,
    *,
    labels: Literal[5, 14] = 5,
    uncertain: Uncertain = "ones",
    blank: Blank = "zeros",
    all_views: bool = False,
) -> Manifest:
    """``train.csv`` (train) and ``valid.csv`` (test), frontal films only unless ``all_views``.

    ``uncertain`` says what -1 becomes, ``blank`` what a finding that is not mentioned becomes; ``ignore`` is NaN.
    """
    base = _base(root)
    source = pd.concat([_read(base / file, split) for file, split in _FILES.items()], ignore_index=True)
    if not all_views:
        frontal = source["Frontal/Lateral"].str.strip().str.lower() == "frontal"
        logger.info("%s of %s films are frontal; lateral ones are left out", f"{frontal.sum():,}", f"{len(source):,}")
        source = source[frontal].reset_index(drop=True)
    table = _films(source, base.relative_to(root))
    raw = source[list(LABELS)]
    table["normal"] = normal_from(raw, uncertain_is_disease=True)
    names = list(COMPETITION_LABELS if labels == 5 else LABELS)
    table = table.join(with_policy(raw[names], uncertain, blank))
    listing = [
        film
        for part in ("train", "valid")
        if (base / part).is_dir()
        for film in list_films(root, (base / part).relative_to(root))
    ]
    table = keep_present(table, table["image"].map(strip_ending).map(by_stem(listing)), root, f"{base}/*.csv")
    options = {"labels": labels, "uncertain": uncertain, "blank": blank, "all_views": all_views}
    return make_manifest(table, root, about("chexpert", NORMAL_RULE, **options))


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
    table = read_source(path, _COLUMNS)
    return table.drop(columns=list(LABELS)).join(raw_findings(table, LABELS, path)).assign(split=split)


def _films(source: pd.DataFrame, prefix: Path) -> pd.DataFrame:
    """Path below the root, split, patient, view, age and sex."""
    # Whatever the folder was called when the tables were made: the part from train/ or valid/ on is what counts.
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

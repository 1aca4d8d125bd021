"""Builders of sets that are folders: a flat one, one folder a class, ChildCXR, lung masks."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from afire.data.decode import read_mask
from afire.data.manifest import LABEL_PREFIX, META_PREFIX, Manifest, inside_root, is_manifest, make_manifest
from afire.data.rle import encode_rle
from afire.data.sources.disk import (
    about,
    by_name,
    list_films,
    read_source,
    require_films,
    split_of,
    strip_ending,
)
from afire.data.sources.table import patients_from_pattern, read_headers
from afire.errors import UserError
from afire.files import require_folder
from afire.progress import track

FOLDER_NORMAL = "unknown for every film, unless all are said to be normal"


def build_folder(
    root: Path, *, patient_pattern: str | None = None, headers: bool = False, all_normal: bool = False
) -> Manifest:
    """Every film in ``root`` and its subfolders. No split and no labels; ``normal`` is unknown, or 1 on request.

    A film is its own patient unless ``patient_pattern`` finds one in its path or ``headers`` reads the DICOM tags.
    """
    if headers and patient_pattern is not None:
        raise UserError("--patient-pattern and --headers both say who the patient is; give one of them.")
    films = require_films(list_films(root, look_inside=True), root)
    table = pd.DataFrame({"image": films, "patient": patients_from_pattern(films, patient_pattern)})
    if headers:
        tags = read_headers(root, films)
        table["patient"], table["view"] = tags["patient"], tags["view"]
    if all_normal:
        table["normal"] = 1.0
    options = {"patient_pattern": patient_pattern, "headers": headers, "all_normal": all_normal}
    return make_manifest(table, root, about("folder", FOLDER_NORMAL, **options))


logger = logging.getLogger(__name__)

NORMAL_RULE = "1 in the normal class, 0 in the others; unknown when no class is the normal one"
_NORMAL_NAMES = ("normal", "no finding", "no_finding", "nofinding", "healthy")


def build_classes(root: Path, *, normal_class: str | None = None, patient_pattern: str | None = None) -> Manifest:
    """``class/film.png``, or ``split/class/film.png`` with folders called train, val and test.

    Each class folder is a label, 1 for its own films and 0 for the others'. Beside a folder of films in a class
    (``class/images/film.png``) there may be lung masks with the same names (``class/masks/film.png``).
    The normal class (``normal_class``, or a folder called normal or no finding) fills the column ``normal`` instead:
    as a label it would only say the same twice.
    """
    films = require_films(list_films(root), root)
    placed = _place(films, root)
    classes = sorted(placed["class"].unique())
    normal = _normal_class(classes, normal_class)
    table = placed[["image", "split", "mask"]].copy()
    table["patient"] = patients_from_pattern(table["image"].tolist(), patient_pattern)
    if normal is not None:
        table["normal"] = (placed["class"] == normal).astype("float64")
    for name in classes:
        if name != normal:
            table[LABEL_PREFIX + name] = (placed["class"] == name).astype("float64")
    options = {"normal_class": normal, "patient_pattern": patient_pattern}
    masked = {"mask": "lungs"} if (table["mask"] != "").any() else {}
    return make_manifest(table, root, {**about("classes", NORMAL_RULE, **options), **masked})


def _place(films: Sequence[str], root: Path) -> pd.DataFrame:
    """Columns image, split, class and mask; films that lie outside the layout are counted and left out."""
    masks = {key: film for film in films if (key := _masked_film(film)) is not None}
    films = [film for film in films if _masked_film(film) is None]
    steps = [film.split("/") for film in films]
    has_splits = any(len(path) > 2 and split_of(path[0]) for path in steps)
    rows = []
    for film, path in zip(films, steps, strict=True):
        folders = path[:-1]
        split = split_of(folders[0]) if has_splits and folders else ""
        if has_splits:
            folders = folders[1:]
        if folders and split is not None:
            rows.append((film, split, folders[0], masks.pop(_film_key(path), "")))
    if masks:
        logger.warning("%s masks, such as %s, belong to no film", f"{len(masks):,}", next(iter(masks.values())))
    layout = "split/class/film" if has_splits else "class/film"
    if not rows:
        raise UserError(f"{root} holds no class folders, only films; use `afire data build folder` for a flat folder.")
    if len(rows) < len(films):
        left_out = len(films) - len(rows)
        logger.warning("left out: %s films in %s that do not lie in %s", f"{left_out:,}", root, layout)
    return pd.DataFrame(rows, columns=["image", "split", "class", "mask"])


def _masked_film(path: str) -> tuple[str, str] | None:
    """What a mask in ``.../masks/film.png`` shares with its film in ``.../images/film.png``; None for a film."""
    *folders, name = path.split("/")
    if len(folders) < 2 or folders[-1].lower() not in _MASK_FOLDERS:
        return None
    return "/".join(folders[:-1]), strip_ending(name).removesuffix("_mask")


def _film_key(steps: Sequence[str]) -> tuple[str, str]:
    *folders, name = steps
    return "/".join(folders[:-1]), strip_ending(name)


def _normal_class(classes: Sequence[str], chosen: str | None) -> str | None:
    if chosen is not None:
        matching = [name for name in classes if name.lower() == chosen.lower()]
        exact = chosen if chosen in classes else next(iter(matching), None)
        if exact is None:
            raise UserError(f"there is no class folder {chosen!r}; the classes are {', '.join(classes)}.")
        return exact
    normal = next((name for name in classes if name.lower() in _NORMAL_NAMES), None)
    if normal is None:
        logger.info("no class is called normal; name it with --normal-class to fill the column `normal`")
    return normal


CHILDCXR_NORMAL = "1 in NORMAL, 0 in PNEUMONIA"
_SPLITS = {"train": "train", "val": "train", "test": "test"}
_CLASSES = ("NORMAL", "PNEUMONIA")
_OFFICIAL = {("train", 1.0): 1349, ("train", 0.0): 3883, ("test", 1.0): 234, ("test", 0.0): 390}
# person12_virus_34.jpeg; IM-0115-0001.jpeg; NORMAL2-IM-1427-0001.jpeg. What follows the group counts its films.
_GROUP = re.compile(r"^(person\d+_(?:virus|bacteria)|(?:NORMAL2-)?IM-\d+)[-_.]")


def build_childcxr(root: Path) -> Manifest:
    """ChildCXR (Kermany et al. 2018), paediatric films: ``{train,test,val}/{NORMAL,PNEUMONIA}`` in ``root`` or in
    ``root/chest_xray``, with the official split; pneumonia by bacteria or virus.

    The official split is train and test. Kaggle's copy moved 16 training films into a folder ``val``; they go back to
    train, because eight films of a class validate nothing. A ``manifest.csv`` that tells the size of the original files
    is used where there is one: size alone separates the classes, so every table about this set needs that baseline.
    """
    base = _base(root)
    folders = [(base / split).relative_to(root) for split in _SPLITS if (base / split).is_dir()]
    films = [film for folder in folders for film in list_films(root, folder)]
    table = _from_names(require_films(films, root), root)
    table = _with_sizes(table, base)
    _say_counts(table)
    return make_manifest(table, root, about("childcxr", CHILDCXR_NORMAL))


def _base(root: Path) -> Path:
    require_folder(root, "root")
    for folder in (root, root / "chest_xray"):
        if all((folder / split / name).is_dir() for split in ("train", "test") for name in _CLASSES):
            return folder
    raise UserError(
        f"{root} does not look like ChildCXR: looked for train/NORMAL, train/PNEUMONIA, test/NORMAL and test/PNEUMONIA "
        "in it and in its folder chest_xray."
    )


def _from_names(films: list[str], root: Path) -> pd.DataFrame:
    """Split, class, kind of pneumonia and patient from ``.../split/class/name``."""
    steps = [film.split("/") for film in films]
    table = pd.DataFrame({"image": films, "split": [path[-3] for path in steps], "class": [path[-2] for path in steps]})
    names = pd.Series([path[-1] for path in steps])
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


TUBERCULOSIS = "Tuberculosis"
LUNGMASKS_NORMAL = "1 without tuberculosis, 0 with it"
_MASK_FOLDERS = ("mask", "masks", "manualmask")
_LUNG_FOLDERS = ("lung", "lungs", "left", "right", "leftmask", "rightmask", "leftlung", "rightlung")


def build_lungmasks(root: Path, *, images: str = "") -> Manifest:
    """Films with lung masks, normal or tuberculosis: the Shenzhen and Montgomery sets (Jaeger et al. 2014).

    Layouts: ``images/X.jpg`` with ``masks/lungs/X.png``; ``CXR_png/X.png`` with ``mask/X_mask.png`` (Shenzhen, masks by
    Stirenko et al. 2018); ``CXR_png/X.png`` with ``ManualMask/leftMask/X.png`` and ``rightMask/X.png`` (Montgomery),
    which are united into the ``rle`` column. The name ends in ``_0`` (normal) or ``_1`` (tuberculosis); a table
    ``index.csv`` with columns name and tb overrules it. Every film is its own patient; there is no official split.
    """
    require_folder(root, "root")
    everything = list_films(root)
    masks = _masks_by_name(everything)
    if not masks:
        raise UserError(f"{root} holds no lung masks; looked for folders called mask, masks or ManualMask.")
    outside = [film for film in (list_films(root, images) if images else everything) if _mask_folder(film) is None]
    films = by_name(require_films(outside, root, images), root)
    names = sorted(films)
    table = pd.DataFrame(
        {"image": [films[name] for name in names], LABEL_PREFIX + TUBERCULOSIS: _tuberculosis(names, root)}
    )
    table["normal"] = 1.0 - table[LABEL_PREFIX + TUBERCULOSIS]
    own = [masks.get(name, []) for name in names]
    table["mask"] = [paths[0] if len(paths) == 1 else "" for paths in own]
    table["rle"] = _unite_all(root, own)
    without = sum(not paths for paths in own)
    if without:
        logger.warning("%s of %s films have no lung mask", f"{without:,}", f"{len(names):,}")
    return make_manifest(table, root, {**about("lungmasks", LUNGMASKS_NORMAL, images=images), "mask": "lungs"})


def _mask_folder(path: str) -> int | None:
    """Position of the folder of masks in a path, if it has one."""
    folders = path.lower().split("/")[:-1]
    return next((at for at, folder in enumerate(folders) if folder in _MASK_FOLDERS), None)


def _masks_by_name(files: Iterable[str]) -> dict[str, list[str]]:
    """Masks of the lungs by the name of their film; masks of other organs (``masks/heart``) are passed over."""
    masks: dict[str, list[str]] = {}
    for path in files:
        at = _mask_folder(path)
        if at is None:
            continue
        *organs, name = path.split("/")[at + 1 :]
        if all(organ.lower().replace(" ", "").replace("_", "") in _LUNG_FOLDERS for organ in organs):
            masks.setdefault(strip_ending(name).removesuffix("_mask"), []).append(path)
    return masks


def _unite_all(root: Path, masks: list[list[str]]) -> list[str]:
    """Cells of the column ``rle``: the union of a film's masks where it has several, else empty."""
    cells = [""] * len(masks)
    several = [row for row, paths in enumerate(masks) if len(paths) > 1]
    if several:
        for row in track(several, "uniting left and right masks", unit="films"):
            cells[row] = _united(root, masks[row])
    return cells


def _united(root: Path, paths: list[str]) -> str:
    masks = [read_mask(inside_root(root, path, "mask")) for path in paths]
    if len({mask.shape for mask in masks}) > 1:
        raise UserError(f"the masks {' and '.join(paths)} in {root} differ in size.")
    return encode_rle(np.logical_or.reduce(masks))


def _tuberculosis(names: list[str], root: Path) -> list[float]:
    """1, 0 or NaN for each film, from its name's last digit or from ``index.csv``."""
    labels = {name: float(name[-1]) for name in names if name.endswith(("_0", "_1"))}
    path = root / "index.csv"
    if path.is_file():
        index = read_source(path, ["name", "tb"])
        values = pd.to_numeric(index["tb"], errors="coerce")
        if not values.isin([0, 1]).all():
            raise UserError(
                f"{path} holds {index['tb'][~values.isin([0, 1])].iloc[0]!r} in column tb; expected 0 or 1."
            )
        labels |= dict(zip(index["name"].map(strip_ending), values.astype(float), strict=True))
    return [labels.get(name, float("nan")) for name in names]

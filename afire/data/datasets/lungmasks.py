"""Films with lung masks, normal or tuberculosis: the Shenzhen and Montgomery sets (Jaeger et al. 2014).

Layouts: ``images/X.jpg`` with ``masks/lungs/X.png``; ``CXR_png/X.png`` with ``mask/X_mask.png`` (Shenzhen, masks by
Stirenko et al. 2018); ``CXR_png/X.png`` with ``ManualMask/leftMask/X.png`` and ``rightMask/X.png`` (Montgomery). The
name ends in ``_0`` (normal) or ``_1`` (tuberculosis); an ``index.csv`` with columns name and tb overrules it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from afire.data.datasets.disk import by_name, list_films, require_films, strip_ending
from afire.data.datasets.source import about, read_source
from afire.data.decode import read_mask
from afire.data.manifest import LABEL_PREFIX, Manifest, inside_root, make_manifest
from afire.data.rle import encode_rle
from afire.errors import UserError
from afire.files import require_folder
from afire.progress import track

logger = logging.getLogger(__name__)

LABEL = "Tuberculosis"
NORMAL_RULE = "1 without tuberculosis, 0 with it"
_MASK_FOLDERS = ("mask", "masks", "manualmask")
_LUNG_FOLDERS = ("lung", "lungs", "left", "right", "leftmask", "rightmask", "leftlung", "rightlung")


def build_lungmasks(root: Path, *, images: str = "") -> Manifest:
    """Films outside of mask folders, each with its lung mask; left and right masks are united into the ``rle`` column.

    Every film is its own patient, and there is no official split.
    """
    require_folder(root, "root")
    everything = list_films(root)
    masks = _masks_by_name(everything)
    if not masks:
        raise UserError(f"{root} holds no lung masks; looked for folders called mask, masks or ManualMask.")
    outside = [film for film in (list_films(root, images) if images else everything) if _mask_folder(film) is None]
    films = by_name(require_films(outside, root, images), root)
    names = sorted(films)
    table = pd.DataFrame({"image": [films[name] for name in names], LABEL_PREFIX + LABEL: _tuberculosis(names, root)})
    table["normal"] = 1.0 - table[LABEL_PREFIX + LABEL]
    found = [masks.get(name, []) for name in names]
    table["mask"] = [paths[0] if len(paths) == 1 else "" for paths in found]
    table["rle"] = _unite_all(root, found)
    without = sum(not paths for paths in found)
    if without:
        logger.warning("%s of %s films have no lung mask", f"{without:,}", f"{len(names):,}")
    return make_manifest(table, root, {**about("lungmasks", NORMAL_RULE, images=images), "mask": "lungs"})


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


def _unite_all(root: Path, found: list[list[str]]) -> list[str]:
    """Cells of the column ``rle``: the union of a film's masks where it has several, else empty."""
    cells = [""] * len(found)
    several = [row for row, paths in enumerate(found) if len(paths) > 1]
    if several:
        for row in track(several, "uniting left and right masks", unit="films"):
            cells[row] = _united(root, found[row])
    return cells


def _united(root: Path, paths: list[str]) -> str:
    parts = [read_mask(inside_root(root, path, "mask")) for path in paths]
    if len({part.shape for part in parts}) > 1:
        raise UserError(f"the masks {' and '.join(paths)} in {root} differ in size.")
    return encode_rle(np.logical_or.reduce(parts))


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

"""Rows every table should carry: what the labels can be guessed from without looking at what a film shows.

``metadata``: width, height, area and aspect of the original file; ``area``: its area alone, because four facts may fit
the training films better and new ones worse. ``sharpness``: the variance of the Laplacian. A representation that does
not beat them has not shown that it sees anatomy.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from afire.data.dataset import Films
from afire.data.manifest import META_PREFIX, Manifest
from afire.data.quiet import quiet_readers
from afire.errors import UserError
from afire.files import sha256_text
from afire.progress import progress
from afire.tasks.features import BATCH

TRIVIAL = {"metadata": "metadata only", "area": "original area only", "sharpness": "sharpness only"}
_AREA = 2  # column of the area in the size features
_SIDES = (f"{META_PREFIX}orig_width", f"{META_PREFIX}orig_height")
_LAPLACIAN = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]).view(1, 1, 3, 3)


def trivial_features(kind: str, films: Films, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Features (len(rows), 4) of the file's size, (len(rows), 1) of its area or of sharpness."""
    if kind == "sharpness":
        return sharpness(films, rows)
    sizes = size_features(films.manifest, rows)
    return sizes if kind == "metadata" else sizes[:, _AREA : _AREA + 1]


def trivial_hash(kind: str) -> str:
    """Stands where other results quote the hash of their weights."""
    return sha256_text(f"afire trivial features: {kind}, version 1")


def size_features(manifest: Manifest, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Width, height, area and aspect of the original files, (len(rows), 4); an unknown size is the median one."""
    if set(_SIDES) <= set(manifest.table.columns):
        sides = manifest.table.iloc[rows][list(_SIDES)].apply(pd.to_numeric, errors="coerce").to_numpy(np.float64)
    else:
        sides = np.array([_stored_size(manifest, int(row)) for row in rows], np.float64)
    if np.isnan(sides).all():
        raise UserError("no film has an original size; the metadata row needs meta:orig_width and meta:orig_height.")
    sides = np.where(np.isnan(sides), np.nanmedian(sides, axis=0), sides)
    width, height = sides.T
    return np.stack([width, height, width * height, width / height], axis=1).astype(np.float32)


def _stored_size(manifest: Manifest, row: int) -> tuple[float, float]:
    """Width and height from the file's header, without decoding it."""
    path = manifest.path(row)
    try:
        with quiet_readers(), Image.open(path) as picture:
            return float(picture.width), float(picture.height)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
        raise UserError(
            f"the size of {path} cannot be read; give the manifest the columns meta:orig_width and meta:orig_height."
        ) from None


def sharpness(films: Films, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Variance of the Laplacian of each film at the size it has here, (len(rows), 1)."""
    values = []
    with progress("sharpness", len(rows), "films") as bar:
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            values.append(laplacian_variance(films.batch(batch)))
            bar.advance(len(batch))
    return torch.cat(values).unsqueeze(1).numpy()


def laplacian_variance(films: torch.Tensor) -> torch.Tensor:
    """(B, 1, S, S) -> (B,), over the pixels that have four neighbours."""
    return F.conv2d(films, _LAPLACIAN.to(films)).flatten(1).var(dim=1, correction=0)

"""Detectors that look at next to nothing, for every table: a learned score that does not beat them has shown nothing.

Like the learned ones they see normal training films only, and larger means more abnormal; each direction was fixed
before any test film was looked at. They know the size of the original file, how sharp the film is, or a thumbnail.

Shapes: N films, P pixels of a thumbnail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from afire.data.dataset import Films
from afire.data.manifest import Manifest
from afire.errors import UserError
from afire.progress import progress
from afire.tasks.features import BATCH
from afire.tasks.trivial import laplacian_variance, size_features

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

TRIVIAL = {
    "metadata": "Mahalanobis distance of the original width and height (log) from those of normal films",
    "area": "minus the area of the original film: smaller is more abnormal",
    "blur": "minus the variance of the Laplacian at 128 px",
    "jpeg size": "minus the bytes of the JPEG file: smaller is more abnormal",
    "pixel gaussian": "mean squared deviation, in sd of normal films, of each pixel at 32 px; films standardised",
    "pca residual": "squared residual after 64 principal components of normal films at 32 px; films standardised",
    "pca mahalanobis": "Mahalanobis distance within 64 principal components of normals at 16 px; films standardised",
}
_BLUR_SIZE, _THUMBNAIL, _SMALL_THUMBNAIL, _COMPONENTS = 128, 32, 16, 64
_MOST_FIT_FILMS = 10_000  # 64 components of 1,024 pixels are settled long before
_NOTHING = 1e-9
_JPEG = (".jpg", ".jpeg")


@dataclass(frozen=True)
class Plain:
    """What the trivial detectors look at, for N films; None where the data do not say it."""

    blur: Floats  # (N,)
    thumbnails: NDArray[np.float32]  # (N, 32 * 32), each of mean 0 and sd 1
    small_thumbnails: NDArray[np.float32]  # (N, 16 * 16)
    sides: Floats | None  # (N, 2): original width and height
    file_bytes: Floats | None  # (N,)


def look_plainly(films: Films, rows: Rows) -> Plain:
    """One pass over the films."""
    blur, thumbnails, small = [], [], []
    with progress("trivial detectors", len(rows), "films") as bar:
        for start in range(0, len(rows), BATCH):
            images = films.batch(rows[start : start + BATCH])
            blur.append(_sharpness(images))
            thumbnails.append(_thumbnails(images, _THUMBNAIL))
            small.append(_thumbnails(images, _SMALL_THUMBNAIL))
            bar.advance(len(images))
    return Plain(
        torch.cat(blur).double().numpy(),
        torch.cat(thumbnails).numpy(),
        torch.cat(small).numpy(),
        _sides(films.manifest, rows),
        _jpeg_bytes(films.manifest, rows),
    )


def trivial_scores(plain: Plain, fit: Rows) -> dict[str, Floats]:
    """Scores (N,) of each detector that the data allow; ``fit`` are the places of normal training films within N.

    Without any, only those detectors remain that need none.
    """
    found: dict[str, Callable[[], Floats | None]] = {
        "metadata": lambda: _metadata(plain.sides, fit),
        "area": lambda: -plain.sides.prod(axis=1) if plain.sides is not None else None,
        "blur": lambda: -plain.blur,
        "jpeg size": lambda: -plain.file_bytes if plain.file_bytes is not None else None,
        "pixel gaussian": lambda: _pixel_gaussian(plain.thumbnails, fit),
        "pca residual": lambda: _pca(plain.thumbnails, fit)[0],
        "pca mahalanobis": lambda: _pca(plain.small_thumbnails, fit)[1],
    }
    scores = {}
    for name, score in found.items():
        if len(fit) < 2 and name in ("metadata", "pixel gaussian", "pca residual", "pca mahalanobis"):
            continue
        values = score()
        if values is not None:
            scores[name] = np.asarray(values, np.float64)
    return scores


def missing(plain: Plain, fit: Rows) -> list[str]:
    """Why a detector is not in the table, or says nothing in it."""
    reasons = []
    if plain.sides is None:
        reasons.append("no metadata and area rows: neither the manifest nor the files say the films' original size")
    elif (plain.sides == plain.sides[0]).all():
        width, height = plain.sides[0]
        reasons.append(f"all films are {width:g} x {height:g}: what the original sizes would give away is not known")
    if plain.file_bytes is None:
        reasons.append("no JPEG size row: not all films are there as JPEG files")
    if len(fit) < 2:
        reasons.append("no trivial rows that need normal training films: these data hold none")
    return reasons


def _metadata(sides: Floats | None, fit: Rows) -> Floats | None:
    if sides is None:
        return None
    logs = np.log(np.maximum(sides, 1))
    centred = logs - logs[fit].mean(axis=0)
    covariance = np.cov(centred[fit].T, bias=True) + _NOTHING * np.eye(2)
    distances: Floats = np.einsum("nd,de,ne->n", centred, np.linalg.inv(covariance), centred)
    return distances


def _pixel_gaussian(pixels_NP: NDArray[np.float32], fit: Rows) -> Floats:
    normal = pixels_NP[_thinned(fit)]
    deviation = (pixels_NP - normal.mean(axis=0)) / np.maximum(normal.std(axis=0), 1e-6)
    scores: Floats = np.square(deviation).mean(axis=1, dtype=np.float64)
    return scores


def _pca(pixels_NP: NDArray[np.float32], fit: Rows) -> tuple[Floats, Floats]:
    """Squared residual, and squared Mahalanobis distance within the components, (N,) each."""
    normal = pixels_NP[_thinned(fit)].astype(np.float64)
    mean = normal.mean(axis=0)
    centred = normal - mean
    values, vectors = np.linalg.eigh(centred.T @ centred / len(centred))
    count = min(_COMPONENTS, len(normal) - 1, pixels_NP.shape[1])
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    every = pixels_NP - mean
    inside = every @ vectors
    residual: Floats = np.square(every).sum(axis=1) - np.square(inside).sum(axis=1)
    distance: Floats = (np.square(inside) / np.maximum(values, _NOTHING)).sum(axis=1)
    return residual, distance


def _thinned(rows: Rows) -> Rows:
    return rows[:: max(1, -(-len(rows) // _MOST_FIT_FILMS))]


def _thumbnails(images: Tensor, side: int) -> Tensor:
    """(B, 1, S, S) -> (B, side * side), each film of mean 0 and sd 1."""
    flat = F.adaptive_avg_pool2d(images, side).flatten(1)
    centred = flat - flat.mean(dim=1, keepdim=True)
    return centred / centred.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-6)


def _sharpness(images: Tensor) -> Tensor:
    """Variance of the Laplacian (B,), the film's edge included: frames and collimators there give sets away too."""
    at_most = F.adaptive_avg_pool2d(images, _BLUR_SIZE) if images.shape[-1] > _BLUR_SIZE else images
    return laplacian_variance(F.pad(at_most, (1, 1, 1, 1), mode="replicate"))


def _sides(manifest: Manifest, rows: Rows) -> Floats | None:
    try:
        return size_features(manifest, rows)[:, :2].astype(np.float64)
    except UserError:
        return None


def _jpeg_bytes(manifest: Manifest, rows: Rows) -> Floats | None:
    names = manifest.table["image"].iloc[rows].str.lower()
    if not names.str.endswith(_JPEG).all():
        return None
    try:
        return np.array([manifest.path(int(row)).stat().st_size for row in rows], np.float64)
    except OSError:
        return None

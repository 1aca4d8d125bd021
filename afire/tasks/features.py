"""Features of films, computed once: a cache keyed by what decides them (weights, films, pooling, size).

Shapes: N films, L tokens, D width.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afire.data.dataset import DecodedFilms, Films, PackedFilms
from afire.errors import UserError
from afire.files import sha256_text, write_atomic
from afire.progress import progress
from afire.tasks.backbone import Backbone

Pooling = Literal["mean", "class", "tokens"]
BATCH = 64
_VERSION = 1  # raise it when the same weights and films give other features

logger = logging.getLogger("afire")


def default_cache() -> Path:
    """``AFIRE_CACHE``/features, else ``~/.cache/afire/features``."""
    base = os.environ.get("AFIRE_CACHE")
    return (Path(base) if base else Path.home() / ".cache" / "afire") / "features"


def data_content_hash(films: Films) -> str:
    """Hash of the films themselves: a pack's pixels; else the manifest and each file's size and time of change."""
    if isinstance(films, PackedFilms):
        return films.summary.hash
    digest = hashlib.sha256(films.manifest.hash.encode())
    if isinstance(films, DecodedFilms):
        digest.update(f"{films.fit} {films.voi}".encode())
    for row in range(len(films)):
        try:
            status = films.manifest.path(row).stat()
            digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
        except OSError:
            digest.update(b"missing\n")  # the reader will say what is wrong with it
    return digest.hexdigest()


def film_features(
    backbone: Backbone,
    films: Films,
    rows: NDArray[np.int64],
    pooling: Literal["mean", "class"] = "mean",
    device: torch.device | None = None,
    cache: Path | None = None,
) -> NDArray[np.float32]:
    """Features (len(rows), D); those in ``cache`` are read, the others computed and added to it."""
    check_size(backbone, films)
    if cache is None:
        return _compute(backbone, films, rows, pooling, device)
    file = cache / f"{_key(backbone, films, pooling)}.npz"
    known_rows, known = _read(file)
    missing = np.setdiff1d(rows, known_rows)
    if len(missing):
        found = _compute(backbone, films, missing, pooling, device)
        known_rows = np.concatenate([known_rows, missing])
        known = np.concatenate([known, found]) if len(known) else found
        write_atomic(file, lambda path: np.savez(path, rows=known_rows, features=known))
    else:
        logger.info("features of %s films from the cache", f"{len(rows):,}")
    place = np.empty(known_rows.max(initial=-1) + 1, np.int64)
    place[known_rows] = np.arange(len(known_rows))
    chosen: NDArray[np.float32] = known[place[rows]]
    return chosen


def feature_batches(
    backbone: Backbone, films: Films, rows: NDArray[np.int64], pooling: Pooling, device: torch.device | None = None
) -> Iterator[NDArray[np.float32]]:
    """Features of ``rows`` in batches: (b, D), or (b, L, D) image tokens with pooling ``tokens``."""
    check_size(backbone, films)
    target = device or torch.device("cpu")
    encoder, normalise = backbone.encoder.to(target), backbone.normalise.to(target)
    with progress("features", len(rows), "films") as bar, torch.inference_mode():
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            images = films.batch(batch).to(target)
            yield _pool(encoder(normalise(images)), pooling).float().cpu().numpy()
            bar.advance(len(batch))


def check_size(backbone: Backbone, films: Films) -> None:
    """Films must be whole patches; another size than the training's is allowed and said."""
    patch, trained = backbone.config.encoder.patch_size, backbone.config.image.size
    if films.size % patch:
        raise UserError(
            f"films of {films.size} px are not whole patches of {patch} px; "
            f"pack them at a multiple of {patch}, best at {trained}."
        )
    if films.size != trained:
        logger.warning("the films have %d px, the weights were made for %d px", films.size, trained)


def _compute(
    backbone: Backbone, films: Films, rows: NDArray[np.int64], pooling: Pooling, device: torch.device | None
) -> NDArray[np.float32]:
    return np.concatenate(list(feature_batches(backbone, films, rows, pooling, device)))


def _pool(tokens: Tensor, pooling: Pooling) -> Tensor:
    """Tokens (B, 1 + L, D), the class token first."""
    if pooling == "class":
        return tokens[:, 0]
    return tokens[:, 1:].mean(dim=1) if pooling == "mean" else tokens[:, 1:]


def _key(backbone: Backbone, films: Films, pooling: Pooling) -> str:
    image = backbone.config.image
    heads = backbone.config.encoder.heads  # leaves no trace in the shapes of the tensors
    parts = (_VERSION, backbone.hash, heads, image.normalise, image.channels, films.size, pooling)
    return sha256_text(" ".join(map(str, (*parts, data_content_hash(films)))))


def _read(file: Path) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """What the cache has; a torn file is the same as none."""
    nothing = np.empty(0, np.int64), np.empty((0, 0), np.float32)
    if not file.exists():
        return nothing
    try:
        with np.load(file, allow_pickle=False) as stored:
            rows, features = stored["rows"], stored["features"]
        if rows.ndim != 1 or features.ndim != 2 or len(rows) != len(features):
            raise ValueError("other shapes than were written")
        return rows, features
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        logger.warning("the cached features %s cannot be read (%s) and are computed again", file.name, error)
        return nothing

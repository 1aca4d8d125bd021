"""Networks over many films without gradients: their outputs, features that are computed once, and files of features.

:func:`predict` shares films among processes, and every process gets the outputs of all. Features are kept in a cache,
keyed by what decides them: weights, films, pooling and size. :func:`write_features` writes them for other tools:

- Parquet: the manifest's image, split, patient, normal and labels, and a column ``feature`` with a list of D numbers,
  or of L * D numbers, token by token, when all tokens are asked for. Its metadata key ``afire.embed`` says how the
  features were made and, for tokens, L and D.
- npz: arrays ``image``, ``split``, ``patient``, ``features`` (N, D) or (N, L, D), and ``about``, the same JSON text.

Trivial features need no network and belong in every table, because a representation that does not beat them has not
shown that it sees anatomy: ``metadata`` (width, height, area and aspect of the original file), ``area`` alone, because
four facts may fit the training films better and new ones worse, ``sharpness`` (variance of the Laplacian), and ``edge``
(the outermost tenth of the film, in which hardly any lung lies, as the audit looks at it).

Shapes: N films, B films of a batch, L tokens, D width, S pixels a side.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from afire._version import __version__
from afire.data.audit.measure import THUMB_SIDE, edge_ranks, rank_thumb
from afire.data.decode import film_shape
from afire.data.manifest import LABEL_PREFIX, META_PREFIX, Manifest
from afire.data.pack import DecodedFilms, Films, PackedFilms
from afire.errors import UserError
from afire.files import sha256_text, write_atomic
from afire.nn import distributed
from afire.progress import progress
from afire.weights import Weights

Pooling = Literal["mean", "class", "tokens"]
PREDICT_BATCH = 128
FEATURE_BATCH = 64
METADATA_KEY = b"afire.embed"
TRIVIAL = {
    "metadata": "metadata only",
    "area": "original area only",
    "sharpness": "sharpness only",
    "edge": "edge of the film only",
}
_CACHE_VERSION = 1  # raise it when the same weights and films give other features
_AREA = 2  # column of the area in the size features
_SIDES = (f"{META_PREFIX}orig_width", f"{META_PREFIX}orig_height")
_LAPLACIAN = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]).view(1, 1, 3, 3)

logger = logging.getLogger("afire")


def to_device(films: Films, raw: Tensor, device: torch.device) -> Tensor:
    """Films as a loader hands them over (stored numbers or floats) -> images (B, 1, S, S) in [0, 1] on ``device``."""
    moved = raw.to(device, non_blocking=True)
    return films.to_unit(moved) if isinstance(films, PackedFilms) else moved


@torch.no_grad()
def predict(
    model: nn.Module,
    films: Films,
    rows: NDArray[np.int64],
    accelerator: Accelerator,
    reduce: Callable[[Tensor, NDArray[np.int64]], Tensor],
) -> NDArray[np.generic]:
    """What ``reduce`` keeps of each film, (len(rows), ...), in the order of ``rows``.

    ``reduce`` maps the outputs of a batch and its rows to a tensor whose first axis is the batch. A collective call.
    """
    world, rank = accelerator.num_processes, accelerator.process_index
    share = -(-len(rows) // world)
    # Process r takes every W-th film from the r-th; short shares are filled up, because a gather needs equal ones.
    mine = np.resize(rows[rank::world], share) if len(rows[rank::world]) else np.resize(rows, share)
    was_training = model.training
    model.eval()
    reduced = [reduce(outputs, batch) for outputs, batch in _outputs(model, films, mine, accelerator)]
    model.train(was_training)
    gathered = distributed.gather(torch.cat(reduced).to(accelerator.device)).cpu().numpy()
    in_order = gathered.reshape(world, share, *gathered.shape[1:]).swapaxes(0, 1)
    outputs: NDArray[np.generic] = in_order.reshape(world * share, *gathered.shape[1:])[: len(rows)]
    return outputs


def _outputs(
    model: nn.Module, films: Films, rows: NDArray[np.int64], accelerator: Accelerator
) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
    for start in range(0, len(rows), PREDICT_BATCH):
        batch = rows[start : start + PREDICT_BATCH]
        raw = films.raw(batch) if isinstance(films, PackedFilms) else films.batch(batch)
        with accelerator.autocast():
            outputs = model(to_device(films, raw, accelerator.device))
        yield outputs.float(), batch


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
            digest.update(b"missing\n")  # the reader reports what is wrong with it
    return digest.hexdigest()


def film_features(
    backbone: Weights,
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
    cached_rows, cached = _read(file)
    missing = np.setdiff1d(rows, cached_rows)
    if len(missing):
        computed = _compute(backbone, films, missing, pooling, device)
        cached_rows = np.concatenate([cached_rows, missing])
        cached = np.concatenate([cached, computed]) if len(cached) else computed
        write_atomic(file, lambda path: np.savez(path, rows=cached_rows, features=cached))
    else:
        logger.info("features of %s films from the cache", f"{len(rows):,}")
    place = np.empty(cached_rows.max(initial=-1) + 1, np.int64)
    place[cached_rows] = np.arange(len(cached_rows))
    features: NDArray[np.float32] = cached[place[rows]]
    return features


def feature_batches(
    backbone: Weights, films: Films, rows: NDArray[np.int64], pooling: Pooling, device: torch.device | None = None
) -> Iterator[NDArray[np.float32]]:
    """Features of ``rows`` in batches: (b, D), or (b, L, D) image tokens with pooling ``tokens``."""
    check_size(backbone, films)
    target = device or torch.device("cpu")
    encoder, normalise = backbone.trunk.to(target), backbone.normalise.to(target)
    with progress("features", len(rows), "films") as bar, torch.inference_mode():
        for start in range(0, len(rows), FEATURE_BATCH):
            batch = rows[start : start + FEATURE_BATCH]
            images = films.batch(batch).to(target)
            yield _pool(encoder(normalise(images)), pooling).float().cpu().numpy()
            bar.advance(len(batch))


def check_size(backbone: Weights, films: Films) -> None:
    """Films must be whole patches; another size than that of the training is allowed, with a warning."""
    patch, trained = backbone.config.encoder.patch_size, backbone.config.image.size
    if films.size % patch:
        raise UserError(
            f"films of {films.size} px are not whole patches of {patch} px; "
            f"pack them at a multiple of {patch}, best at {trained}."
        )
    if films.size != trained:
        logger.warning("the films have %d px, the weights were made for %d px", films.size, trained)


def _compute(
    backbone: Weights, films: Films, rows: NDArray[np.int64], pooling: Pooling, device: torch.device | None
) -> NDArray[np.float32]:
    return np.concatenate(list(feature_batches(backbone, films, rows, pooling, device)))


def _pool(tokens: Tensor, pooling: Pooling) -> Tensor:
    """Tokens (B, 1 + L, D), the class token first."""
    if pooling == "class":
        return tokens[:, 0]
    return tokens[:, 1:].mean(dim=1) if pooling == "mean" else tokens[:, 1:]


def _key(backbone: Weights, films: Films, pooling: Pooling) -> str:
    image = backbone.config.image
    heads = backbone.config.encoder.heads  # leaves no trace in the shapes of the tensors
    facts = (_CACHE_VERSION, backbone.hash, heads, image.normalise, image.channels, films.size, pooling)
    return sha256_text(" ".join(map(str, (*facts, data_content_hash(films)))))


def _read(file: Path) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """What the cache has; a truncated file is the same as none."""
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


def write_features(
    out: Path,
    backbone: Weights,
    films: Films,
    rows: NDArray[np.int64],
    pooling: Pooling = "mean",
    device: torch.device | None = None,
) -> tuple[int, ...]:
    """Compute the features of ``rows`` and write them to ``out`` (.parquet or .npz); the shape of all features."""
    check_name(out)
    shape, about = describe_features(backbone, films, len(rows), pooling)
    write_batches(out, feature_batches(backbone, films, rows, pooling, device), films, rows, shape, about)
    return shape


def describe_features(
    backbone: Weights, films: Films, count: int, pooling: Pooling
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The shape of the features of ``count`` films, and what a file of them says about how they were made."""
    tokens = (films.size // backbone.config.encoder.patch_size) ** 2
    width = backbone.config.encoder.width
    shape = (count, tokens, width) if pooling == "tokens" else (count, width)
    about = {
        "afire": __version__,
        "pooling": pooling,
        "weights": backbone.name,
        "weights_hash": backbone.hash,
        "data_hash": data_content_hash(films),
        "size": films.size,
        "shape": list(shape[1:]),
    }
    return shape, about


def write_batches(
    out: Path,
    batches: Iterator[NDArray[np.float32]],
    films: Films,
    rows: NDArray[np.int64],
    shape: tuple[int, ...],
    about: dict[str, Any],
) -> None:
    """Write features that come in batches of ``FEATURE_BATCH`` films to ``out`` (.parquet or .npz)."""
    write = _write_parquet if out.suffix.lower() == ".parquet" else _write_npz
    write_atomic(out, lambda path: write(path, batches, films, rows, shape, about))


def check_name(out: Path) -> None:
    """Refuse a name without a known format before the work starts."""
    if out.suffix.lower() not in (".parquet", ".npz"):
        raise UserError(f"{out}: features are written as .parquet or .npz.")


def _write_parquet(
    path: Path,
    batches: Iterator[NDArray[np.float32]],
    films: Films,
    rows: NDArray[np.int64],
    shape: tuple[int, ...],
    about: dict[str, Any],
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = films.manifest.table
    columns = [
        "image",
        "split",
        "patient",
        "normal",
        *(name for name in table.columns if name.startswith(LABEL_PREFIX)),
    ]
    facts = pa.Table.from_pandas(table.iloc[rows][columns], preserve_index=False).replace_schema_metadata(None)
    length = int(np.prod(shape[1:]))
    field = pa.field("feature", pa.list_(pa.float32(), length))
    schema = facts.schema.append(field).with_metadata({METADATA_KEY: json.dumps(about)})
    offset = 0
    with pq.ParquetWriter(path, schema) as writer:
        for batch in batches:
            column = pa.FixedSizeListArray.from_arrays(pa.array(batch.reshape(-1)), length)
            block = facts.slice(offset, len(batch)).append_column(field, column)
            writer.write_table(block.replace_schema_metadata(schema.metadata))
            offset += len(batch)


def _write_npz(
    path: Path,
    batches: Iterator[NDArray[np.float32]],
    films: Films,
    rows: NDArray[np.int64],
    shape: tuple[int, ...],
    about: dict[str, Any],
) -> None:
    features = np.empty(shape, np.float32)
    offset = 0
    for batch in batches:
        features[offset : offset + len(batch)] = batch
        offset += len(batch)
    table = films.manifest.table.iloc[rows]
    texts = {name: table[name].to_numpy().astype(str) for name in ("image", "split", "patient")}
    np.savez(path, allow_pickle=False, features=features, about=np.array(json.dumps(about)), **texts)


def trivial_features(kind: str, films: Films, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Features (len(rows), F): four of the file's size, one of its area or of sharpness, or the edge cells."""
    if kind == "sharpness":
        return sharpness(films, rows)
    if kind == "edge":
        return edges(films, rows)
    sizes = size_features(films.manifest, rows)
    return sizes if kind == "metadata" else sizes[:, _AREA : _AREA + 1]


def trivial_hash(kind: str) -> str:
    """Used in place of the hash of weights in a result."""
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
    """Width and height of the upright film from the file's header, without decoding it."""
    path = manifest.path(row)
    shape = film_shape(path)
    if shape is None:
        raise UserError(
            f"the size of {path} cannot be read; give the manifest the columns meta:orig_width and meta:orig_height."
        )
    return float(shape[1]), float(shape[0])


def sharpness(films: Films, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Variance of the Laplacian of each film at the size it has here, (len(rows), 1)."""
    return _by_batch(films, rows, "sharpness", laplacian_variance).unsqueeze(1).numpy()


def edges(films: Films, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Ranks of the cells along each film's edge among themselves, (len(rows), E), as the audit takes them."""
    cells = _by_batch(films, rows, "edges", lambda images: F.adaptive_avg_pool2d(images, THUMB_SIDE)[:, 0])
    ranks = np.stack([rank_thumb(thumb).ravel() for thumb in cells.numpy()])
    return edge_ranks(ranks)


@torch.no_grad()
def network_features(
    network: nn.Module, films: Films, rows: NDArray[np.int64], device: torch.device
) -> NDArray[np.float32]:
    """Outputs (len(rows), D) of a network that is not one of our encoders."""
    return _by_batch(films, rows, "features", lambda images: network(images.to(device)).float().cpu()).numpy()


def _by_batch(films: Films, rows: NDArray[np.int64], description: str, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``compute`` gives for images (B, 1, S, S), joined over the batches of ``rows``."""
    values = []
    with progress(description, len(rows), "films") as bar:
        for start in range(0, len(rows), FEATURE_BATCH):
            batch = rows[start : start + FEATURE_BATCH]
            values.append(compute(films.batch(batch)))
            bar.advance(len(batch))
    return torch.cat(values)


def laplacian_variance(images: Tensor) -> Tensor:
    """(B, 1, S, S) -> (B,), over the pixels that have four neighbours."""
    return F.conv2d(images, _LAPLACIAN.to(images)).flatten(1).var(dim=1, correction=0)

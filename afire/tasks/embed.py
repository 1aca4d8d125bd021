"""Features as a file for other tools: Parquet (a row for each film) or npz (arrays).

Parquet: the manifest's image, split, patient, normal and labels, and a column ``feature`` with a list of D numbers,
or with L * D numbers, token by token, when all tokens are asked for. Its metadata key ``afire.embed`` says how the
features were made and, for tokens, L and D. npz: arrays ``image``, ``split``, ``patient``, ``features`` (N, D) or
(N, L, D), and ``about``, the same JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from afire._version import __version__
from afire.data.dataset import Films
from afire.data.manifest import LABEL_PREFIX
from afire.errors import UserError
from afire.files import write_atomic
from afire.tasks.backbone import Backbone
from afire.tasks.features import Pooling, data_content_hash, feature_batches

METADATA_KEY = b"afire.embed"


def write_features(
    out: Path,
    backbone: Backbone,
    films: Films,
    rows: NDArray[np.int64],
    pooling: Pooling = "mean",
    device: torch.device | None = None,
) -> tuple[int, ...]:
    """Compute the features of ``rows`` and write them to ``out`` (.parquet or .npz); the shape of all features."""
    check_name(out)
    tokens = (films.size // backbone.config.encoder.patch_size) ** 2
    width = backbone.config.encoder.width
    shape = (len(rows), tokens, width) if pooling == "tokens" else (len(rows), width)
    about = {
        "afire": __version__,
        "pooling": pooling,
        "weights": backbone.name,
        "weights_hash": backbone.hash,
        "data_hash": data_content_hash(films),
        "size": films.size,
        "shape": list(shape[1:]),
    }
    batches = feature_batches(backbone, films, rows, pooling, device)
    write = _write_parquet if out.suffix.lower() == ".parquet" else _write_npz
    write_atomic(out, lambda path: write(path, batches, films, rows, shape, about))
    return shape


def check_name(out: Path) -> None:
    """Refuse a name that tells no format, before the work and not after it."""
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
    kept = ["image", "split", "patient", "normal", *(name for name in table.columns if name.startswith(LABEL_PREFIX))]
    facts = pa.Table.from_pandas(table.iloc[rows][kept], preserve_index=False).replace_schema_metadata(None)
    length = int(np.prod(shape[1:]))
    field = pa.field("feature", pa.list_(pa.float32(), length))
    schema = facts.schema.append(field).with_metadata({METADATA_KEY: json.dumps(about)})
    done = 0
    with pq.ParquetWriter(path, schema) as writer:
        for batch in batches:
            column = pa.FixedSizeListArray.from_arrays(pa.array(batch.reshape(-1)), length)
            part = facts.slice(done, len(batch)).append_column(field, column)
            writer.write_table(part.replace_schema_metadata(schema.metadata))
            done += len(batch)


def _write_npz(
    path: Path,
    batches: Iterator[NDArray[np.float32]],
    films: Films,
    rows: NDArray[np.int64],
    shape: tuple[int, ...],
    about: dict[str, Any],
) -> None:
    features = np.empty(shape, np.float32)
    done = 0
    for batch in batches:
        features[done : done + len(batch)] = batch
        done += len(batch)
    table = films.manifest.table.iloc[rows]
    texts = {name: table[name].to_numpy().astype(str) for name in ("image", "split", "patient")}
    np.savez(path, allow_pickle=False, features=features, about=np.array(json.dumps(about)), **texts)

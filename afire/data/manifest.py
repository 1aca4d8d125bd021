"""A manifest is a table of films: one row each, paths relative to one root.

Columns
    image     path relative to the root, with forward slashes; unique
    split     ``train``, ``val``, ``test`` or empty
    patient   an id that groups films of one person; never a name
    view      ``PA``, ``AP``, ``LATERAL`` or empty
    normal    1.0 normal, 0.0 not, NaN unknown: the rule is the dataset builder's
    label:X   1.0 present, 0.0 absent, NaN unknown, one column for each finding X
    boxes     JSON list of {label, x, y, w, h} in fractions of width and height, or empty
    mask      path of a mask image relative to the root, or empty; non-zero = inside
    rle       JSON {size: [height, width], runs: [[start, length], ...]} row-major, or empty
    meta:X    anything else worth keeping (original width, subtype); never an identifying tag
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd

from afire.errors import UserError
from afire.files import require_file, sha256_text, write_atomic, write_text

LABEL_PREFIX = "label:"
META_PREFIX = "meta:"
SPLITS = ("train", "val", "test")
TEXT_COLUMNS = ("image", "split", "patient", "view", "boxes", "mask", "rle")
_METADATA_KEY = b"afire.manifest"
_CSV_HEADER = "# afire manifest "


@dataclass(frozen=True)
class Manifest:
    """A table of films, the root its paths start from, and how it was made."""

    table: pd.DataFrame
    root: Path
    info: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def labels(self) -> list[str]:
        """Names of the findings, in column order."""
        return [name.removeprefix(LABEL_PREFIX) for name in self.table.columns if name.startswith(LABEL_PREFIX)]

    @property
    def hash(self) -> str:
        """Content hash of the table; equal for Parquet and CSV, whatever the root and the column types."""
        return sha256_text(self.table.to_csv(index=False, float_format="%.9g", lineterminator="\n"))

    def path(self, row: int) -> Path:
        """Full path of the film in ``row``."""
        return inside_root(self.root, str(self.table["image"].iloc[row]))

    def mask_path(self, row: int) -> Path | None:
        """Full path of the mask in ``row``, if it has one."""
        name = str(self.table["mask"].iloc[row])
        return inside_root(self.root, name) if name else None

    def where(self, keep: pd.Series) -> Manifest:
        """The rows where ``keep`` is true, renumbered."""
        return Manifest(self.table[keep].reset_index(drop=True), self.root, self.info)


def make_manifest(table: pd.DataFrame, root: Path, info: Mapping[str, Any] | None = None) -> Manifest:
    """Complete missing columns, bring them in order and check that the table is a manifest."""
    table = table.copy()
    if "image" not in table:
        raise UserError(f"the manifest has no column 'image'; its columns are {', '.join(map(str, table.columns))}.")
    if len(table) == 0:
        raise UserError(f"the manifest for {root} has no rows.")
    for name in TEXT_COLUMNS:
        values = table[name] if name in table else pd.Series("", index=table.index)
        table[name] = values.astype("object").where(values.notna(), "").astype(str)
    # A film without a patient id is its own patient: the only grouping that invents nothing.
    table["patient"] = table["patient"].where(table["patient"] != "", table["image"])
    if "normal" not in table:
        table["normal"] = float("nan")
    numeric = ["normal"] + [name for name in table.columns if name.startswith(LABEL_PREFIX)]
    for name in numeric:
        table[name] = _as_label(table[name], name)
    labels = [name for name in table.columns if name.startswith(LABEL_PREFIX)]
    metas = [name for name in table.columns if name.startswith(META_PREFIX)]
    order = ["image", "split", "patient", "view", "normal", *labels, "boxes", "mask", "rle", *metas]
    unknown = [name for name in table.columns if name not in order]
    if unknown:
        raise UserError(f"unknown manifest columns {', '.join(unknown)}; name labels label:X and other facts meta:X.")
    _check_rows(table)
    return Manifest(table[order].reset_index(drop=True), root, dict(info or {}))


def _as_label(values: pd.Series, name: str) -> pd.Series:
    numbers = pd.to_numeric(values, errors="coerce").astype("float64")
    wrong = values.notna() & (values.astype(str).str.strip() != "") & ~numbers.isin([0.0, 1.0]) & ~_is_nan(values)
    if wrong.any():
        raise UserError(
            f"column {name} holds {values[wrong].iloc[0]!r} in row {int(wrong.to_numpy().argmax())}; "
            "allowed are 1, 0 and empty (unknown)."
        )
    return numbers


def _is_nan(values: pd.Series) -> pd.Series:
    return values.astype(str).str.lower().isin(["nan", "none", "<na>"])


def _check_rows(table: pd.DataFrame) -> None:
    for name in ("image", "mask"):
        for value in table[name]:
            check_relative(value, name)
    repeated = table["image"][table["image"].duplicated()]
    if len(repeated):
        raise UserError(f"the manifest lists {repeated.iloc[0]} more than once ({len(repeated)} repeated rows).")
    wrong = ~table["split"].isin(["", *SPLITS])
    if wrong.any():
        raise UserError(f"split {table['split'][wrong].iloc[0]!r} is not one of {', '.join(SPLITS)} or empty.")


def check_relative(value: str, what: str) -> None:
    """Refuse absolute paths, drive letters and ``..``: a manifest must not reach outside its root."""
    path = PurePosixPath(value.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or (len(value) > 1 and value[1] == ":"):
        raise UserError(f"{what} path {value!r} leaves the manifest's root; use paths relative to it.")


def inside_root(root: Path, relative: str) -> Path:
    """``root/relative``, refused if a link on the way leads out of the root."""
    check_relative(relative, "image")
    path = root / relative
    real_root = os.path.realpath(root)
    if os.path.commonpath([real_root, os.path.realpath(path)]) != real_root:
        raise UserError(f"{relative!r} is a link that leaves the root {root}; copy the file or choose another root.")
    return path


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write ``.parquet`` or ``.csv``; the root is stored relative to the file, so that the two can move together."""
    info = {**manifest.info, "root": _relative_or_absolute(manifest.root, path.parent)}
    if path.suffix == ".csv":
        text = manifest.table.to_csv(index=False, float_format="%.9g", lineterminator="\n")
        write_text(path, f"{_CSV_HEADER}{json.dumps(info)}\n{text}")
    elif path.suffix == ".parquet":
        write_atomic(path, lambda temporary: _write_parquet(manifest.table, info, temporary))
    else:
        raise UserError(f"{path}: a manifest ends in .parquet or .csv.")


def _relative_or_absolute(root: Path, folder: Path) -> str:
    try:
        return Path(os.path.relpath(root.resolve(), folder.resolve())).as_posix()
    except ValueError:  # another drive
        return root.resolve().as_posix()


def _write_parquet(table: pd.DataFrame, info: Mapping[str, Any], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow = pa.Table.from_pandas(table, preserve_index=False)
    pq.write_table(
        arrow.replace_schema_metadata({**(arrow.schema.metadata or {}), _METADATA_KEY: json.dumps(info)}), path
    )


def read_manifest(path: Path, root: Path | None = None) -> Manifest:
    """Read Parquet or CSV. ``root`` overrides the stored one; a plain CSV's root is its own folder."""
    require_file(path, "manifest")
    if path.suffix == ".parquet":
        table, info = _read_parquet(path)
    elif path.suffix == ".csv":
        table, info = _read_csv(path)
    else:
        raise UserError(f"{path}: a manifest ends in .parquet or .csv.")
    stored = str(info.pop("root", "."))
    return make_manifest(table, root if root is not None else (path.parent / stored), info)


def _read_parquet(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        arrow = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file ({str(error).splitlines()[0]}).") from None
    raw = (arrow.schema.metadata or {}).get(_METADATA_KEY)
    return arrow.to_pandas(), json.loads(raw) if raw else {}


def _read_csv(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig") as stream:
            first = stream.readline()
            ours = first.startswith(_CSV_HEADER)
            info = json.loads(first.removeprefix(_CSV_HEADER)) if ours else {}
        text = list(TEXT_COLUMNS)
        table = pd.read_csv(
            path, skiprows=1 if ours else 0, dtype=dict.fromkeys(text, str), keep_default_na=True, encoding="utf-8-sig"
        )
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not a readable CSV file ({error}).") from None
    return table, info

"""A manifest is a table of films: one row each, paths relative to one root.

Columns
    image     path relative to the root, with forward slashes; unique
    split     ``train``, ``val``, ``test`` or empty
    patient   a pseudonym or a hash that groups films of one person; never a name; the film itself where unknown
    view      ``PA``, ``AP``, ``LATERAL``, ``FRONTAL`` (either of the first), ``OTHER`` or empty
    normal    1.0 normal, 0.0 not, NaN unknown: the rule is the dataset builder's
    label:X   1.0 present, 0.0 absent, NaN unknown, one column for each finding X
    boxes     JSON list of {label, x, y, w, h} in fractions of width and height, or empty
    mask      path of a mask image relative to the root, or empty; non-zero = inside
    rle       JSON {size: [height, width], runs: [[start, length], ...]} row-major, or empty; no runs = nothing inside
    meta:X    anything else worth keeping (original width, subtype); never an identifying tag

Parquet and CSV hold the same table. CSV knows no types, so types follow from the content: a ``meta:`` column in which
every value is a plainly written number is numeric, any other is text (``007`` stays ``007``).

Shapes: N films, C labels.
"""

from __future__ import annotations

import csv
import difflib
import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from afire.data.film import hash_patients, view_names
from afire.errors import UserError
from afire.files import require_file, sha256_text, write_atomic, write_text

LABEL_PREFIX = "label:"
META_PREFIX = "meta:"
SOURCE = f"{META_PREFIX}source"  # in a joined manifest: the set that a film is from
SPLITS = ("train", "val", "test")
TEXT_COLUMNS = ("image", "split", "patient", "view", "boxes", "mask", "rle")
_METADATA_KEY = b"afire.manifest"
_CSV_HEADER = "# afire manifest "
_UNKNOWN = ("", "nan", "none", "<na>", "na", "n/a", "null")
_LEAVES_ROOT = r"^/|^[A-Za-z]:|(?:^|/)\.\.(?:/|$)|[\x00-\x1f\x7f]"
_EDGE = 1 + 1e-6  # of a box in fractions; sums of rounded fractions may pass 1 by a hair
_UNTIDY = r"//|(?:^|/)\.(?:/|$)|/$"
Floats = NDArray[np.float64]
ABNORMAL = "abnormal"


@dataclass(frozen=True)
class Box:
    """A finding's box: left, top, width and height in fractions of the film's width and height."""

    label: str
    x: float
    y: float
    w: float
    h: float


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
        return sha256_text(_csv_text(self.table))

    def path(self, row: int) -> Path:
        """Full path of the film in ``row``."""
        return inside_root(self.root, str(self.table["image"].iloc[row]))

    def mask_path(self, row: int) -> Path | None:
        """Full path of the mask in ``row``, if it has one."""
        name = str(self.table["mask"].iloc[row])
        return inside_root(self.root, name, "mask") if name else None

    def boxes(self, row: int) -> list[Box]:
        """The boxes drawn in the film in ``row``."""
        return parse_boxes(str(self.table["boxes"].iloc[row]), str(self.table["image"].iloc[row]))

    @property
    def patient_known(self) -> pd.Series:
        """For each film whether it has a patient id; one without is its own patient, also in a joined manifest."""
        table = self.table
        known = table["patient"] != table["image"]
        if SOURCE in table:  # joining puts the set's name before the id, and a folder before the path
            names = zip(table["image"], table[SOURCE], table["patient"], strict=True)
            alone = [f"/{image}".endswith(f"/{name.removeprefix(f'{source}:')}") for image, source, name in names]
            known &= ~np.array(alone)
        return known

    def where(self, keep: pd.Series) -> Manifest:
        """The rows where ``keep`` is true, renumbered."""
        return Manifest(self.table[keep].reset_index(drop=True), self.root, self.info)


def make_manifest(table: pd.DataFrame, root: Path, info: Mapping[str, Any] | None = None) -> Manifest:
    """Complete missing columns, bring them in order and check that the table is a manifest."""
    table = table.reset_index(drop=True)
    _check_columns(table, root)
    for name in TEXT_COLUMNS:
        table[name] = _as_text(table[name], name) if name in table else ""
    for name in ("image", "mask"):
        table[name] = clean_paths(table[name], name)
    # A film without a patient id is its own patient: the only grouping that invents nothing.
    table["patient"] = table["patient"].where(table["patient"] != "", table["image"])
    if "normal" not in table:
        table["normal"] = float("nan")
    labels = [name for name in table.columns if name.startswith(LABEL_PREFIX)]
    metas = [name for name in table.columns if name.startswith(META_PREFIX)]
    for name in ["normal", *labels]:
        table[name] = _as_label(table[name], name)
    for name in metas:
        table[name] = _as_meta(table[name], name)
    _check_rows(table)
    order = ["image", "split", "patient", "view", "normal", *labels, "boxes", "mask", "rle", *metas]
    return Manifest(table[order], root, dict(info or {}))


def _check_columns(table: pd.DataFrame, root: Path) -> None:
    names = [str(name) for name in table.columns]
    if "image" not in names:
        raise UserError(f"the manifest has no column 'image'; its columns are {', '.join(names)}.")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UserError(f"the manifest has the column {repeated[0]} more than once.")
    known = {*TEXT_COLUMNS, "normal"}
    unknown = [name for name in names if name not in known and not name.startswith((LABEL_PREFIX, META_PREFIX))]
    unknown += [name for name in names if name in (LABEL_PREFIX, META_PREFIX)]
    if unknown:
        raise UserError(f"unknown manifest columns {', '.join(unknown)}; name labels label:X and other facts meta:X.")
    if len(table) == 0:
        raise UserError(f"the manifest for {root} has no rows.")


def _as_text(values: pd.Series, name: str) -> pd.Series:
    if pd.api.types.is_float_dtype(values):  # ids that pandas made floats because one was missing: 12.0 was 12
        numbers = values.to_numpy(dtype="float64", na_value=np.nan)
        if (np.isnan(numbers) | (np.abs(numbers) < 2**53) & (numbers == np.floor(numbers))).all():
            values = pd.Series(numbers, index=values.index).astype("Int64")
    try:
        text: pd.Series = values.astype("object").where(values.notna(), "").astype(str)
        if text.dtype == object:  # pandas 2 would fail only when it writes; pandas 3 has refused by now
            "".join(text).encode("utf-8")
        return text
    except UnicodeEncodeError as error:
        raise UserError(f"column {name} holds {error.object!r}, which is not valid text (UTF-8); rename it.") from None


def _as_label(values: pd.Series, name: str) -> pd.Series:
    parsed = pd.to_numeric(values, errors="coerce").to_numpy("float64", na_value=np.nan)
    numbers: pd.Series = pd.Series(parsed, index=values.index)
    doubtful = values[~numbers.isin([0.0, 1.0])]
    wrong = doubtful[~doubtful.isna() & ~doubtful.astype(str).str.strip().str.lower().isin(_UNKNOWN)]
    if len(wrong):
        raise UserError(
            f"column {name} holds {str(wrong.iloc[0])!r} in row {wrong.index[0] + 1} ({len(wrong):,} such rows); "
            "allowed are 1, 0 and empty (unknown)."
        )
    return numbers


def _as_meta(values: pd.Series, name: str) -> pd.Series:
    if pd.api.types.is_float_dtype(values):
        floats: pd.Series = pd.Series(values.to_numpy(dtype="float64", na_value=np.nan), index=values.index)
        return floats
    text = _as_text(values, name)
    distinct = [value for value in text.unique() if value != ""]
    if not all(map(_plain_number, distinct)):
        return text
    numbers: pd.Series = text.mask(text == "", "nan").astype("float64")
    return numbers


def _plain_number(text: str) -> bool:
    """Whether ``text`` is what a float column would be written as, so that writing and reading it again is exact."""
    try:
        return f"{float(text):.9g}" == text and text != "nan"
    except ValueError:
        return False


def clean_paths(values: pd.Series, what: str) -> pd.Series:
    """Forward slashes without ``./`` and ``//``, checked like :func:`check_relative` but for a whole column at once."""
    values = values.str.replace("\\", "/", regex=False)
    for value in values[values.str.contains(_LEAVES_ROOT)].head(1):
        check_relative(value, what)
    untidy = values.str.contains(_UNTIDY)
    if untidy.any():
        values = values.where(~untidy, values[untidy].map(lambda value: PurePosixPath(value).as_posix()))
    return values


def _check_rows(table: pd.DataFrame) -> None:
    empty = table["image"].isin(["", "."])
    if empty.any():
        raise UserError(f"the image path in row {int(empty.to_numpy().argmax()) + 1} of the manifest is empty.")
    repeated = table["image"][table["image"].duplicated()]
    if len(repeated):
        rows = f"{len(repeated):,} repeated row{'s' * (len(repeated) > 1)}"
        raise UserError(f"the manifest lists {repeated.iloc[0]} more than once ({rows}); keep one row for each film.")
    wrong = ~table["split"].isin(["", *SPLITS])
    if wrong.any():
        raise UserError(f"split {table['split'][wrong].iloc[0]!r} is not one of {', '.join(SPLITS)} or empty.")
    with_boxes = table["boxes"] != ""
    for image, text in zip(table["image"][with_boxes], table["boxes"][with_boxes], strict=True):
        parse_boxes(text, image)


def parse_boxes(text: str, image: str = "") -> list[Box]:
    """The boxes in a cell of the column ``boxes``; an empty cell has none. ``image`` is named in the error."""
    if not text:
        return []
    try:
        boxes = [
            Box(str(item["label"]), float(item["x"]), float(item["y"]), float(item["w"]), float(item["h"]))
            for item in json.loads(text)
        ]
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        raise UserError(f"the boxes of {image} are not a JSON list of {{label, x, y, w, h}}: {text[:80]!r}.") from None
    for box in boxes:
        # Written so that NaN fails every comparison.
        if not (box.x >= 0 and box.y >= 0 and box.w > 0 and box.h > 0 and box.x + box.w <= _EDGE >= box.y + box.h):
            raise UserError(
                f"a box of {image} lies outside the film (x {box.x:g}, y {box.y:g}, w {box.w:g}, h {box.h:g}); "
                "boxes are fractions of width and height, between 0 and 1."
            )
    return boxes


def check_relative(value: str, what: str) -> None:
    """Refuse absolute paths, drive letters, ``..`` and control characters: a manifest stays inside its root."""
    if re.search(_LEAVES_ROOT, value.replace("\\", "/")):
        raise UserError(f"{what} path {value!r} leaves the manifest's root; use paths relative to it.")


def inside_root(root: Path, relative: str, what: str = "image") -> Path:
    """``root/relative``, refused if a link on the way leads out of the root."""
    check_relative(relative, what)
    path = root / relative
    real_root = os.path.realpath(root)
    if os.path.commonpath([real_root, os.path.realpath(path)]) != real_root:
        raise UserError(f"{relative!r} is a link that leaves the root {root}; copy the file or choose another root.")
    return path


def check_manifest_name(path: Path) -> None:
    """Refuse a name that :func:`write_manifest` could not write, before the work and not after it."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise UserError(f"{path}: a manifest ends in .parquet or .csv.")


def is_manifest(path: Path) -> bool:
    """Whether the file ``path`` was written by :func:`write_manifest`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix.lower() == ".csv":
            with path.open(encoding="utf-8-sig") as stream:
                return stream.readline().lstrip('"').startswith(_CSV_HEADER)
        return _METADATA_KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError):
        return False


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write ``.parquet`` or ``.csv``; the root is stored relative to the file, so that the two can move together."""
    check_manifest_name(path)
    info = {**manifest.info, "root": _relative_or_absolute(manifest.root, path.parent)}
    if path.suffix.lower() == ".csv":
        write_text(path, f"{_CSV_HEADER}{json.dumps(info)}\n{_csv_text(manifest.table)}")
    else:
        write_atomic(path, lambda temporary: _write_parquet(manifest.table, info, temporary))


def _csv_text(table: pd.DataFrame) -> str:
    """The table as CSV; also what the hash is taken of."""
    # Labels are written by hand: pandas formats floats one by one, which takes seconds for a large table.
    names = [name for name in table.columns if name == "normal" or name.startswith(LABEL_PREFIX)]
    digits = {name: np.where(table[name].isna(), "", np.where(table[name] == 1.0, "1", "0")) for name in names}
    return str(table.assign(**digits).to_csv(index=False, float_format="%.9g", lineterminator="\n"))


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
    """Read Parquet or CSV. ``root`` overrides the stored one; a plain CSV's root is its own folder.

    In a table that afire did not write, patient ids are hashed and views are brought to those that are known: what a
    person typed there may be a name.
    """
    require_file(path, "manifest")
    check_manifest_name(path)
    try:
        table, info = _read_csv(path) if path.suffix.lower() == ".csv" else _read_parquet(path)
    except json.JSONDecodeError:
        raise UserError(f"{path}: its record of how it was made is truncated; build it again.") from None
    stored = str((info or {}).pop("root", "."))
    try:
        manifest = make_manifest(table, root if root is not None else (path.parent / stored).resolve(), info)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return manifest if info is not None else _without_names(manifest)


def _without_names(manifest: Manifest) -> Manifest:
    table = manifest.table
    patients = hash_patients(table["patient"]).where(manifest.patient_known, table["patient"])
    return Manifest(table.assign(patient=patients, view=view_names(table["view"])), manifest.root, manifest.info)


def _read_parquet(path: Path) -> tuple[pd.DataFrame, dict[str, Any] | None]:
    """The table, and how it was made; None where afire did not write it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        arrow = pq.read_table(path, partitioning=None)  # a folder called a=b must not become a column
        arrow.validate(full=True)  # else a damaged text is noticed only when it is read
        table = arrow.to_pandas()
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} is not a readable Parquet file ({reason}).") from None
    raw = (arrow.schema.metadata or {}).get(_METADATA_KEY)
    return table, _as_info(raw.decode("utf-8", "replace")) if raw else None


def _read_csv(path: Path) -> tuple[pd.DataFrame, dict[str, Any] | None]:
    """The table, and how it was made; None where afire did not write it."""
    try:
        with path.open(encoding="utf-8-sig") as stream:
            first = stream.readline()
        # A spreadsheet that saves the file again splits the first line at its commas and quotes the parts.
        line = ",".join(next(csv.reader([first]), [])).rstrip(",") if first.startswith('"') else first
        ours = line.startswith(_CSV_HEADER)
        info = _as_info(line.removeprefix(_CSV_HEADER)) if ours else None
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # more cells in a row than in the header
            table = pd.read_csv(
                path,
                skiprows=1 if ours else 0,
                dtype=str,
                keep_default_na=False,  # a patient may be called NA
                index_col=False,
                encoding="utf-8-sig",
            )
    except (pd.errors.ParserError, pd.errors.ParserWarning, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise unreadable_csv(path, error) from None
    return table, info


def unreadable_csv(path: Path, error: Exception) -> UserError:
    """What is wrong with a CSV file, by the error of reading it."""
    if isinstance(error, UnicodeDecodeError):
        return UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as CSV UTF-8.")
    return UserError(f"{path} is not a readable CSV file ({str(error).splitlines()[0]}).")


def _as_info(text: str) -> dict[str, Any]:
    info = json.loads(text)
    if not isinstance(info, dict):
        raise json.JSONDecodeError("not an object", text, 0)
    return info


def task_labels(
    manifest: Manifest, labels: Sequence[str] | None = None, option: str = "--labels"
) -> tuple[list[str], Floats]:
    """Names (C) and truth (N, C) with NaN for unknown. ``abnormal`` is 1 - normal.

    Without ``labels``: all findings of the manifest, or ``abnormal`` where it has none. ``option`` is what messages
    call the choice of labels.
    """
    names = list(labels) if labels else (manifest.labels or [ABNORMAL])
    if len(set(names)) < len(names):
        raise UserError(f"{option} names {next(n for n in names if names.count(n) > 1)!r} more than once.")
    return names, np.stack([_column(manifest, name, option) for name in names], axis=1)


def _column(manifest: Manifest, name: str, option: str) -> Floats:
    if LABEL_PREFIX + name in manifest.table:
        values = manifest.table[LABEL_PREFIX + name].to_numpy(np.float64)
    elif name == ABNORMAL:
        values = 1 - manifest.table["normal"].to_numpy(np.float64)
    else:
        known = [*manifest.labels, ABNORMAL]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"the manifest has no label {name!r}{hint} (it has {', '.join(known)}).")
    if np.isnan(values).all():
        columns = ["normal", *(LABEL_PREFIX + label for label in manifest.labels)]
        if manifest.table[columns].notna().any(axis=None):
            raise UserError(f"no film has a value for label {name}; choose other labels with {option}.")
        raise UserError(
            "these films have no labels, and this task needs some; build the manifest from class folders or a table "
            "(`afire data build classes`, `afire data build csv`)."
        )
    return values

"""Your own CSV, whose columns the options name; and what all builders share: labels, sexes, ages, patients.

Labels are in the manner of CheXpert: 1, 0, -1 uncertain, empty not mentioned.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from afire.data.decode import is_dicom
from afire.data.film import hash_patients, quiet_readers, view_names
from afire.data.manifest import LABEL_PREFIX, META_PREFIX, Manifest, clean_paths, inside_root, make_manifest
from afire.data.sources.disk import SPLIT_OF, about, keep_present, list_films, read_source
from afire.errors import ImageError, UserError
from afire.files import require_folder
from afire.progress import track

Uncertain = Literal["ones", "zeros", "ignore"]
Blank = Literal["zeros", "ignore"]
NO_FINDING = "No Finding"
SUPPORT_DEVICES = "Support Devices"
_POLICY = {"ones": 1.0, "zeros": 0.0, "ignore": float("nan")}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Columns:
    """What the columns of a user's table mean."""

    image: str = "image"
    patient: str | None = None
    split: str | None = None
    view: str | None = None
    normal: str | None = None
    """A column of 1, 0 and empty."""
    labels: Sequence[str] = ()
    """Columns of 1, 0 and empty (unknown), one for each finding."""
    findings: str | None = None
    """A column of names joined by ``separator``; every name becomes a label."""
    separator: str = "|"
    normal_finding: str | None = None
    """The name in ``findings`` that means normal; it fills the column ``normal`` and is no label."""
    mask: str | None = None
    meta: Sequence[str] = ()

    def named(self) -> list[str]:
        """Every column of the user's table that is read."""
        single = (self.image, self.patient, self.split, self.view, self.normal, self.findings, self.mask)
        return [name for name in (*single, *self.labels, *self.meta) if name is not None]


def build_table(
    root: Path,
    csv: Path,
    columns: Columns | None = None,
    *,
    prefix: str = "",
    suffix: str = "",
    mask_prefix: str = "",
    uncertain: Uncertain | None = None,
    no_label_is_normal: bool = False,
) -> Manifest:
    """The films that ``csv`` names; paths are ``prefix`` + cell + ``suffix``, relative to ``root``.

    -1 in a label is refused unless ``uncertain`` says what it shall count as. An absolute path is accepted only if it
    lies inside the root. ``no_label_is_normal``: your labels are all the diseases there are to find, so a film with 0
    in every one of them is normal.
    """
    columns = columns or Columns()
    require_folder(root, "root")
    _check(columns, no_label_is_normal)
    tabs = csv.name.lower().endswith((".tsv", ".tsv.gz"))
    source = read_source(csv, columns.named(), "\t" if tabs else ",")
    table = _facts(source, columns, csv)
    table.insert(0, "image", _paths(source[columns.image], prefix, suffix, root, "image"))
    if columns.mask:
        table["mask"] = _paths(source[columns.mask], mask_prefix, "", root, "mask")
    labels = _labels(source, columns, uncertain, csv)
    if no_label_is_normal:
        labels.insert(0, "normal", _all_absent(labels))
    table = _present(table.join(labels), root, csv)
    options = {
        **asdict(columns),
        "prefix": prefix,
        "suffix": suffix,
        "mask_prefix": mask_prefix,
        "uncertain": uncertain,
        "no_label_is_normal": no_label_is_normal,
    }
    return make_manifest(table, root, about("csv", _normal_rule(columns, no_label_is_normal), **options))


def _check(columns: Columns, no_label_is_normal: bool) -> None:
    if no_label_is_normal and (columns.normal or columns.normal_finding):
        raise UserError("--no-label-is-normal and another option both say what is normal; give one of them.")
    if no_label_is_normal and not (columns.labels or columns.findings):
        raise UserError("--no-label-is-normal needs labels; give --label-columns or --findings-column.")
    if columns.normal_finding is not None and columns.findings is None:
        raise UserError("--normal-finding names a value of --findings-column; give that too.")
    if columns.normal_finding is not None and columns.normal is not None:
        raise UserError("--normal-finding and --normal-column both say what is normal; give one of them.")


def _normal_rule(columns: Columns, no_label_is_normal: bool) -> str:
    if no_label_is_normal:
        return "1 where every label is 0, 0 where one is 1, else unknown"
    if columns.normal_finding is not None:
        return f"1 where {columns.findings} is {columns.normal_finding} alone, 0 where it names another, else unknown"
    return f"the column {columns.normal}" if columns.normal else "unknown for every film"


def _facts(source: pd.DataFrame, columns: Columns, csv: Path) -> pd.DataFrame:
    """Columns patient, split, view and meta:X, those that the user named."""
    table = pd.DataFrame(index=source.index)
    if columns.patient:
        table["patient"] = hash_patients(source[columns.patient])
    if columns.split:
        table["split"] = _splits(source[columns.split], csv)
    if columns.view:
        table["view"] = view_names(source[columns.view])
    for name in columns.meta:
        table[META_PREFIX + name] = source[name]
    return table


def _paths(cells: pd.Series, prefix: str, suffix: str, root: Path, what: str) -> pd.Series:
    """Paths relative to the root; an empty cell stays empty, an absolute path inside the root loses the root."""
    cells = cells.str.strip().str.replace("\\", "/", regex=False)
    paths = (prefix + cells + suffix).where(cells != "", "")
    for folder in {root.absolute().as_posix(), root.resolve().as_posix()}:
        start = folder.rstrip("/") + "/"
        paths = paths.where(~cells.str.startswith(start), cells.str.removeprefix(start))
    return clean_paths(paths, what)


def _splits(values: pd.Series, csv: Path) -> pd.Series:
    names = values.str.strip().str.lower()
    splits = names.map({**SPLIT_OF, "": ""})
    if splits.isna().any():
        raise UserError(
            f"{csv} names the split {values[splits.isna()].iloc[0]!r}; expected train, val or test, or empty."
        )
    return splits


def _labels(source: pd.DataFrame, columns: Columns, uncertain: Uncertain | None, csv: Path) -> pd.DataFrame:
    """Columns normal (if a column gives it) and label:X."""
    groups: list[pd.DataFrame] = []
    if columns.normal:
        normal = raw_findings(source, [columns.normal], csv).set_axis(["normal"], axis=1)
        if (normal["normal"] == -1).any():
            raise UserError(f"{csv}: column {columns.normal!r} holds -1; expected 1, 0 or empty.")
        groups.append(normal)
    if columns.labels:
        raw = raw_findings(source, columns.labels, csv)
        if uncertain is None and (raw == -1).any(axis=None):
            raise UserError(f"{csv} holds -1 as a label; say with --uncertain what it shall count as.")
        groups.append(with_policy(raw, uncertain or "ignore", "ignore"))
    if columns.findings:
        groups.append(_named_findings(source[columns.findings], columns))
    return pd.concat(groups, axis=1) if groups else pd.DataFrame(index=source.index)


def _all_absent(labels: pd.DataFrame) -> pd.Series:
    """1 where every label is 0, 0 where one is 1, else NaN."""
    known = labels.notna().all(axis=1)
    return (labels == 0).all(axis=1).astype("float64").where(known | (labels == 1).any(axis=1))


def _named_findings(cells: pd.Series, columns: Columns) -> pd.DataFrame:
    """``Mass|Nodule`` to label columns of 0 and 1; an empty cell is unknown in all of them."""
    tidy = cells.str.strip().str.replace(rf"\s*{re.escape(columns.separator)}\s*", "|", regex=True)
    present = tidy.str.get_dummies("|").drop(columns="", errors="ignore").astype("float64")
    present.loc[tidy == ""] = float("nan")
    normal = columns.normal_finding
    if normal is None:
        return present.add_prefix(LABEL_PREFIX)
    if normal not in present:
        names = ", ".join(present.columns[:10])
        raise UserError(f"no film has the finding {normal!r} in column {columns.findings}; it holds {names}.")
    others = present.drop(columns=normal)
    alone = (present[normal] == 1) & (others.sum(axis=1) == 0)
    others.columns = [LABEL_PREFIX + name for name in others.columns]
    others.insert(0, "normal", alone.astype("float64").where(tidy != ""))
    return others


def _present(table: pd.DataFrame, root: Path, csv: Path) -> pd.DataFrame:
    """Rows whose film is on disk; a mask that is not there is left out with a warning."""
    films = set(list_films(root, look_inside=True))
    present = keep_present(table, table["image"].where(table["image"].isin(films)), root, csv)
    if "mask" in present:
        lost = (present["mask"] != "") & ~present["mask"].isin(films)
        if lost.any():
            logger.warning(
                "%s masks, such as %s, are not in %s", f"{lost.sum():,}", present["mask"][lost].iloc[0], root
            )
            present["mask"] = present["mask"].where(~lost, "")
    return present


def patients_from_pattern(films: Sequence[str], pattern: str | None) -> list[str]:
    """A hash of the first group of the regular expression ``pattern`` in each path; empty where it does not occur."""
    if pattern is None:
        return [""] * len(films)
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(f"--patient-pattern {pattern!r} is not a regular expression: {error}.") from None
    if expression.groups < 1:
        raise UserError(f"--patient-pattern {pattern!r} has no group; put the patient in brackets, as in '(p[0-9]+)/'.")
    matches = [expression.search(film) for film in films]
    patients = [(match.group(1) or "") if match else "" for match in matches]
    if not any(patients):
        raise UserError(f"--patient-pattern {pattern!r} fits none of the {len(films):,} paths, such as {films[0]}.")
    without = patients.count("")
    if without:
        logger.warning("%s of %s films do not fit --patient-pattern: each is its own patient", without, len(films))
    return hash_patients(pd.Series(patients)).tolist()


def read_headers(root: Path, films: Sequence[str]) -> pd.DataFrame:
    """Columns patient (as a hash) and view from the DICOM header of each film; empty where there is none."""
    from afire.data.dicom import read_header

    rows: list[tuple[str, str]] = []
    with quiet_readers():
        for film in track(films, "reading headers", unit="films"):
            path = inside_root(root, film)
            try:
                rows.append(read_header(path) if is_dicom(path) else ("", ""))
            except ImageError:  # damaged: the audit names such films
                rows.append(("", ""))
    return pd.DataFrame(rows, columns=["patient", "view"])


def raw_findings(table: pd.DataFrame, names: Sequence[str], path: Path | str) -> pd.DataFrame:
    """The columns ``names`` as numbers: 1 present, 0 absent, -1 uncertain, NaN not mentioned."""
    numbers = pd.DataFrame({name: _as_number(table[name]) for name in names}, index=table.index)
    for name in names:
        blank = table[name].str.strip() == ""
        wrong = table[name][~blank & ~numbers[name].isin([1.0, 0.0, -1.0])]
        if len(wrong):
            raise UserError(
                f"{path}: column {name!r} holds {wrong.iloc[0]!r} in row {wrong.index[0] + 1}; "
                "expected 1, 0, -1 (uncertain) or empty."
            )
    return numbers


def _as_number(text: pd.Series) -> pd.Series:
    numbers: pd.Series = pd.to_numeric(text, errors="coerce").astype("float64")
    return numbers


def with_policy(raw: pd.DataFrame, uncertain: Uncertain, blank: Blank) -> pd.DataFrame:
    """Label columns from :func:`raw_findings`, with the chosen values for uncertain and not mentioned."""
    values = raw.to_numpy(dtype="float64")
    decided = np.where(np.isnan(values), _POLICY[blank], np.where(values == -1.0, _POLICY[uncertain], values))
    return pd.DataFrame(decided, index=raw.index, columns=[LABEL_PREFIX + name for name in raw.columns])


def normal_from(raw: pd.DataFrame, uncertain_is_disease: bool) -> pd.Series:
    """1 where No Finding is stated and no disease is, 0 where a disease is stated, else NaN.

    Support Devices are no disease. With ``uncertain_is_disease`` an uncertain disease makes No Finding doubtful: NaN.
    """
    diseases = raw.drop(columns=[NO_FINDING, SUPPORT_DEVICES], errors="ignore")
    diseased = (diseases == 1.0).any(axis=1)
    doubtful = (diseases == -1.0).any(axis=1) & uncertain_is_disease
    normal = np.where(diseased, 0.0, np.where((raw[NO_FINDING] == 1.0) & ~doubtful, 1.0, np.nan))
    return pd.Series(normal, index=raw.index)


def sexes(values: pd.Series) -> pd.Series:
    """M, F or empty."""
    first = values.str.strip().str.upper().str[:1]
    return first.where(first.isin(["M", "F"]), "")


def ages(values: pd.Series) -> pd.Series:
    """Years from ``57`` or ``057Y``; other units, typing errors such as 411 years, and 0 for unknown are left empty."""
    years = pd.to_numeric(values.str.strip().str.upper().str.removesuffix("Y"), errors="coerce").astype("float64")
    plausible: pd.Series = years.where((years > 0) & (years <= 120))
    return plausible

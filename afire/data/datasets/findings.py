"""Labels in the manner of CheXpert (1, 0, -1 uncertain, empty not mentioned), views and sexes, in one spelling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from afire.data.manifest import LABEL_PREFIX
from afire.errors import UserError

Uncertain = Literal["ones", "zeros", "ignore"]
Blank = Literal["zeros", "ignore"]

NO_FINDING = "No Finding"
SUPPORT_DEVICES = "Support Devices"
_POLICY = {"ones": 1.0, "zeros": 0.0, "ignore": float("nan")}
_LATERAL = ("LATERAL", "LAT", "LL", "RL")


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
    """Label columns of the manifest from :func:`raw_findings`: what uncertain and not mentioned shall count as."""
    values = raw.to_numpy(dtype="float64")
    decided = np.where(np.isnan(values), _POLICY[blank], np.where(values == -1.0, _POLICY[uncertain], values))
    return pd.DataFrame(decided, index=raw.index, columns=[LABEL_PREFIX + name for name in raw.columns])


def normal_from(raw: pd.DataFrame, uncertain_is_disease: bool) -> pd.Series:
    """1 where No Finding is stated and no disease is, 0 where a disease is stated, NaN where neither can be said.

    Support Devices are no disease. With ``uncertain_is_disease`` an uncertain disease makes No Finding doubtful: NaN.
    """
    diseases = raw.drop(columns=[NO_FINDING, SUPPORT_DEVICES], errors="ignore")
    diseased = (diseases == 1.0).any(axis=1)
    doubtful = (diseases == -1.0).any(axis=1) & uncertain_is_disease
    normal = np.where(diseased, 0.0, np.where((raw[NO_FINDING] == 1.0) & ~doubtful, 1.0, np.nan))
    return pd.Series(normal, index=raw.index)


def view_names(values: pd.Series) -> pd.Series:
    """View positions in one spelling: PA, AP, LATERAL (also LL and RL), others in capitals."""
    names = values.str.strip().str.upper()
    return names.where(~names.isin(_LATERAL), "LATERAL")


def sexes(values: pd.Series) -> pd.Series:
    """M, F or empty."""
    first = values.str.strip().str.upper().str[:1]
    return first.where(first.isin(["M", "F"]), "")


def ages(values: pd.Series) -> pd.Series:
    """Years from ``57`` or ``057Y``; other units, typing errors such as 411 years, and 0 for unknown are left empty."""
    years = pd.to_numeric(values.str.strip().str.upper().str.removesuffix("Y"), errors="coerce").astype("float64")
    plausible: pd.Series = years.where((years > 0) & (years <= 120))
    return plausible

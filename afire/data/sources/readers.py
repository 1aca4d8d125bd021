"""What radiologists said of films of NIH ChestX-ray14, to stand beside labels that a program took from reports.

Two public tables (Majkowska et al., Radiology 2020; Nabulsi et al., Scientific Reports 2021), told apart by their
columns:

four findings   ``Image Index`` and Fracture, Pneumothorax, Airspace opacity, Nodule or mass: YES or NO. Nobody was
                asked about anything else, so a film without the four is normal only where the report says so too.
all findings    ``Image ID``, findings as YES or NO, and Abnormal: 1 or 0, which is asked about the whole film.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pandas as pd

from afire.data.manifest import LABEL_PREFIX
from afire.data.sources.disk import read_source, strip_ending
from afire.errors import UserError

FOUR_FINDINGS = ("Fracture", "Pneumothorax", "Airspace opacity", "Nodule or mass")
READERS_NORMAL = (
    "test films, and training films that were read: as radiologists read them, unknown where nobody did; a film "
    "without any of four findings is normal only if its report has none either; other films: "
)
_FILM = ("Image Index", "Image ID")
_ABNORMAL = "Abnormal"
_ABOUT_THE_FILM = (
    *("Finding Labels", "Follow-up #", "Patient ID", "Patient Age", "Patient Gender", "View Position", "Set Id"),
    *("OriginalImage[Width", "Height]", "OriginalImagePixelSpacing[x", "y]", _ABNORMAL, *_FILM),
)
_WORDS = {"YES": 1.0, "NO": 0.0, "1": 1.0, "0": 0.0}

logger = logging.getLogger(__name__)


def with_readers(table: pd.DataFrame, names: pd.Series, path: Path) -> pd.DataFrame:
    """The table of NIH with a column ``label:X (read)`` for each finding, and ``normal`` as radiologists see it.

    ``names`` are the films' names without ending, row by row.
    """
    source = read_source(path, [])
    film = next((name for name in _FILM if name in source.columns), None)
    if film is None:
        raise UserError(f"{path} has no column 'Image Index' or 'Image ID'; it is no table of what radiologists read.")
    read = source[film].str.strip().map(strip_ending)
    if read.duplicated().any():
        raise UserError(f"{path} has {read[read.duplicated()].iloc[0]} twice; give adjudicated labels, one row a film.")
    whole = _ABNORMAL in source.columns
    findings = [name for name in source.columns if name and name not in _ABOUT_THE_FILM]
    if not whole and not set(FOUR_FINDINGS) <= set(findings):
        raise UserError(
            f"{path} has neither a column 'Abnormal' nor all of {', '.join(FOUR_FINDINGS)}; its columns are "
            f"{', '.join(source.columns[:20])}."
        )
    findings = findings if whole else list(FOUR_FINDINGS)
    said = pd.DataFrame(
        {name: _as_numbers(source, name, path) for name in (*findings, *([_ABNORMAL] if whole else []))}
    )
    said = said.set_index(read).reindex(names).reset_index(drop=True)
    normal = 1 - said.pop(_ABNORMAL) if whole else _without_the_four(said, table["normal"])
    was_read = pd.Series(names.isin(read).to_numpy())
    kept = table["normal"].where(~was_read & (table["split"] != "test"), normal)
    logger.info("radiologists read %s of the %s films of the table", f"{was_read.sum():,}", f"{len(table):,}")
    return table.assign(normal=kept).join(said.add_prefix(LABEL_PREFIX).add_suffix(" (read)"))


def _as_numbers(source: pd.DataFrame, name: str, path: Path) -> pd.Series:
    words = source[name].str.strip().str.upper()
    numbers = words.map(_WORDS)
    wrong = numbers.isna() & (words != "")
    if wrong.any():
        raise UserError(
            f"{path}: column {name!r} holds {source[name][wrong].iloc[0]!r}; expected YES, NO, 1, 0 or empty."
        )
    return numbers


def _without_the_four(said: pd.DataFrame, by_report: pd.Series) -> pd.Series:
    """0 with one of the four, 1 with none of them and a report without a finding, else unknown."""
    found, none = (said == 1).any(axis=1), (said == 0).all(axis=1)
    normal = pd.Series(float("nan"), index=said.index).mask(none & (by_report == 1), 1.0)
    return normal.mask(found, 0.0)

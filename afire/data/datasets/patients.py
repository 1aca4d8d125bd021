"""Who a film belongs to, where no table says it: from a pattern in its path, or from its DICOM header."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from afire.data.decode import hash_patient
from afire.data.manifest import inside_root
from afire.data.quiet import quiet_readers
from afire.errors import UserError
from afire.progress import track

logger = logging.getLogger(__name__)


def patients_from_pattern(films: Sequence[str], pattern: str | None) -> list[str]:
    """The first group of the regular expression ``pattern`` in each path; empty where it does not occur."""
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
    return patients


def read_headers(root: Path, films: Sequence[str]) -> pd.DataFrame:
    """Patient (as a hash) and view from the DICOM header of each film; empty where there is none.

    Only these two tags are parsed, so that no name can reach the manifest.
    """
    import pydicom

    rows: list[tuple[str, str]] = []
    with quiet_readers():
        for film in track(films, "reading headers", unit="films"):
            path = inside_root(root, film)
            try:
                header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=["PatientID", "ViewPosition"])
                rows.append((hash_patient(str(header.get("PatientID") or "")), str(header.get("ViewPosition") or "")))
            except Exception:  # not DICOM, or damaged: pydicom raises dozens of kinds, and the audit names such films
                rows.append(("", ""))
    return pd.DataFrame(rows, columns=["patient", "view"])

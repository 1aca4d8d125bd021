"""A flat folder of films without labels: all that pre-training needs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from afire.data.datasets.disk import list_films, require_films
from afire.data.datasets.findings import view_names
from afire.data.datasets.patients import patients_from_pattern, read_headers
from afire.data.datasets.source import about
from afire.data.manifest import Manifest, make_manifest
from afire.errors import UserError

NORMAL_RULE = "unknown for every film, unless all are said to be normal"


def build_folder(
    root: Path, *, patient_pattern: str | None = None, headers: bool = False, all_normal: bool = False
) -> Manifest:
    """Every film in ``root`` and its subfolders. No split and no labels; ``normal`` is unknown, or 1 on request.

    A film is its own patient unless ``patient_pattern`` finds one in its path or ``headers`` reads the DICOM tags.
    """
    if headers and patient_pattern is not None:
        raise UserError("--patient-pattern and --headers both say who the patient is; give one of them.")
    films = require_films(list_films(root, look_inside=True), root)
    table = pd.DataFrame({"image": films, "patient": patients_from_pattern(films, patient_pattern)})
    if headers:
        tags = read_headers(root, films)
        table["patient"], table["view"] = tags["patient"], view_names(tags["view"])
    if all_normal:
        table["normal"] = 1.0
    options = {"patient_pattern": patient_pattern, "headers": headers, "all_normal": all_normal}
    return make_manifest(table, root, about("folder", NORMAL_RULE, **options))

"""Bundles are made where they are written; here they are read."""

from tests.export.conftest import bundle_folder, copy_of, detector_folder, full_bundle, normal_films, run_folder
from tests.tasks.conftest import films, packed, smallest

__all__ = [
    "bundle_folder",
    "copy_of",
    "detector_folder",
    "films",
    "full_bundle",
    "normal_films",
    "packed",
    "run_folder",
    "smallest",
]

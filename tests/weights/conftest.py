"""Bundles are made where they are written; here they are read."""

from tests.export.conftest import bundle_folder, copy_of, run_folder
from tests.tasks.conftest import films, packed, smallest

__all__ = ["bundle_folder", "copy_of", "films", "packed", "run_folder", "smallest"]

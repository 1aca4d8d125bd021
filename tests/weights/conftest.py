"""Bundles are made where they are written; here they are read."""

from tests.bundle.conftest import bundle_folder, copy_of, run_folder

__all__ = ["bundle_folder", "copy_of", "run_folder"]

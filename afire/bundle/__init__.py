"""Weights that leave: one folder that explains and checks itself, and the formats of other libraries."""

from afire.bundle.verify import Check, verify_bundle
from afire.bundle.write import export_bundle

__all__ = ["Check", "export_bundle", "verify_bundle"]

"""Weights that travel: read safely from any known layout, found on disk or on a hub, kept in bundles.

Knows tensors, their names and where they lie; knows no task.
"""

from afire.weights.files import LoadReport, find_encoder, load_encoder, read_tensors

__all__ = ["LoadReport", "find_encoder", "load_encoder", "read_tensors"]

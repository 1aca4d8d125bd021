"""Weights that travel: read safely from any known layout, found on disk or on a hub, kept in bundles."""

from afire.weights.layouts import find_encoder
from afire.weights.loading import LoadReport, load_encoder
from afire.weights.tensors import read_tensors

__all__ = ["LoadReport", "find_encoder", "load_encoder", "read_tensors"]

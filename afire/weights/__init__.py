"""Weights that travel: opened in one way wherever they lie, read safely in any known layout, kept in bundles.

Knows methods, the folder of a run and a hub; knows no task and no film.
"""

from afire.weights.files import tensor_hash
from afire.weights.kinds import RANDOM, FileWeights, RandomWeights, Weights
from afire.weights.open import WeightsBySeed, open_weights, pick_device, said_by, said_by_start, start_from
from afire.weights.own import BundleWeights, RunWeights

__all__ = [
    "RANDOM",
    "BundleWeights",
    "FileWeights",
    "RandomWeights",
    "RunWeights",
    "Weights",
    "WeightsBySeed",
    "open_weights",
    "pick_device",
    "said_by",
    "said_by_start",
    "start_from",
    "tensor_hash",
]

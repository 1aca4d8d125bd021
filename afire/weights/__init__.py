"""Weights that travel: opened in one way wherever they lie, read safely in any known layout, kept in bundles.

Knows methods, the folder of a run and a hub; knows no task and no film.
"""

from afire.weights.open import Weights, WeightsBySeed, open_weights, pick_device, start_from

__all__ = ["Weights", "WeightsBySeed", "open_weights", "pick_device", "start_from"]

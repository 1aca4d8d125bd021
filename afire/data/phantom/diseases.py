"""The fourteen diseases, how they are drawn and how severe they are.

A disease is a change of the anatomy, each of another kind. None of them paints on the finished image: they change what
the rays pass through. Names are those of public datasets where those have one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from afire.data.phantom import opacities, pleura
from afire.data.phantom.chest import Chest
from afire.data.phantom.physics import Array

Disease = Callable[[Chest, np.random.Generator, int, float], Array]

CHANGES: dict[str, Disease] = {
    "Nodule": opacities.nodule,
    "Consolidation": opacities.consolidation,
    "Effusion": pleura.effusion,
    "Cardiomegaly": pleura.cardiomegaly,
    "Pneumothorax": pleura.pneumothorax,
    "Atelectasis": pleura.atelectasis,
    "Edema": opacities.oedema,
    "Mass": opacities.mass,
    "Cavity": opacities.cavity,
    "Infiltration": opacities.infiltration,
    "Fibrosis": opacities.fibrosis,
    "Miliary": opacities.miliary,
    "Pleural_Thickening": pleura.thickened_pleura,
    "Emphysema": pleura.emphysema,
}
DISEASES = tuple(CHANGES)
BOTH_SIDES = ("Cardiomegaly", "Edema", "Miliary", "Emphysema")


def draw_severity(rng: np.random.Generator) -> float:
    """From 0, hardly seen, to 1; most are in between."""
    return float(rng.beta(1.3, 1.4))

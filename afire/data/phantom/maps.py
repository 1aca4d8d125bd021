"""Exact maps of what was drawn: lungs by zone, heart, mediastinum, diaphragm, bones, the stomach's bubble."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from afire.data.phantom.objects import Objects
from afire.data.phantom.physics import Frame
from afire.data.phantom.skeleton import Bones
from afire.data.phantom.thorax import Inside, Thorax

Bools = NDArray[np.bool_]
ZONES = ("upper", "middle", "lower")
LUNGS = tuple(f"{side} lung, {zone} zone" for side in ("right", "left") for zone in ZONES)
"""Sides are the patient's: the right lung lies on the image's left."""
ANATOMY = (*LUNGS, "heart", "mediastinum", "diaphragm", "ribs", "clavicles", "spine", "stomach bubble")


def anatomy_maps(
    frame: Frame, thorax: Thorax, inside: Inside, bones: Bones, objects: Objects, visible: Bools | None
) -> Bools:
    """(A, S, S), one map for each name in ``ANATOMY``; what shutters or a border hide is on none of them."""
    x, y = frame.grid
    maps = np.zeros((len(ANATOMY), frame.size, frame.size), dtype=bool)
    third = (min(thorax.domes.values()) - thorax.patient.apex) / 3
    below = [y >= np.float32(thorax.patient.apex + step * third) for step in (1, 2)]
    left = x > 0
    for start, side in ((0, ~left), (3, left)):
        lung = inside.field & side
        maps[start] = lung & ~below[0]
        maps[start + 1] = lung & below[0] & ~below[1]
        maps[start + 2] = lung & below[1]
    maps[6] = inside.heart
    maps[7] = inside.middle
    maps[8] = (inside.behind > 0) & (inside.cavity > 0.02) & (y < np.float32(thorax.base))
    maps[9], maps[10], maps[11] = bones.ribs, bones.clavicles, bones.spine
    if objects.bubble is not None:
        maps[12] = objects.bubble
    if visible is not None:
        maps &= visible
    return maps

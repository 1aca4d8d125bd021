"""The inside of the chest that diseases change, and where in it they find room."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from afire.data.phantom.physics import Array, Frame, smoothstep
from afire.data.phantom.thorax import Inside, Thorax
from afire.data.phantom.tubes import tubes
from afire.data.phantom.vessels import Tree


@dataclass
class Chest:
    """The inside of the chest as path lengths in cm, each (S, S); diseases change it in place.

    Where lung is taken away and nothing else is said, water takes its place.
    """

    frame: Frame
    thorax: Thorax
    tree: Tree
    inside: Inside  # as it was before any disease
    lung: Array  # aerated lung
    vessels: Array
    air: Array  # free air, outside the lung
    water: Array  # what is added to the lung's own tissue: lines, pleura

    @property
    def height(self) -> float:
        """From the lung tops to the costophrenic angles."""
        return self.thorax.base - self.thorax.patient.apex

    def side(self, side: int) -> Array:
        """1 on a side, 0 on the other; the middle is soft, as no disease ends at a line there."""
        return smoothstep(self.frame.grid[0] * np.float32(0.4 * side))  # type: ignore[no-any-return]

    @cached_property
    def clear(self) -> Array:
        """1 where the lung lies free, 0 behind heart, mediastinum and diaphragm, as it was before any disease."""
        share = self.inside.lung / np.maximum(self.inside.cavity, np.float32(0.5))
        return smoothstep(share * 3 - np.float32(1.2)) * (self.inside.behind <= 0)  # type: ignore[no-any-return]

    def down(self) -> Array:
        """0 at the lung tops, 1 at the costophrenic angles."""
        share: Array = (self.frame.grid[1] - np.float32(self.thorax.patient.apex)) * np.float32(1 / self.height)
        return share

    def fill(self, share: Array) -> None:
        """Replace a share of the lung by water; vessels drown in it."""
        self.lung = self.lung * (1 - share)
        self.vessels = self.vessels * (1 - np.float32(0.9) * share)

    def point(
        self, rng: np.random.Generator, side: int, levels: tuple[float, float], margin: float
    ) -> tuple[float, float]:
        """A point whose surroundings of ``margin`` cm lie in the lung field; in cm, so the same at every size."""
        x = (side * rng.uniform(0, self.thorax.patient.width, 200)).astype(np.float32)
        y = rng.uniform(*levels, 200).astype(np.float32)
        steps = np.array([(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)], dtype=np.float32)[:, :, None] * np.float32(margin)
        clear = self.thorax.look(x + steps[:, 0], y + steps[:, 1]).field.all(axis=0)
        chosen = int(np.argmax(clear))
        return float(x[chosen]), float(y[chosen])

    def airways(self, side: int) -> Array:
        """Bronchi run along the larger vessels: their tree, moved a little, without the thin branches."""
        points, radius = self.tree
        chosen = (side * points[:, 0, 0] > 0) & (radius[:, 0] > 0.11)
        moved = points[chosen] + np.array([0.25, -0.35, 0])
        return tubes(self.frame, moved, 0.85 * radius[chosen])


def between(low: float, high: float, share: float) -> float:
    """``low`` at 0, ``high`` at 1."""
    return low + (high - low) * share

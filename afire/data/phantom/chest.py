"""The inside of the chest: airways, lung vessels, and the path lengths that diseases change."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from afire.data.phantom.anatomy import Patient
from afire.data.phantom.physics import Array, Floats, Frame, Shadow, bow, dome, smoothstep, tubes
from afire.data.phantom.thorax import Inside, Thorax

Tree = tuple[Floats, Floats]  # segments (K, 2, 3) and radii (K, 2)
# The artery to each lower lobe, and the arch of the left one over its bronchus.
_LARGE = np.stack(
    [
        bow((-2.9, 0.9, 0), (-4.1, 2.6, 0), (-5.0, 6.2, 0)),
        bow((2.6, -0.4, 0), (4.4, 0.6, 0), (5.0, 4.4, 0)),
    ]
)


def airway(frame: Frame, thorax: Thorax) -> Array:
    """Path length through the air of windpipe and main bronchi."""
    right = bow((-0.45, 0, -2), (-1.7, 1.5, -2), (-3.4, 3.9, -2))
    left = bow((-0.05, 0, -2), (1.8, 1.2, -2), (4.3, 2.9, -2))
    radius = np.stack([np.linspace(0.7, 0.5, 24), np.linspace(0.62, 0.45, 24)])
    bronchi = tubes(frame, np.stack([right, left]), radius)
    # the windpipe runs along the pixels' columns, where sampled tubes would show stripes: a formula does not
    half = np.float32(0.8 if thorax.patient.female else 0.92)
    region = frame.columns(-2.5 + frame.turned(-1), 2.5 + frame.turned(-1))
    x, y = (grid[region] for grid in frame.grid)
    lean = np.float32(-0.02) * (y - np.float32(thorax.patient.apex)) + np.float32(frame.turned(-1))
    bronchi[region] += 2 * half * dome(np.square((x - lean) / half)) * smoothstep(0.7 - y)
    return bronchi


def vessel_tree(rng: np.random.Generator, patient: Patient, base: float) -> Tree:
    """The lung vessels of both sides, branching from the hila outwards."""
    starts, headings, calibres = [], [], []
    for side, top in ((-1, 0.2), (1, -0.9)):
        place = np.linspace(0, 1, 13)  # along the hilum, from its top to the lower lobe
        fan = np.interp(place, [0, 0.3, 0.6, 1], [-80, -20, 35, 86]) + rng.normal(0, 9, 13)
        angle = np.deg2rad(fan)  # from straight outwards, downwards positive
        starts.append(np.column_stack([side * (2.9 + 1.5 * place), top + 5.4 * place**1.2]))
        headings.append(np.where(side > 0, angle, np.pi - angle))
        stout = np.interp(place, [0, 0.4, 0.75, 1], [0.22, 0.2, 0.27, 0.3]) * patient.branching
        calibres.append(stout * rng.uniform(0.75, 1.2, 13))
    start: Floats = np.concatenate(starts)
    heading: Floats = np.concatenate(headings)
    calibre: Floats = np.concatenate(calibres)
    scale = (base - patient.apex) / 27
    segments: list[Floats] = []
    radii: list[Floats] = []
    for generation in range(6):
        length = rng.uniform(1.7 * scale, 3.3 * scale, heading.size) * 0.93**generation
        middle = heading + rng.normal(0, 0.12, heading.shape)
        stop = start + np.column_stack([length * np.cos(middle), length * np.sin(middle)])
        thin = calibre * 0.86
        segments.append(np.stack([start, stop], axis=1))
        radii.append(np.stack([calibre, thin], axis=1))
        spread = rng.uniform(0.14, 0.5, (2, heading.size)) * np.array([[1], [-1]])
        share = rng.uniform(0.66, 0.95, (2, heading.size))
        splits = rng.random(heading.size) < (0.75 if generation else 1.0)
        main = np.where(splits, middle + spread[0] * 0.6, middle)
        start = np.concatenate([stop, stop[splits]])
        heading = np.concatenate([main, middle[splits] + spread[1][splits]])
        calibre = np.concatenate([thin * np.where(splits, share[0], 0.95), (thin * share[1] * 0.85)[splits]])
    lines, widths = np.concatenate(segments), np.concatenate(radii)
    return np.concatenate([lines, np.zeros((*lines.shape[:2], 1))], axis=-1), widths


def place_vessels(tree: Tree, thorax: Thorax) -> Tree:
    """The branches that lie in this film's lungs; a shallow breath pushes the lower ones together."""
    points, radius = tree
    placed = points.copy()
    placed[..., 1] *= np.where(points[..., 1] > 0, 1 - 0.045 * thorax.pose.breath, 1)
    ends = placed[..., :2].astype(np.float32)
    aerated = (thorax.look(ends[..., 0], ends[..., 1]).lung > 0).any(axis=1)
    return placed[aerated], radius[aerated]


def vessels(frame: Frame, tree: Tree) -> Array:
    """Path length through the lung vessels and the soft shadow of the hila."""
    points, radius = tree
    shadow = Shadow(frame)
    # tubes added together share the sampling of the thickest, so thin ones are added apart
    for low, high in ((0.0, 0.115), (0.115, 0.2), (0.2, 9.0)):
        group = (radius[:, 0] >= low) & (radius[:, 0] < high)
        if group.any():
            shadow.add(points[group], radius[group], strength_KN=2.4)  # arteries and veins run side by side
    shadow.add(_LARGE, np.tile(np.linspace(0.55, 0.08, 24), (2, 1)))
    result = shadow.image()
    _add_haze(result, frame)
    return result


def _add_haze(vessels: Array, frame: Frame) -> None:
    """Around the hila many small vessels and nodes add up to a soft shadow."""
    for centre_x, centre_y in ((-3.9, 2.4), (3.9, 1.2)):
        region = frame.columns(centre_x - 4, centre_x + 4)
        x, y = (grid[region] for grid in frame.grid)
        across, down = (
            (x - np.float32(centre_x)) * np.float32(1 / 1.6),
            (y - np.float32(centre_y)) * np.float32(1 / 2.6),
        )
        vessels[region] += np.float32(2.6) * np.exp(-across * across - down * down)


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

"""Many films at once, with everything that was drawn: what a network is taught with, without a disk.

A film depends on (seed, number, size) alone, so a batch may hold any films in any order, drawn by any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from afire.data.phantom.diseases import DISEASES
from afire.data.phantom.film import PhantomFilm, Sitting, draw_film
from afire.data.phantom.maps import ANATOMY, Bools
from afire.data.phantom.physics import Array
from afire.data.phantom.style import Style
from afire.errors import UserError


@dataclass(frozen=True)
class PhantomBatch:
    """B films of S pixels with A maps of the anatomy and F kinds of findings, in the order asked for."""

    images: Array  # (B, 1, S, S) in [0, 1], bright = dense
    anatomy: Bools  # (B, A, S, S), in the order of ANATOMY
    findings: Bools  # (B, F, S, S), in the order of DISEASES
    labels: Array  # (B, F), 1 present, 0 absent
    severity: Array  # (B, F), 0 hardly seen .. 1; 0 where absent
    sittings: tuple[Sitting, ...]
    styles: tuple[Style, ...]
    devices: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def normal(self) -> Bools:
        """(B,) films without any finding."""
        without: Bools = np.logical_and.reduce(self.labels == 0, axis=1)
        return without

    def part(self, name: str) -> Bools:
        """(B, S, S) the maps of one part of the anatomy."""
        maps: Bools = self.anatomy[:, ANATOMY.index(name)]
        return maps

    def finding(self, name: str) -> Bools:
        """(B, S, S) the masks of one kind of finding."""
        masks: Bools = self.findings[:, DISEASES.index(name)]
        return masks


def draw_batch(
    seed: int,
    numbers: Sequence[int],
    size: int,
    *,
    normal_share: float = 0.5,
    among: Sequence[str] = DISEASES,
    diseases: Sequence[str] | None = None,
    severity: float | None = None,
    style: Style | None = None,
) -> PhantomBatch:
    """Films ``numbers`` of the phantom ``seed``, each as :func:`draw_film` draws it with the same arguments."""
    if not len(numbers):
        raise UserError("a batch of no films was asked for; name at least one number.")
    count, shape = len(numbers), (size, size)
    images = np.empty((count, 1, *shape), dtype=np.float32)
    anatomy = np.empty((count, len(ANATOMY), *shape), dtype=bool)
    findings = np.zeros((count, len(DISEASES), *shape), dtype=bool)
    severities = np.zeros((count, len(DISEASES)), dtype=np.float32)
    films: list[PhantomFilm] = []
    for row, number in enumerate(numbers):
        film = draw_film(
            seed,
            int(number),
            size,
            normal_share=normal_share,
            among=among,
            diseases=diseases,
            severity=severity,
            style=style,
        )
        images[row, 0], anatomy[row] = film.image, film.anatomy
        for name, mask in film.masks.items():
            findings[row, DISEASES.index(name)] = mask
            severities[row, DISEASES.index(name)] = film.severity[name]
        films.append(film)
    return PhantomBatch(
        images=images,
        anatomy=anatomy,
        findings=findings,
        labels=np.array([[film.labels[name] for name in DISEASES] for film in films], dtype=np.float32),
        severity=severities,
        sittings=tuple(film.sitting for film in films),
        styles=tuple(film.style for film in films),
        devices=tuple(film.devices for film in films),
    )

"""Many films at once, with everything that was drawn: what a network is taught with, without a disk.

A film depends on (seed, number, size) alone, so a batch may hold any films in any order, drawn by any process. Drawing
a film takes longer than a small network needs for it, so a bank is drawn once, over all cores, and its films are
changed at every view instead (:mod:`afire.lesions.augment`). It may move on from epoch to epoch
(:mod:`afire.data.phantom.renewal`). A bank keeps images as bytes and maps as the share of each cell that they cover, in
255ths: 128-px films with cells of 8 px take 23 KB each. Film n of a bank is film ``first + n`` of the phantom ``seed``,
whichever process drew it.

Shapes: N films of S x S pixels, A kinds of anatomy, F kinds of findings, G = S / cell cells along a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from afire.data.phantom.diseases import DISEASES
from afire.data.phantom.film import ANATOMY, Bools, PhantomFilm, Sitting, draw_film
from afire.data.phantom.physics import Array
from afire.data.phantom.style import Style
from afire.errors import UserError
from afire.processes import in_processes, usable_cores
from afire.progress import progress

Bytes = NDArray[np.uint8]
_CHUNK = 16  # films that a process draws at a time
WORTH_A_PROCESS = 48  # films
_SMALLEST, _LARGEST = 32, 2048


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


@dataclass(frozen=True)
class PhantomBank:
    """Drawn films with maps on a coarse grid, in the order of their numbers."""

    images: Bytes  # (N, 1, S, S), bright = dense
    anatomy: Bytes  # (N, A, G, G), share of each cell in 255ths, in the order of ANATOMY
    findings: Bytes  # (N, F, G, G), in the order of DISEASES
    labels: Array  # (N, F), 1 present, 0 absent
    severity: Array  # (N, F), 0 hardly seen .. 1; 0 where absent

    def __len__(self) -> int:
        return len(self.images)

    @property
    def normal(self) -> Bools:
        """(N,) films without any finding."""
        without: Bools = np.logical_and.reduce(self.labels == 0, axis=1)
        return without

    @property
    def any_finding(self) -> Bytes:
        """(N, G, G) the share of each cell that the finding which covers most of it covers."""
        largest: Bytes = self.findings.max(axis=1)
        return largest

    @classmethod
    def blank(cls, count: int, size: int, cell: int) -> PhantomBank:
        """A bank of black films with nothing on them."""
        grid = (size // cell, size // cell)
        return cls(
            images=np.zeros((count, 1, size, size), dtype=np.uint8),
            anatomy=np.zeros((count, len(ANATOMY), *grid), dtype=np.uint8),
            findings=np.zeros((count, len(DISEASES), *grid), dtype=np.uint8),
            labels=np.zeros((count, len(DISEASES)), dtype=np.float32),
            severity=np.zeros((count, len(DISEASES)), dtype=np.float32),
        )

    @classmethod
    def draw(
        cls,
        seed: int,
        count: int,
        size: int,
        cell: int,
        workers: int | None = None,
        normal_share: float = 0.5,
        *,
        first: int = 0,
        among: Sequence[str] = DISEASES,
    ) -> PhantomBank:
        """Films ``first`` .. ``first + count - 1`` of the phantom ``seed``, maps pooled over ``cell`` x ``cell`` px.

        ``workers`` is the most processes that draw, all cores by default and 1 for this one alone; a small bank is
        drawn by fewer, because a process takes a second to start. No film depends on it. A bank of other numbers, or
        of another seed, shares no film with this one.
        """
        _check(count, size, cell, normal_share)
        bank = cls.blank(count, size, cell)
        starts = range(0, count, _CHUNK)
        jobs = (
            (seed, first, start, min(_CHUNK, count - start), size, cell, normal_share, tuple(among)) for start in starts
        )
        processes = min(workers if workers is not None else usable_cores(), count // WORTH_A_PROCESS + 1)
        try:
            with progress("drawing phantoms", count, "films") as bar:
                for start, piece in in_processes(draw_piece, jobs, processes):
                    for field in fields(cls):
                        values = getattr(piece, field.name)
                        getattr(bank, field.name)[start : start + len(values)] = values
                    bar.advance(len(piece))
        except BrokenProcessPool:
            raise UserError(
                "a process that draws phantoms has died, perhaps for lack of memory; ask for fewer films or workers."
            ) from None
        return bank


def draw_piece(
    seed: int, first: int, start: int, count: int, size: int, cell: int, normal_share: float, among: Sequence[str]
) -> tuple[int, PhantomBank]:
    """Films ``start`` .. of a bank, and ``start`` itself: pieces come back in any order."""
    numbers = range(first + start, first + start + count)
    batch = draw_batch(seed, numbers, size, normal_share=normal_share, among=among)
    images = np.rint(batch.images * 255).astype(np.uint8)
    anatomy, findings = pooled(batch.anatomy, cell), pooled(batch.findings, cell)
    return start, PhantomBank(images, anatomy, findings, batch.labels, batch.severity)


def pooled(maps: Bools, cell: int) -> Bytes:
    """Maps (..., S, S) -> (..., S / cell, S / cell): the share of each cell that is true, in 255ths."""
    *before, rows, columns = maps.shape
    cells = maps.reshape(*before, rows // cell, cell, columns // cell, cell)
    shares: Bytes = np.rint(cells.mean(axis=(-3, -1), dtype=np.float32) * 255).astype(np.uint8)
    return shares


def _check(count: int, size: int, cell: int, normal_share: float) -> None:
    if count < 1:
        raise UserError(f"a bank of {count} phantoms is empty; ask for at least 1.")
    if not _SMALLEST <= size <= _LARGEST:
        raise UserError(f"phantom films of {size} px cannot be drawn; choose a size from {_SMALLEST} to {_LARGEST}.")
    if cell < 1 or size % cell:
        raise UserError(f"phantom films of {size} px cannot be pooled over cells of {cell} px; choose a divisor.")
    if not 0 <= normal_share <= 1:
        raise UserError(f"a normal share of {normal_share:g} is not possible; choose from 0 (all ill) to 1 (all well).")

"""A bank that moves on while a network learns from it: before every epoch a share of its films is drawn anew.

With N films of which k are drawn anew, the bank of epoch e holds films k e .. k e + N - 1 of its phantom, film number p
in slot p mod N: slots are replaced in turn, and which film is in one follows from (e, slot) alone. So a run that is
resumed in any epoch, and each of several processes, has the bank of the run that was never stopped.

The films of the next epoch are drawn by processes of low priority while this epoch is trained on. What they have not
begun when it ends is drawn by the process that needs it, so that a busy machine, which gives them little time, does not
hold it up. The films are the same whoever draws them, and when.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields
from typing import Any

import numpy as np

from afire.data.phantom.bank import DIED, WORTH_A_PROCESS, PhantomBank, draw_piece
from afire.data.phantom.diseases import DISEASES
from afire.errors import UserError
from afire.processes import background_processes, usable_cores

_CHUNK = 4  # films: a job that has begun is waited for
_Job = tuple[int, int, int, int, int, int, float, tuple[str, ...]]  # what `draw_piece` takes
_Piece = tuple[int, PhantomBank]


class RenewedBank:
    """The bank of each epoch; nothing is drawn before it is asked for."""

    def __init__(
        self,
        seed: int,
        count: int,
        size: int,
        cell: int,
        workers: int | None = None,
        normal_share: float = 0.5,
        *,
        among: Sequence[str] = DISEASES,
        renewed: float = 0.0,
        epochs: int = 0,
    ) -> None:
        """As for :meth:`PhantomBank.draw`; ``renewed`` is the share that is drawn anew, rounded to at least one film.

        Of a run of ``epochs`` nothing is drawn for after its end; without a length, nothing is drawn ahead.
        """
        self.seed, self.count, self.size, self.cell = seed, count, size, cell
        self.workers = usable_cores() if workers is None else workers
        self.normal_share, self.among = normal_share, tuple(among)
        self.per_epoch = max(1, round(renewed * count)) if renewed else 0
        self.epochs = epochs
        self._bank: PhantomBank | None = None
        self._first = 0  # number of the oldest film in the bank
        self._ahead = 0  # number of the first film that is drawn ahead
        self._pool: ProcessPoolExecutor | None = None
        self._coming: list[tuple[_Job, Future[_Piece]]] = []

    @classmethod
    def holding(cls, bank: PhantomBank, cell: int) -> RenewedBank:
        """A bank that was drawn elsewhere and stays."""
        held = cls(0, len(bank), bank.images.shape[-1], cell)
        held._bank = bank
        return held

    def __getstate__(self) -> dict[str, Any]:
        """A copy draws its own films: processes cannot be copied."""
        return {**self.__dict__, "_pool": None, "_coming": []}

    def at(self, epoch: int) -> PhantomBank:
        """The bank of an epoch, counted from 0."""
        first = epoch * self.per_epoch
        if self._bank is not None and first == self._first:
            return self._bank
        if self._bank is not None and 0 < first - self._first < self.count:
            bank, drawn_from = self._bank, self._first + self.count
        else:
            bank, drawn_from = PhantomBank.blank(self.count, self.size, self.cell), first
        self._fill(bank, drawn_from, first + self.count - drawn_from)
        self._bank, self._first = bank, first
        if self.per_epoch >= WORTH_A_PROCESS and epoch + 1 < self.epochs:
            self._draw_ahead(first + self.count)
        return bank

    def close(self) -> None:
        """Draw nothing ahead any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool, self._coming = None, []

    def _fill(self, bank: PhantomBank, first: int, count: int) -> None:
        """Put films ``first`` .. ``first + count - 1`` into their slots: those drawn ahead, or else drawn now."""
        coming, self._coming = self._coming, []
        if coming and (self._ahead, self.per_epoch) == (first, count):
            for start, piece in _finished(coming):
                _put(bank, first + start, piece)
            return
        for _, future in coming:  # of another epoch than the one that is asked for
            future.cancel()
        settings = (self.size, self.cell, self.workers, self.normal_share)
        _put(bank, first, PhantomBank.draw(self.seed, count, *settings, first=first, among=self.among))

    def _draw_ahead(self, first: int) -> None:
        self._ahead = first
        self._pool = self._pool or background_processes(self.workers)
        for start in range(0, self.per_epoch, _CHUNK):
            count = min(_CHUNK, self.per_epoch - start)
            job = (self.seed, first, start, count, self.size, self.cell, self.normal_share, self.among)
            self._coming.append((job, self._pool.submit(draw_piece, *job)))


def _finished(coming: Sequence[tuple[_Job, Future[_Piece]]]) -> Iterator[_Piece]:
    """All pieces: from the last backwards those drawn here that nobody has begun, then the others."""
    begun = []
    for job, future in reversed(coming):
        if future.cancel():
            yield draw_piece(*job)
        else:
            begun.append(future)
    try:
        for future in begun:
            yield future.result()
    except BrokenProcessPool:
        raise UserError(DIED) from None


def _put(bank: PhantomBank, first: int, piece: PhantomBank) -> None:
    slots = np.arange(first, first + len(piece)) % len(bank)
    for field in fields(PhantomBank):
        getattr(bank, field.name)[slots] = getattr(piece, field.name)

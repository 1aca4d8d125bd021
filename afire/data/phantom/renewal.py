"""A bank that moves on while a network learns from it: before every epoch a share of its films is drawn anew.

With N films of which k are drawn anew, the bank of epoch e holds films k e .. k e + N - 1 of its phantom, film number p
in slot p mod N: slots are replaced in turn, and which film is in one follows from (e, slot) alone. So a run that is
resumed in any epoch, and each of several processes, has the bank of the run that was never stopped.

The films of the next epoch are drawn by processes of low priority while this epoch is trained on. What they have not
begun when it ends is drawn by the process that needs it, so that a busy machine, which gives them little time, does not
hold it up; so is what a process that died has left. The films are the same whoever draws them, and when.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import fields
from threading import Lock
from typing import Any

import numpy as np

from afire.data.phantom.bank import WORTH_A_PROCESS, PhantomBank, draw_piece
from afire.data.phantom.diseases import DISEASES
from afire.processes import background_processes, usable_cores
from afire.progress import silenced

logger = logging.getLogger("afire")
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
        self._coming: _Coming | None = None

    @classmethod
    def holding(cls, bank: PhantomBank, cell: int) -> RenewedBank:
        """A bank that was drawn elsewhere and stays."""
        held = cls(0, len(bank), bank.images.shape[-1], cell)
        held._bank = bank
        return held

    def __getstate__(self) -> dict[str, Any]:
        """A copy draws its own films: processes cannot be copied."""
        return {**self.__dict__, "_pool": None, "_coming": None}

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
        if self._coming is not None:
            self._coming.drop()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._coming = None

    def _fill(self, bank: PhantomBank, first: int, count: int) -> None:
        """Put films ``first`` .. ``first + count - 1`` into their slots: those drawn ahead, or else drawn now."""
        coming, self._coming = self._coming, None
        if coming is not None and (self._ahead, self.per_epoch) == (first, count):
            for start, piece in coming.pieces():
                _put(bank, first + start, piece)
            if coming.died:
                logger.warning(
                    "a process that draws phantoms ahead has died, perhaps for lack of memory; what it left was drawn "
                    "without it"
                )
                self.close()  # the next epoch gets new ones
            return
        if coming is not None:  # of another epoch than the one that is asked for
            coming.drop()
        settings = (self.size, self.cell, self.workers, self.normal_share)
        # Between epochs without a word: it would be one beside every line of a run.
        with silenced() if self._bank is not None else nullcontext():
            drawn = PhantomBank.draw(self.seed, count, *settings, first=first, among=self.among)
        _put(bank, first, drawn)

    def _draw_ahead(self, first: int) -> None:
        self._ahead = first
        self._pool = self._pool or background_processes(self.workers)
        starts = range(0, self.per_epoch, _CHUNK)
        counts = (min(_CHUNK, self.per_epoch - start) for start in starts)
        self._coming = _Coming(
            self._pool,
            self.workers + 1,  # each has one, and one is ready for who is done first
            (
                (self.seed, first, start, count, self.size, self.cell, self.normal_share, self.among)
                for start, count in zip(starts, counts, strict=True)
            ),
        )


class _Coming:
    """Pieces that processes draw from the first one on, and who needs them draws from the last one on.

    The pool is given few jobs at a time, because none that it has may be cancelled: where one of its processes dies
    then, Python 3.10 and 3.11 forget the others, which wait for ever, as does the program at its end.
    """

    def __init__(self, pool: ProcessPoolExecutor, at_once: int, jobs: Iterable[_Job]) -> None:
        self.died = False
        self._pool, self._waiting = pool, deque(jobs)
        self._given: list[tuple[_Job, Future[_Piece]]] = []
        self._lock = Lock()
        for _ in range(at_once):
            self._give()

    def pieces(self) -> Iterator[_Piece]:
        """All of them: first those drawn here that nobody has begun."""
        while (job := self._take()) is not None:
            yield draw_piece(*job)
        for job, future in self._given:
            try:
                piece = future.result()
            except BrokenProcessPool:
                self.died = True
                piece = draw_piece(*job)
            yield piece

    def drop(self) -> None:
        """Let nobody begin anything any more."""
        with self._lock:
            self._waiting.clear()

    def _take(self) -> _Job | None:
        with self._lock:
            return self._waiting.pop() if self._waiting else None

    def _give(self, done: Future[_Piece] | None = None) -> None:
        """Give the pool its next job; called once more by its thread when a job is ``done``."""
        # Asked before the lock: where a process died, newer Pythons call with a lock of the pool held.
        if done is not None and (done.cancelled() or done.exception() is not None):
            return
        with self._lock:
            if not self._waiting:
                return
            job = self._waiting.popleft()
            try:
                future = self._pool.submit(draw_piece, *job)
            except RuntimeError as error:  # the pool has ended
                self._waiting.appendleft(job)
                self.died = self.died or isinstance(error, BrokenProcessPool)
                return
            self._given.append((job, future))
        future.add_done_callback(self._give)


def _put(bank: PhantomBank, first: int, piece: PhantomBank) -> None:
    slots = np.arange(first, first + len(piece)) % len(bank)
    for field in fields(PhantomBank):
        getattr(bank, field.name)[slots] = getattr(piece, field.name)

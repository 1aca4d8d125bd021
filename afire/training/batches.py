"""Which films a run uses, which of them are in which step, and reading the next ones ahead.

The films are those of the training subset only, normal ones or those with labels. The order of an epoch depends on
(seed, epoch) alone. A step takes the next ``world * batch`` films of it and process r the r-th piece, so W processes
with batch B see the same global batches as one process with W * B.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from afire.data.manifest import LABEL_PREFIX, Manifest, task_labels
from afire.data.pack import Films, PackedFilms
from afire.data.splits import Split
from afire.errors import ImageError, UserError
from afire.methods.base import Labels

logger = logging.getLogger("afire")


def normal_training_rows(manifest: Manifest, split: Split | None = None) -> tuple[np.ndarray, str]:
    """Rows of normal training films, and a message that says how many of how many.

    The training subset comes from ``split``, else from the manifest's own column; a manifest without either is all
    training. Where no film is known to be normal or not, all are taken, and the message says so.
    """
    rows, subset = _training_rows(manifest, split)
    normal = manifest.table["normal"].to_numpy()[rows]
    if np.isnan(normal).all():
        return rows, f"using all {len(rows):,} {subset}: no labels say which are normal, so all are taken as normal"
    chosen = rows[normal == 1]
    if len(chosen) == 0:
        raise UserError(f"none of the {len(rows):,} {subset} is labelled normal; pre-training needs normal films.")
    unknown = int(np.isnan(normal).sum())
    without = f", {unknown:,} without a label left out" if unknown else ""
    return chosen, f"using {len(chosen):,} normal films of {len(rows):,} {subset}{without}"


def labelled_training_rows(manifest: Manifest, split: Split | None = None) -> tuple[np.ndarray, str]:
    """Rows of training films with a label, normal or not, and a message that says how many of how many."""
    rows, subset = _training_rows(manifest, split)
    columns = ["normal", *(LABEL_PREFIX + name for name in manifest.labels)]
    chosen = rows[manifest.table[columns].notna().any(axis=1).to_numpy()[rows]]
    if len(chosen) == 0:
        raise UserError(f"none of the {len(rows):,} {subset} has a label; learning from labels needs some.")
    return chosen, f"using {len(chosen):,} films with labels of {len(rows):,} {subset}"


def run_labels(manifest: Manifest, rows: np.ndarray, chosen: Sequence[str] = ()) -> Labels:
    """The labels of the films in ``rows``, and of no others; all there are unless some are ``chosen``."""
    names, truth = task_labels(manifest, chosen, "--set options.labels=[...]")
    return Labels(tuple(names), torch.from_numpy(rows), torch.from_numpy(truth[rows]).float())


def _training_rows(manifest: Manifest, split: Split | None) -> tuple[np.ndarray, str]:
    if split is not None:
        return split.rows(manifest)["train"], f"training films (split {split.hash[:12]})"
    listed = manifest.table["split"]
    if (listed == "").all():
        return np.arange(len(manifest)), "films"
    others = int((listed != "train").sum())
    return np.flatnonzero(listed == "train"), f"training films ({others:,} of other parts left alone)"


@dataclass(frozen=True)
class Plan:
    """The films of a run by (epoch, batch). ``rows`` are the usable rows of the manifest, in its order.

    A batch is that of all processes together: which films are in it does not depend on how many share it.
    """

    rows: np.ndarray
    seed: int
    batch_size: int
    world: int = 1
    rank: int = 0
    accumulate: int = 1
    passes: int = 1  # over the rows in an epoch
    _orders: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        pieces = self.world * self.accumulate
        if self.batch_size % pieces:
            raise UserError(
                f"training.batch_size {self.batch_size} cannot be shared by {self.world} processes in "
                f"{self.accumulate} pieces; choose a multiple of {pieces}."
            )
        if self.steps_per_epoch == 0:
            raise UserError(
                f"{len(self.rows)} films are fewer than one batch of {self.batch_size}; lower training.batch_size."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole updates; the films that remain are left out, other ones in each epoch."""
        return len(self.rows) * self.passes // self.batch_size

    def order(self, epoch: int) -> np.ndarray:
        """The usable rows in the order of ``epoch``, each pass in an order of its own; the last is kept."""
        if epoch not in self._orders:
            self._orders.clear()
            rng = np.random.default_rng([self.seed, epoch])
            self._orders[epoch] = np.concatenate(
                [self.rows[rng.permutation(len(self.rows))] for _ in range(self.passes)]
            )
        return self._orders[epoch]

    def share(self, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """This process's rows of update ``step`` and the number of each draw, one pair for each accumulated piece.

        The number of a draw is the row, unless the same film is in the batch again: then it is another number, so that
        what is drawn by it (warps, depth) differs.
        """
        epoch, within = divmod(step, self.steps_per_epoch)
        rows = self.order(epoch)[within * self.batch_size :][: self.batch_size]
        draws = rows + _earlier(rows) * (int(self.rows.max()) + 1)
        shape = (self.accumulate, self.world, -1)
        pieces = zip(rows.reshape(shape), draws.reshape(shape), strict=True)
        return [(piece[self.rank], numbers[self.rank]) for piece, numbers in pieces]


def _earlier(rows: np.ndarray) -> np.ndarray:
    """How often each entry occurs before: 0 for its first occurrence, 1 for its second."""
    order = np.argsort(rows, kind="stable")
    ranked = rows[order]
    first_of_kind = np.searchsorted(ranked, ranked, side="left")
    earlier = np.empty(len(rows), dtype=np.int64)
    earlier[order] = np.arange(len(rows)) - first_of_kind
    return earlier


@dataclass
class Batch:
    """Films of one process for one forward: values as stored, the rows they come from, and the draws they are."""

    raw: torch.Tensor  # (B, S, S) uint8 or uint16 from a pack, (B, 1, S, S) float32 otherwise
    rows: np.ndarray
    replaced: dict[int, str] = field(default_factory=dict)  # bad row -> why another film took its place
    draws: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


class Prefetcher:
    """Reads the batches of the coming steps in a thread. Iterate it; ``waited`` is the time lost to waiting."""

    def __init__(
        self, films: Films, plan: Plan, first: int, last: int, on_bad_film: Literal["skip", "stop"], depth: int = 2
    ) -> None:
        self.reader = Reader(films, plan.rows, on_bad_film)
        self.waited = 0.0
        self._queue: queue.Queue[list[Batch] | BaseException | None] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(plan, first, last), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[list[Batch]]:
        while True:
            start = time.perf_counter()
            item = self._queue.get()
            self.waited += time.perf_counter() - start
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Stop reading; what was read ahead is dropped."""
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _work(self, plan: Plan, first: int, last: int) -> None:
        try:
            for step in range(first, last):
                self._queue.put([replace(self.reader.read(rows), draws=draws) for rows, draws in plan.share(step)])
                if self._stopped.is_set():
                    return
            self._queue.put(None)
        except BaseException as error:  # handed to the training thread, which raises it
            self._queue.put(error)


class Reader:
    """Reads batches and deals with films that are broken or were altered since they were packed."""

    def __init__(self, films: Films, usable: np.ndarray, on_bad_film: Literal["skip", "stop"]) -> None:
        self.films, self.usable, self.on_bad_film = films, usable, on_bad_film
        self.bad: dict[int, str] = {}

    def read(self, rows: np.ndarray) -> Batch:
        raw, new = self._read(rows)
        if not new:
            return Batch(raw, rows)
        for row, reason in new.items():
            if self.on_bad_film == "stop":
                raise UserError(f"{reason} Fix it, or set run.on_bad_film=skip.")
            if row not in self.bad:
                logger.warning("skipped during training: %s", reason)
            self.bad[row] = reason
        complete = self.read(np.array([self._substitute(int(row)) if row in new else row for row in rows]))
        return Batch(complete.raw, complete.rows, {**new, **complete.replaced})

    def _read(self, rows: np.ndarray) -> tuple[torch.Tensor, dict[int, str]]:
        """The films of ``rows``, unless some of them must not be used: then those, with the reasons."""
        nothing = torch.empty(0)
        if isinstance(self.films, PackedFilms):
            altered = self.films.altered(rows)
            return nothing if altered else self.films.raw(rows), altered
        films, unreadable = [], dict[int, str]()
        for row in rows.tolist():
            try:
                films.append(self.films[row])
            except ImageError as error:
                unreadable[row] = str(error)
        return nothing if unreadable else torch.stack(films), unreadable

    def _substitute(self, row: int) -> int:
        """The next usable row behind a bad one: the same choice on every run and every process."""
        start = int(np.searchsorted(self.usable, row))
        for offset in range(1, len(self.usable)):
            candidate = int(self.usable[(start + offset) % len(self.usable)])
            if candidate not in self.bad:
                return candidate
        raise UserError("no film can be read any more; check the data folder.")

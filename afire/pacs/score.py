"""Films are scored: batches as in `afire detect run`, of whatever has come in, with objects as results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Barrier, BoundedSemaphore, Event, Thread

import torch

from afire.data.decode import film_from_tags, read_film
from afire.data.dicom_grey import Voi
from afire.data.film import Film, FilmInfo, quiet_readers
from afire.detect.base import AnomalyDetector
from afire.detect.findings import OUT_OF_DOMAIN, UNREADABLE
from afire.detect.run import BATCH, Drawing, Drawn, score_batch, share_of_cores, side_by_side
from afire.errors import UserError
from afire.pacs.health import LiveList
from afire.pacs.journal import Journal
from afire.pacs.objects import ObjectMaker
from afire.pacs.spool import FilmName, Spool
from afire.processes import usable_cores

_IDLE_SECONDS = 0.5
_SECONDS_AFTER_A_FULL_DISK = 5.0


class Scorer:
    """Threads that score the films of a spool until they are told to stop; each takes a batch all the way."""

    def __init__(
        self,
        detector: AnomalyDetector,
        maker: ObjectMaker,
        spool: Spool,
        journal: Journal,
        batch: int = BATCH,
        workers: int | None = None,
        live: LiveList | None = None,
    ) -> None:
        self._live = live
        self._detector, self._maker, self._spool, self._journal = detector, maker, spool, journal
        self._batch, self._workers = batch, workers or usable_cores()
        self._side = side_by_side(detector, self._workers)
        self._looking = BoundedSemaphore(self._side)

    def start(self, stop: Event) -> list[Thread]:
        """Begin; the threads end soon after ``stop`` is set, with the batch that they have in hand."""
        begun = Barrier(self._workers + 1)
        threads = [Thread(target=self._work, args=(begun, stop), name=f"scorer {n}") for n in range(self._workers)]
        with share_of_cores(self._side):
            for thread in threads:
                thread.start()
            begun.wait()
        return threads

    def _work(self, begun: Barrier, stop: Event) -> None:
        torch.get_num_threads()  # from here on this thread keeps its share of the cores
        begun.wait()
        with quiet_readers():  # once: to silence them for each film takes longer than what they do
            while not stop.is_set():
                names = self._spool.claim(self._batch, self._workers, _IDLE_SECONDS)
                try:
                    self.score(names)
                except OSError as error:  # a full disk: nothing is lost, and there may be room later
                    self._journal.note("waiting for the disk", reason=error.strerror or type(error).__name__)
                    self._spool.put_back([name for name in names if self._spool.waits(name)])
                    stop.wait(_SECONDS_AFTER_A_FULL_DISK)

    def score(self, names: Sequence[FilmName]) -> None:
        """Score films and hand over their results. A film that breaks a batch is found by trying each alone."""
        try:
            self._score_together(names)
        except OSError:
            raise
        except Exception as error:
            if len(names) == 1:
                self._spool.fail_film(names[0], f"cannot be scored ({type(error).__name__})")
                return
            for name in names:
                if self._spool.waits(name):
                    self.score([name])

    def _score_together(self, names: Sequence[FilmName]) -> None:
        fresh = {number: self._spool.fresh(name) for number, name in enumerate(names)}
        made: dict[FilmName, dict[str, bytes]] = {}
        drawings: list[Drawing] = []

        def make(drawing: Drawing) -> Drawn:
            name = names[drawing.film.number]
            if drawing.result.status == OUT_OF_DOMAIN:
                self._journal.note("out of domain", name.film, reason="; ".join(drawing.result.objections))
            try:
                parsed = fresh[drawing.film.number]
                objects = self._maker(drawing, parsed.tags if parsed is not None else None)
                made[name] = {str(kind): data for kind, data in objects.items()}
                drawings.append(drawing)
            except UserError:
                self._spool.fail_film(name, "its tags cannot be copied into a result")
            return Drawn({})

        files = [str(self._spool.film(name)) for name in names]
        known = {self._spool.root / file: fresh[number] for number, file in enumerate(files)}

        def read(path: Path, voi: Voi) -> tuple[Film, FilmInfo, None]:
            parsed = known[path]
            opened = read_film(path, voi) if parsed is None else film_from_tags(path, parsed.tags, parsed.size, voi)
            return (*opened, None)  # a DICOM file is not shown as it is

        results = score_batch(
            self._detector,
            self._spool.root,
            list(enumerate(files)),
            draw=make,
            looking=self._looking,
            restore=False,
            read=read,
        )
        self._spool.commit(made)
        unreadable = [result for result in results if result.status == UNREADABLE]
        for result in unreadable:
            self._spool.fail_film(names[result.number], "; ".join(result.objections))
        if self._live is not None:
            for drawing in drawings:
                self._live.add(names[drawing.film.number].film, drawing)
            for result in unreadable:
                self._live.add_unreadable(names[result.number].film, result)

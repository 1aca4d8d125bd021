"""The service: films in, results out, and how it is doing. It may be killed at any moment; SIGTERM ends it in order."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from threading import Event, Thread

from afire.detect.base import AnomalyDetector
from afire.detect.findings import rule_of
from afire.files import folder_lock, sha256_text
from afire.pacs import silence_libraries
from afire.pacs.connections import Credentials, Destination, is_loopback
from afire.pacs.health import Health, HealthServer, LiveList
from afire.pacs.journal import AUDIT, Journal, Keyed
from afire.pacs.objects import Kind, ObjectMaker
from afire.pacs.receive import Receiver, ReceiveSettings
from afire.pacs.score import Scorer
from afire.pacs.send import Courier, open_sender
from afire.pacs.spool import Observe, Spool

_RECIPE_DIGITS = 12
# Of results that are sent one by one, one waits for the receiver while the other reads or tidies up. Those that are
# sent together gather while one waits: fewer and larger requests.
_COURIERS, _COURIERS_OF_MANY = 2, 1
_POLL_SECONDS = 0.1
_SECONDS_TO_HANG_UP = 5.0  # for callers that are connected when the service is told to end

logger = logging.getLogger("afire")


@dataclass(frozen=True)
class ServiceSettings:
    """What a service does and where."""

    spool: Path
    receive: ReceiveSettings
    destination: Destination
    credentials: Credentials
    kinds: Sequence[Kind]
    health: tuple[str, int] | None = None  # host and port
    live: int = 200  # films of the live list behind it; none is no list
    batch: int = 32
    workers: int | None = None
    drain_seconds: float = 25.0
    retry_failed: bool = False


class Service:
    """One detector behind one address. The spool's folder must be held (:func:`serve` does).

    ``observe`` is called after each step of a film or a result that is safe on disk.
    """

    def __init__(
        self, settings: ServiceSettings, detector: AnomalyDetector, model_hash: str, observe: Observe | None = None
    ) -> None:
        silence_libraries()
        keyed = Keyed(settings.spool)
        self.settings = settings
        self._journal = Journal(settings.spool / AUDIT)
        self._also = observe
        self.spool = Spool(settings.spool, recipe_of(model_hash, settings.kinds), self._on_step)
        if settings.retry_failed:
            self._journal.note("retrying", reason=f"{self.spool.retry_failed()} that had failed")
        rule = rule_of(detector)
        maker = ObjectMaker.of(detector, rule, model_hash, settings.kinds)
        maker.prepare()
        self._live: LiveList | None = None
        if settings.live and settings.health is not None and is_loopback(settings.health[0], "--health-bind"):
            self._live = LiveList(detector, rule, model_hash, settings.live, self.spool.counts)
        self._scorer = Scorer(detector, maker, self.spool, self._journal, settings.batch, settings.workers, self._live)
        self._senders = [open_sender(settings.destination, settings.receive.title, settings.credentials)]
        for _ in range(1, _COURIERS_OF_MANY if self._senders[0].sends_together else _COURIERS):
            self._senders.append(open_sender(settings.destination, settings.receive.title, settings.credentials))
        self._receiver = Receiver(settings.receive, self.spool, keyed, self._journal)
        self._threads: list[Thread] = []
        self._stop, self._draining = Event(), False
        self._health: HealthServer | None = None
        self.port = self.health_port = 0
        self.is_stopped = False

    def _on_step(self, event: str, film: str, *, reason: str = "", kind: str = "") -> None:
        self._journal.note(event, film, reason=reason, kind=kind)
        if self._also is not None:
            self._also(event, film, reason=reason, kind=kind)

    @property
    def live_address(self) -> str:
        """Where a browser on this machine finds the live list; nowhere without one."""
        return f"http://localhost:{self.health_port}/" if self._live is not None else ""

    def start(self) -> None:
        """Score and send what an earlier service left, and listen."""
        couriers = [Courier(self.spool, sender, self._journal) for sender in self._senders]
        sending = [Thread(target=courier.run, args=(self._stop,), name="courier") for courier in couriers]
        self._threads = [*self._scorer.start(self._stop), *sending]
        for thread in sending:
            thread.start()
        try:
            if self.settings.health is not None:
                self._health = HealthServer(*self.settings.health, self.look, self._live)
                self.health_port = self._health.port
            self.port = self._receiver.start()
        except BaseException:
            self.stop(0)
            raise
        self._journal.note("started")

    def stop(self, drain_seconds: float | None = None) -> None:
        """Take no more films, go on with those that wait for a while, and end; the rest waits for the next start."""
        seconds = self.settings.drain_seconds if drain_seconds is None else drain_seconds
        self._draining = True
        deadline = time.monotonic() + seconds
        self._receiver.stop(min(seconds, _SECONDS_TO_HANG_UP))
        while self.spool.has_work() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._health is not None:
            self._health.close()
        self.is_stopped = True
        self._journal.note("stopped")
        self._journal.close()

    def look(self) -> Health:
        """How it is doing."""
        alive = bool(self._threads) and all(thread.is_alive() for thread in self._threads)
        reasons = []
        if not alive:
            reasons.append("a thread has ended")
        if self._draining or not self.port:
            reasons.append("it is ending" if self._draining else "it does not listen yet")
        if not self._receiver.has_room():
            reasons.append("there is less free space than --min-free")
        return Health(
            alive=alive,
            ready=not reasons,
            reasons=tuple(reasons),
            waiting=self.spool.counts(),
            events=self._journal.counts(),
            free_bytes=disk_usage(self.settings.spool).free,
        )


def recipe_of(model_hash: str, kinds: Sequence[Kind]) -> str:
    """What results depend on beside the film: those of another model or of other kinds are other results."""
    return sha256_text(f"{model_hash} {' '.join(sorted(kinds))}")[:_RECIPE_DIGITS]


def serve(settings: ServiceSettings, detector: AnomalyDetector, model_hash: str) -> int:
    """Run a service until a signal ends it; returns the exit code, 143 after SIGTERM and 130 after Ctrl-C."""
    with folder_lock(settings.spool, "the spool in"), _signals() as received:
        service = Service(settings, detector, model_hash)
        service.start()
        logger.info("listening as %s on %s port %d", *_listening(service))
        logger.info("results go to %s", settings.destination.words)
        if service.live_address:
            logger.info("a live list is at %s", service.live_address)
        while not received:
            time.sleep(_POLL_SECONDS)
        logger.info("ending: no more films are taken, and those that wait go on for %g s", settings.drain_seconds)
        service.stop()
        left = sum(service.spool.counts()[state] for state in ("incoming", "scored", "outgoing"))
        if left:
            logger.info("%d films or results wait in the spool for the next start", left)
        return 128 + received[0]


def _listening(service: Service) -> tuple[str, str, int]:
    receive = service.settings.receive
    return receive.title, receive.host, service.port


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that gets the numbers of SIGTERM and SIGINT when they come."""
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

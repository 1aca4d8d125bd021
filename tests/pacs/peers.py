"""A PACS that pynetdicom plays, and a service beside it; everything on this machine."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pynetdicom")
pytest.importorskip("highdicom")
pytest.importorskip("dicomweb_client")

from pydicom.dataset import Dataset
from pynetdicom import AE, evt
from pynetdicom.presentation import StoragePresentationContexts

from afire.detect.base import AnomalyDetector
from afire.detect.run import detector_hash
from afire.pacs.connections import Credentials, parse_caller, parse_destination
from afire.pacs.reactor import let_go
from afire.pacs.receive import ReceiveSettings
from afire.pacs.service import Service, ServiceSettings

LOOPBACK = "127.0.0.1"


class Pacs:
    """A storage provider that keeps what it is sent, and answers as it is told to."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.kept: list[Dataset] = []
        self.answer: Callable[[Dataset], int] = lambda _: 0x0000
        self.attempts = self.associations = 0
        self.drops: dict[int, str] = {}  # attempt -> whether the connection ends "before" or "after" the object is kept
        self._lock = threading.Lock()
        self._ae = AE(ae_title="PACS")
        self._ae.supported_contexts = [deepcopy(one) for one in StoragePresentationContexts]
        self._server: Any = None
        self.port = 0

    def start(self) -> Pacs:
        # `let_go`: a caller that ends the handshake of TLS must not occupy a thread until the library's time-out
        handlers = [(evt.EVT_C_STORE, self._store), (evt.EVT_ACCEPTED, self._count), (evt.EVT_CONN_CLOSE, let_go)]
        self._server = self._ae.start_server(
            (LOOPBACK, self.port), block=False, ssl_context=self._tls, evt_handlers=handlers
        )
        self.port = self._server.socket.getsockname()[1]
        return self

    def take(self, kind: str, syntax: str) -> None:
        """Of another transfer syntax too."""
        self._ae.add_supported_context(kind, syntax)

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self.hang_up()
            self._server = None

    def hang_up(self) -> None:
        """On everybody who is connected; new connections are accepted."""
        for association in self._ae.active_associations:
            association.abort()

    def _count(self, _event: Any) -> None:
        self.associations += 1

    def _store(self, event: Any) -> int:
        made = event.dataset
        with self._lock:
            self.attempts += 1
            drop = self.drops.get(self.attempts, "")
            status = self.answer(made)
            if status == 0 and drop != "before":
                self.kept.append(made)
        if drop:
            event.assoc.dul.socket.close()
        return status

    def ids(self) -> list[str]:
        with self._lock:
            return [str(made.SOPInstanceUID) for made in self.kept]


@pytest.fixture
def pacs() -> Iterator[Pacs]:
    one = Pacs().start()
    yield one
    one.stop()


def settings_for(spool: Path, send: str, **changes: Any) -> ServiceSettings:
    """Quick settings of a service on loopback; the port is chosen by the system."""
    receive = ReceiveSettings(
        title="AFIRE",
        host=LOOPBACK,
        port=changes.pop("port", 0),
        callers=[parse_caller(f"SENDER@{LOOPBACK}"), parse_caller(f"ORTHANC@{LOOPBACK}")],
        min_free=changes.pop("min_free", 0),
        tls=changes.pop("tls", None),
    )
    quick = {"kinds": ("sc", "sr"), "workers": 2, "batch": 8, "drain_seconds": 20.0, "credentials": Credentials()}
    return ServiceSettings(spool=spool, receive=receive, destination=parse_destination(send), **{**quick, **changes})


StartService = Callable[..., Service]


@pytest.fixture
def start_service(model: Path, detector: AnomalyDetector, pacs: Pacs, tmp_path: Path) -> Iterator[StartService]:
    """Start a service that sends to ``pacs``; it is ended after the test."""
    started: list[Service] = []

    def start(**changes: Any) -> Service:
        send = changes.pop("send", f"dimse:PACS@{LOOPBACK}:{pacs.port}")
        one = Service(settings_for(tmp_path / "spool", send, **changes), detector, detector_hash(model))
        one.start()
        started.append(one)
        return one

    yield start
    for one in started:
        if not one.is_stopped:
            one.stop(0)


def store(
    port: int, *made: Dataset, caller: str = "SENDER", called: str = "AFIRE", patience: float = 8, **tls: Any
) -> list[int]:
    """Send films in one association: the statuses, or -1 where no association or no context was accepted."""
    ae = AE(ae_title=caller)
    ae.dimse_timeout = ae.acse_timeout = ae.network_timeout = patience  # a peer that was killed may leave us waiting
    for kind in {(one.SOPClassUID, one.file_meta.TransferSyntaxUID) for one in made}:
        ae.add_requested_context(*kind)
    association = ae.associate(LOOPBACK, port, ae_title=called, **tls)
    if not association.is_established:
        return [-1] * len(made)
    statuses = []
    for one in made:
        try:
            statuses.append(int(getattr(association.send_c_store(one), "Status", -1)))
        except (ValueError, RuntimeError):  # no presentation context; the peer is gone
            statuses.append(-1)
    if association.is_established:
        association.release()
    return statuses


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)

"""Associations that wait: nobody looks for news over and over, and no news is kept waiting."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pydicom
import pytest

pytest.importorskip("pynetdicom")

from pydicom.dataset import Dataset
from pydicom.uid import ComputedRadiographyImageStorage, ExplicitVRLittleEndian
from pynetdicom import AE, evt
from pynetdicom.dimse_messages import C_STORE_RQ
from pynetdicom.dimse_primitives import C_STORE
from pynetdicom.dul import DULServiceProvider
from pynetdicom.sop_class import Verification

from afire.pacs import reactor
from tests.pacs.films import dataset
from tests.pacs.peers import LOOPBACK, StartService, store, wait_for


def associations() -> int:
    """Threads of films' senders."""
    return sum(thread.name.startswith("AcceptorThread") for thread in threading.enumerate())


def test_nobody_looks_while_nothing_comes(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, real = [], reactor.readable

    def counted(sockets: Any, seconds: float) -> Any:
        looks.append(seconds)
        return real(sockets, seconds)

    service = start_service()
    ae = AE(ae_title="SENDER")
    ae.add_requested_context(Verification)
    one = ae.associate(LOOPBACK, service.port, ae_title="AFIRE")
    assert one.send_c_echo().Status == 0
    monkeypatch.setattr(reactor, "readable", counted)
    try:
        time.sleep(0.5)
    finally:
        monkeypatch.undo()
        one.release()
    assert len([seconds for seconds in looks if seconds == reactor._LONGEST_WAIT]) <= 10  # not some hundred


def test_news_wakes_who_waits(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if nobody would ever look up by himself."""
    monkeypatch.setattr(reactor, "_LONGEST_WAIT", 300.0)
    service = start_service()
    assert store(service.port, dataset(0), dataset(1)) == [0, 0]
    wait_for(lambda: associations() == 0, 20)


def test_who_hangs_up_or_talks_nonsense_leaves_no_thread(start_service: StartService) -> None:
    service = start_service()
    nonsense = (b"", b"\x09\x00\x00\x00\x00\x04what", b"\x01\x00\xff\xff\xff\xffa request without an end")
    others = [socket.create_connection((LOOPBACK, service.port)) for _ in nonsense]
    wait_for(lambda: associations() == len(others))
    for other, words in zip(others, nonsense, strict=True):
        with other:
            other.sendall(words)
    wait_for(lambda: associations() == 0, 20)  # the library would wait for a minute
    assert store(service.port, dataset(0)) == [0]


@pytest.fixture
def films_in() -> Iterator[tuple[int, list[bytes]]]:
    """The port of a storage provider in small messages, and the files that it was sent."""
    came: list[bytes] = []

    def store_film(event: Any) -> int:
        came.append(event.request.DataSet.getvalue())
        return 0xB000  # a warning: what we say must arrive

    ae = AE(ae_title="AFIRE")
    ae.maximum_pdu_size = 4096
    ae.add_supported_context(ComputedRadiographyImageStorage, [ExplicitVRLittleEndian])
    handlers = [
        (evt.EVT_CONN_OPEN, reactor.wait_for_news, [lambda *_: None]),
        (evt.EVT_CONN_CLOSE, reactor.let_go),
        (evt.EVT_C_STORE, store_film),
    ]
    server = ae.start_server((LOOPBACK, 0), block=False, evt_handlers=handlers)
    yield server.socket.getsockname()[1], came
    server.shutdown()


def large_film() -> Dataset:
    """Some thirty fragments of 4 kB."""
    image = np.random.default_rng(0).integers(0, 4096, (256, 256)).astype(np.uint16)
    return dataset(0, Rows=256, Columns=256, PixelData=image.tobytes())


@pytest.mark.parametrize("largest", [reactor._LARGEST_FRAGMENT, 4000, 0])
def test_fragments_become_the_file(
    films_in: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    """Whoever reads them: we, the library those that are too large for us, or the library all."""
    monkeypatch.setattr(reactor, "_LARGEST_FRAGMENT", largest)
    port, came = films_in
    assert store(port, large_film(), dataset(1)) == [0xB000, 0xB000]
    for data, sent in zip(came, (large_film(), dataset(1)), strict=True):
        read = pydicom.dcmread(io.BytesIO(data))
        assert read == sent
        assert read.file_meta.MediaStorageSOPInstanceUID == sent.SOPInstanceUID
        assert read.file_meta.TransferSyntaxUID == ExplicitVRLittleEndian


def test_films_do_not_pass_through_the_library(
    films_in: tuple[int, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    real = DULServiceProvider._decode_pdu

    def counted(self: Any, data: bytearray) -> Any:
        if data[0] == reactor.FRAGMENT and not self.assoc.is_requestor:
            decoded.append(len(data))
        return real(self, data)

    monkeypatch.setattr(DULServiceProvider, "_decode_pdu", counted)
    port, _ = films_in
    assert store(port, large_film()) == [0xB000]
    assert decoded == []


@pytest.mark.parametrize("how", ["abort", "hang up"])
def test_who_ends_within_a_film_leaves_nothing(films_in: tuple[int, list[bytes]], how: str) -> None:
    port, came = films_in
    ae = AE(ae_title="SENDER")
    ae.add_requested_context(ComputedRadiographyImageStorage, ExplicitVRLittleEndian)
    one = ae.associate(LOOPBACK, port, ae_title="AFIRE")
    command = C_STORE()
    command.MessageID, command.Priority = 1, 2
    command.AffectedSOPClassUID, command.AffectedSOPInstanceUID = ComputedRadiographyImageStorage, "1.2.3"
    command.DataSet = io.BytesIO(bytes(20000))
    message = C_STORE_RQ()
    message.primitive_to_message(command)
    context = one.accepted_contexts[0].context_id
    for number, fragment in enumerate(message.encode_msg(context, 4096)):
        if number == 4:
            break
        one.dul.send_pdu(fragment)
    wait_for(lambda: one.dul.to_provider_queue.empty())
    if how == "abort":
        one.abort()
    else:
        one.dul.socket.close()
    wait_for(lambda: associations() == 0)
    assert came == []
    assert store(port, dataset(0)) == [0xB000]

"""Peers that stall or never come to an end: each loses its place, takes no memory, and holds up nobody."""

from __future__ import annotations

import fcntl
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from queue import Queue
from struct import pack
from types import SimpleNamespace

import pytest

pytest.importorskip("pynetdicom")
pytest.importorskip("dicomweb_client")

from pydicom.uid import ComputedRadiographyImageStorage, ExplicitVRLittleEndian
from pynetdicom.dul import DULServiceProvider

from afire.pacs import reactor
from afire.pacs.association import FRAGMENT, IS_COMMAND, IS_LAST, StoreAssociation, command_set, uid_value
from afire.pacs.connections import Certificate, Credentials, server_context
from afire.pacs.service import Service
from tests.pacs.films import dataset
from tests.pacs.peers import LOOPBACK, StartService, store, wait_for
from tests.pacs.test_connections_tls import certificate
from tests.pacs.test_reactor import associations, large_film

__all__ = ["certificate"]

HALF_A_REQUEST = b"\x01\x00\x00\x00\x01\x00" + bytes(128)
COMMAND = command_set({
    0x0002: uid_value(ComputedRadiographyImageStorage),
    0x0100: pack("<H", 1),
    0x0110: pack("<H", 1),
    0x0700: pack("<H", 0),
    0x0800: pack("<H", 1),
    0x1000: b"1.2.3\0",
})  # fmt: skip


def fragment(data: bytes, bits: int) -> bytes:
    return pack(">BxIIBB", FRAGMENT, len(data) + 6, len(data) + 2, 1, bits) + data


HALF_A_FILM = fragment(COMMAND, IS_COMMAND | IS_LAST) + fragment(bytes(1000), 0) + fragment(bytes(1000), 0)[:500]


@pytest.fixture(params=["plain", "tls"])
def ways(request: pytest.FixtureRequest, certificate: Certificate) -> tuple[ssl.SSLContext | None, ...]:
    """TLS of the service, and of its callers."""
    if request.param == "plain":
        return None, None
    return server_context(certificate, certificate.file), Credentials(
        ca=certificate.file, certificate=certificate
    ).context()


def caller(port: int, tls: ssl.SSLContext | None = None) -> socket.socket:
    """A connection of who may send films."""
    kinds = [(ComputedRadiographyImageStorage, ExplicitVRLittleEndian)]
    return StoreAssociation(LOOPBACK, port, titles=("SENDER", "AFIRE"), kinds=kinds, timeout=10, tls=tls)._socket


def stranger(port: int, tls: ssl.SSLContext | None = None) -> socket.socket:
    """A connection of somebody."""
    plain = socket.create_connection((LOOPBACK, port), timeout=10)
    return plain if tls is None else tls.wrap_socket(plain, server_hostname=LOOPBACK)


def rest_of(peer: socket.socket) -> bytes:
    """What comes until the other side hangs up."""
    said = b""
    with suppress(ConnectionError, ssl.SSLError):  # with what we said unread
        while more := peer.recv(1000):
            said += more
    return said


@pytest.mark.parametrize("moment", ["request", "film"])
def test_who_stalls_within_a_message_loses_his_place(
    start_service: StartService,
    monkeypatch: pytest.MonkeyPatch,
    ways: tuple[ssl.SSLContext | None, ...],
    moment: str,
) -> None:
    monkeypatch.setattr(reactor, "_LONGEST_SILENCE", 0.3)
    service = start_service(tls=ways[0])
    with (stranger if moment == "request" else caller)(service.port, ways[1]) as peer:
        peer.sendall(HALF_A_REQUEST if moment == "request" else HALF_A_FILM)
        assert rest_of(peer) == b""
        wait_for(lambda: associations() == 0)
    assert not list((service.spool.root / "incoming").iterdir())


def test_who_says_one_byte_after_the_other_has_no_longer(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reactor, "_LONGEST_SILENCE", 0.3)
    service = start_service()
    with stranger(service.port) as peer:
        begun = time.monotonic()
        with suppress(ConnectionError):
            for byte in HALF_A_REQUEST:
                peer.sendall(bytes([byte]))
                time.sleep(0.1)
        assert time.monotonic() - begun < 5
    wait_for(lambda: associations() == 0)


def test_neither_reads_nor_writes_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reactor, "_LONGEST_SILENCE", 0.1)
    one, other = socket.socketpair()
    with one, other:
        reactor._limit_silence(one)
        with pytest.raises(OSError):
            one.recv(1)
        with pytest.raises(OSError):  # when the buffers are full
            while True:
                one.send(bytes(1 << 16))
        assert one.gettimeout() is None, "each read would wait, also those that must not"


@pytest.mark.parametrize("moment", ["silent", "request", "film"])
def test_a_stalled_peer_does_not_hold_up_the_end(
    start_service: StartService, ways: tuple[ssl.SSLContext | None, ...], moment: str
) -> None:
    service = start_service(tls=ways[0])
    words = {"silent": b"", "request": HALF_A_REQUEST, "film": HALF_A_FILM}[moment]
    with (caller if moment == "film" else stranger)(service.port, ways[1]) as peer:
        peer.sendall(words)
        wait_for(lambda: associations() == 1)
        time.sleep(0.1)  # it is being read
        end = threading.Thread(target=service.stop, args=(0,), daemon=True)
        end.start()
        end.join(8)
        assert not end.is_alive() and associations() == 0
        alive = [thread for thread in threading.enumerate() if isinstance(thread, DULServiceProvider)]
        assert not [thread for thread in alive if thread.assoc.is_acceptor], "none keeps the process from ending"


def test_who_finishes_in_time_is_waited_for(start_service: StartService) -> None:
    service = start_service()
    with caller(service.port) as peer:
        peer.sendall(HALF_A_FILM)
        end = threading.Thread(target=service.stop, args=(5,), daemon=True)
        end.start()
        time.sleep(0.2)
        peer.sendall(fragment(bytes(1000), 0)[500:] + fragment(bytes(1000), IS_LAST))
        assert peer.recv(1)[0] == FRAGMENT, "it is answered"
        peer.sendall(b"\x05\x00\x00\x00\x00\x04" + bytes(4))
        end.join(8)
        assert not end.is_alive()


def swallowed(peer: socket.socket, most: int) -> int:
    """Bytes that the other side takes before it hangs up, ``most`` at most."""
    taken = 0
    with suppress(ConnectionError):
        while taken < most:
            taken += peer.send(bytes(1 << 16))
    return taken


def test_a_message_without_measure_is_not_read(start_service: StartService) -> None:
    service = start_service()
    for open_one, head in ((stranger, b"\x01\x00"), (caller, b"\x04\x00"), (caller, b"\x05\x00")):
        with open_one(service.port) as peer:
            peer.sendall(head + b"\xff\xff\xff\xf0" + b"\xff\xff\xff\xec")
            assert swallowed(peer, 64 << 20) < 64 << 20
        wait_for(lambda: associations() == 0)
    assert store(service.port, large_film()) == [0]


@pytest.mark.parametrize("largest", [reactor._LARGEST_FRAGMENT, 0])
@pytest.mark.parametrize("part", ["film", "command"])
def test_a_film_without_an_end_is_not_kept(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch, largest: int, part: str
) -> None:
    """Whoever reads its fragments, we or the library."""
    monkeypatch.setattr(reactor, "_LARGEST_FRAGMENT", largest)
    monkeypatch.setattr(reactor, "_LARGEST_FILM", 200_000)
    service = start_service()
    assert store(service.port, large_film()) == [0], "below the limit"
    with caller(service.port) as peer:
        endless = fragment(COMMAND, IS_COMMAND | IS_LAST) if part == "film" else b""
        endless += 21 * fragment(bytes(10_000), 0 if part == "film" else IS_COMMAND)
        peer.sendall(endless)
        assert peer.recv(10)[:1] == b"\x07", "A-ABORT"
    wait_for(lambda: associations() == 0)
    assert store(service.port, dataset(1)) == [0]


@pytest.fixture
def high() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection with a descriptor above 1023, and its other end."""
    low, other = socket.socketpair()
    with low, other, socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, 1100)) as one:
        yield one, other


def test_descriptors_of_any_number(high: tuple[socket.socket, socket.socket]) -> None:
    one, other = high
    events: Queue[str] = Queue()
    upper = SimpleNamespace(event_queue=events, state_machine=SimpleNamespace(current_state="Sta2"))
    waiting = reactor._WaitingSocket(SimpleNamespace(dul=upper), one, lambda _: None)
    assert events.get() == "Evt5" and not waiting.ready
    other.sendall(b"!")
    assert waiting.ready and events.empty()
    waiting.close()


def test_who_stalls_within_the_handshake_loses_his_place(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch, certificate: Certificate
) -> None:
    monkeypatch.setattr(reactor, "_LONGEST_SILENCE", 0.3)
    service = start_service(tls=server_context(certificate, None))
    with stranger(service.port) as peer:
        peer.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")  # the beginning of a ClientHello
        assert rest_of(peer) == b""
        wait_for(lambda: associations() == 0)


def test_a_caller_by_tls_that_says_nothing_stops_nobody(start_service: StartService, certificate: Certificate) -> None:
    guarded = server_context(certificate, certificate.file)
    known = Credentials(ca=certificate.file, certificate=certificate).context()
    unknown = Credentials(ca=certificate.file).context()
    service: Service = start_service(tls=guarded)
    with socket.create_connection((LOOPBACK, service.port)), socket.create_connection((LOOPBACK, service.port)):
        assert store(service.port, dataset(0), tls_args=(known, LOOPBACK), patience=3) == [0]
        assert store(service.port, dataset(1), tls_args=(unknown, LOOPBACK), patience=3) == [-1]
        assert store(service.port, dataset(1), patience=3) == [-1], "plain"
        assert store(service.port, dataset(1), tls_args=(known, LOOPBACK), patience=3) == [0]

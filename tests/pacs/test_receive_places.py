"""Who loses a connection by a limit is in the audit log, and strangers cannot take the places of callers."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from queue import Queue
from types import SimpleNamespace

import pytest

pytest.importorskip("pynetdicom")
pytest.importorskip("dicomweb_client")

from pydicom.uid import ComputedRadiographyImageStorage, ExplicitVRLittleEndian

from afire.pacs import reactor, receive
from afire.pacs.association import StoreAssociation
from afire.pacs.connections import Certificate, Credentials, server_context
from afire.pacs.service import Service
from tests.pacs.films import dataset
from tests.pacs.peers import LOOPBACK, StartService, store, wait_for
from tests.pacs.test_connections_tls import certificate
from tests.pacs.test_reactor import associations, large_film
from tests.pacs.test_reactor_limits import (
    COMMAND,
    HALF_A_FILM,
    HALF_A_REQUEST,
    caller,
    fragment,
    rest_of,
    stranger,
    swallowed,
)

__all__ = ["certificate"]

ELSEWHERE = "127.0.0.2"  # also this machine, and an address that no caller has
CALLER = f"SENDER@{LOOPBACK}"


def lines(service: Service, event: str) -> list[dict[str, str]]:
    """Of the audit log about ``event``, without their times."""
    written = (service.settings.spool / "audit.jsonl").read_text().splitlines()
    found = [line for line in map(json.loads, written) if line["event"] == event]
    return [{name: value for name, value in line.items() if name != "time"} for line in found]


def cut_off(service: Service) -> list[tuple[str, str]]:
    """Caller and reason of each connection that was ended by a limit."""
    found = lines(service, "cut off")
    assert all(set(line) == {"event", "caller", "reason"} for line in found), "nothing of a film"
    return [(line["caller"], line["reason"]) for line in found]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reactor, "_LONGEST_SILENCE", 0.3)
    monkeypatch.setattr(receive, "_TIMEOUT", 0.4)


def half_a_request(port: int) -> None:
    with stranger(port) as peer:
        peer.sendall(HALF_A_REQUEST)
        rest_of(peer)


def half_a_film(port: int) -> None:
    with caller(port) as peer:
        peer.sendall(HALF_A_FILM)
        rest_of(peer)


def nothing(port: int) -> None:
    with stranger(port) as peer:
        rest_of(peer)


def no_film(port: int) -> None:
    with caller(port) as peer:
        rest_of(peer)


def an_endless_request(port: int) -> None:
    with stranger(port) as peer:
        peer.sendall(b"\x01\x00\xff\xff\xff\xf0")
        swallowed(peer, 64 << 20)


def an_endless_film(port: int) -> None:
    with caller(port) as peer:
        peer.sendall(fragment(COMMAND, 3) + 21 * fragment(bytes(10_000), 0))
        assert peer.recv(10)[:1] == b"\x07", "A-ABORT"


@pytest.mark.parametrize(
    ("behave", "who", "reason"),
    [
        (half_a_request, LOOPBACK, "stalled within a message"),
        (half_a_film, CALLER, "stalled within a message"),
        (nothing, LOOPBACK, "no request in time"),
        (no_film, CALLER, "silent for too long"),
        (an_endless_request, LOOPBACK, "a message that is too long"),
        (an_endless_film, CALLER, "a film that is too large"),
    ],
)
def test_who_is_cut_off_is_in_the_log_and_counted(
    start_service: StartService,
    monkeypatch: pytest.MonkeyPatch,
    impatient: None,
    behave: Callable[[int], None],
    who: str,
    reason: str,
) -> None:
    monkeypatch.setattr(reactor, "_LARGEST_FILM", 200_000)
    service = start_service(health=(LOOPBACK, 0))
    behave(service.port)
    wait_for(lambda: associations() == 0)
    assert cut_off(service) == [(who, reason)], "once"
    with urllib.request.urlopen(f"http://{LOOPBACK}:{service.health_port}/metrics") as page:
        assert 'afire_events_total{event="cut off"} 1' in page.read().decode()


def test_a_handshake_that_stalls_is_in_the_log(
    start_service: StartService, impatient: None, certificate: Certificate
) -> None:
    service = start_service(tls=server_context(certificate, None))
    with stranger(service.port) as peer:
        peer.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")  # the beginning of a ClientHello
        rest_of(peer)
    wait_for(lambda: associations() == 0)
    assert cut_off(service) == [(LOOPBACK, "stalled within a message")]


def test_who_does_not_agree_on_tls_is_in_the_audit_log(start_service: StartService, certificate: Certificate) -> None:
    service = start_service(tls=server_context(certificate, certificate.file))
    nameless = Credentials(ca=certificate.file).context()
    assert store(service.port, dataset(0)) == [-1]
    assert store(service.port, dataset(0), tls_args=(nameless, LOOPBACK)) == [-1]
    stranger(service.port).close()
    wait_for(lambda: associations() == 0)
    wait_for(lambda: len(cut_off(service)) == 2)
    assert cut_off(service) == [
        (LOOPBACK, "TLS: wrong version number"),
        (LOOPBACK, "TLS: peer did not return a certificate"),
    ]


def test_who_takes_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reactor, "_LONGEST_SILENCE", 0.1)
    one, other = socket.socketpair()
    reasons: list[str] = []
    events: Queue[str] = Queue()
    upper = SimpleNamespace(event_queue=events, state_machine=SimpleNamespace(current_state="Sta6"))
    waiting = reactor._WaitingSocket(SimpleNamespace(dul=upper), one, reasons.append)
    assert events.get() == "Evt5"
    with one, other:
        reactor._limit_silence(one)
        for _ in range(2):
            waiting.send(bytes(1 << 24))  # more than all buffers hold
            assert events.get() == reactor._CLOSED
        waiting.close()
    assert reasons == ["takes no answers"], "once"


def test_who_behaves_is_not_in_the_log(start_service: StartService) -> None:
    """Films, a port scan, who hangs up in the middle, and the end of the service."""
    service = start_service()
    assert store(service.port, large_film()) == [0]
    stranger(service.port).close()
    with caller(service.port) as peer:
        peer.sendall(HALF_A_FILM)
    wait_for(lambda: associations() == 0)
    with caller(service.port), stranger(service.port):
        wait_for(lambda: associations() == 2)
        service.stop(0)
    assert cut_off(service) == []


# Places


def from_elsewhere(port: int) -> socket.socket:
    return socket.create_connection((LOOPBACK, port), timeout=10, source_address=(ELSEWHERE, 0))


def is_closed(peer: socket.socket) -> bool:
    """Whether the other side has hung up."""
    peer.settimeout(0.2)
    try:
        return peer.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.fixture
def crowd(start_service: StartService) -> Iterator[tuple[Service, list[socket.socket]]]:
    """A service, and more silent connections from an unknown address than there are places for any."""
    service = start_service()
    with ExitStack() as stack:
        peers = [stack.enter_context(from_elsewhere(service.port)) for _ in range(receive._MOST_ASSOCIATIONS + 10)]
        wait_for(lambda: len(lines(service, "rejected")) == len(peers) - receive._MOST_STRANGERS)
        yield service, peers


def test_strangers_leave_the_places_of_callers(crowd: tuple[Service, list[socket.socket]]) -> None:
    service, peers = crowd
    assert associations() == receive._MOST_STRANGERS
    assert lines(service, "rejected")[0] == {
        "event": "rejected",
        "caller": ELSEWHERE,
        "reason": "too many connections of unknown addresses",
    }
    assert sum(not is_closed(peer) for peer in peers) == receive._MOST_STRANGERS
    assert store(service.port, dataset(0)) == [0]


def test_callers_have_all_other_places(crowd: tuple[Service, list[socket.socket]]) -> None:
    service, _ = crowd
    with ExitStack() as stack:
        for _ in range(receive._MOST_ASSOCIATIONS - receive._MOST_STRANGERS - 1):
            stack.enter_context(caller(service.port))
        assert store(service.port, dataset(1)) == [0], "the last place"


def test_a_place_of_a_stranger_is_free_again(crowd: tuple[Service, list[socket.socket]]) -> None:
    service, peers = crowd
    for peer in peers:
        peer.close()
    wait_for(lambda: associations() == 0)
    with from_elsewhere(service.port) as peer:
        assert not is_closed(peer)


def test_a_stranger_still_learns_why_he_is_rejected(start_service: StartService) -> None:
    """One that was set up with a wrong address finds its line in the log."""
    service = start_service()
    with from_elsewhere(service.port) as peer:
        peer.sendall(_request_of_a_caller(service.port))
        assert peer.recv(1) == b"\x03", "A-ASSOCIATE-RJ"
    [line] = lines(service, "rejected")
    assert line["caller"] == f"SENDER@{ELSEWHERE}" and line["reason"] == "unknown caller"


class Noted(StoreAssociation):
    """Keeps what it says."""

    said: tuple[bytes, ...] = ()

    def _send(self, data: bytes | memoryview) -> None:
        self.said += (bytes(data),)
        super()._send(data)


def _request_of_a_caller(port: int) -> bytes:
    kinds = [(ComputedRadiographyImageStorage, ExplicitVRLittleEndian)]
    one = Noted(LOOPBACK, port, titles=("SENDER", "AFIRE"), kinds=kinds, timeout=10)
    one.release()
    return one.said[0]


def test_a_burst_finds_no_gap(start_service: StartService) -> None:
    """Connections that come faster than their threads begin are counted all the same."""
    service = start_service()
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(from_elsewhere(service.port))
            assert associations() <= receive._MOST_STRANGERS
        time.sleep(0.2)
        assert associations() == receive._MOST_STRANGERS

"""Senders: what each answer of a receiver means, and that waiting is ours alone."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("dicomweb_client")

from afire.pacs import send
from afire.pacs.connections import Credentials, parse_destination
from afire.pacs.journal import Journal
from afire.pacs.send import Answer, Courier, DimseSender, Outcome, WebSender, _answer_to, open_sender
from afire.pacs.spool import FilmName, Spool
from tests.pacs.films import film, instance
from tests.pacs.peers import LOOPBACK, Pacs, wait_for


class Web:
    """A DICOMweb server that answers what it is told to and keeps the requests."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.status, self.body, self.requests = 200, {}, []  # type: ignore[var-annotated]
        self.words: bytes | None = None  # instead of the body
        self.kind = "application/dicom+json"  # of it; none is not stated
        self.refuses = b""  # requests that hold this
        self.leads_to = ""  # the address of a redirection
        self.pace = 0.0  # seconds between two pieces that are read
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                outer.requests.append((self.path, self.headers.get("Authorization"), self._read(length)))
                refused = outer.refuses and outer.refuses in outer.requests[-1][2]
                body = json.dumps(outer.body).encode() if outer.words is None else outer.words
                self.send_response(409 if refused else outer.status)
                if outer.leads_to:
                    self.send_header("Location", outer.leads_to)
                if outer.kind:
                    self.send_header("Content-Type", outer.kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                outer.status, outer.leads_to = 200, ""
                self.headers["Content-Length"] = "0"
                self.do_POST()

            def _read(self, length: int) -> bytes:
                pieces = []
                while length:
                    pieces.append(self.rfile.read(min(length, 1 << 18)))
                    length -= len(pieces[-1])
                    time.sleep(outer.pace)
                return b"".join(pieces)

            def log_message(self, *_: object) -> None:
                pass

        class Narrow(ThreadingHTTPServer):
            """What has not been read waits with the sender."""

            def server_bind(self) -> None:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                super().server_bind()

        self._server = Narrow((LOOPBACK, 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'http' if tls is None else 'https'}://{LOOPBACK}:{self._server.server_address[1]}/dicom-web"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web() -> Iterator[Web]:
    one = Web()
    yield one
    one.close()


def test_an_object_is_posted_once_and_whole(web: Web, tmp_path: Path) -> None:
    sender = open_sender(parse_destination(f"dicomweb:{web.url}"), "AFIRE", Credentials("reader", "s3cret"))
    big = film(tmp_path / "film.dcm", PixelData=bytes(3_000_000))
    assert sender.send([big]) == [Answer(Outcome.STORED)]
    [(path, authorization, body)] = web.requests
    assert path == "/dicom-web/studies" and authorization.startswith("Basic ") and len(body) > 3_000_000


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(400, "refused"), (409, "refused"), (415, "refused"), (401, "later"), (404, "later"), (429, "later"),
     (500, "later"), (503, "later"), (200, "stored"), (202, "stored")],
)  # fmt: skip
def test_answers_of_a_web_server(web: Web, tmp_path: Path, status: int, outcome: str) -> None:
    web.status = status
    assert WebSender(web.url, Credentials()).send([film(tmp_path / "film.dcm")])[0].outcome.value == outcome
    assert len(web.requests) == 1, "no hidden second attempt"


@pytest.mark.parametrize(("reason", "outcome"), [(0xC000, "refused"), (0xA700, "later"), (0x0111, "stored")])
def test_a_request_that_went_well_with_an_object_that_did_not(
    web: Web, tmp_path: Path, reason: int, outcome: str
) -> None:
    web.body = {"00081198": {"vr": "SQ", "Value": [{"00081197": {"vr": "US", "Value": [reason]}}]}}
    assert WebSender(web.url, Credentials()).send([film(tmp_path / "film.dcm")])[0].outcome.value == outcome


_REASONLESS = b'{"00081198": {"vr": "SQ", "Value": [{"00081197": {"vr": "US"}}]}}'


@pytest.mark.parametrize(
    ("kind", "words", "reason"),
    [("", b"OK", "KeyError"), ("application/dicom+json", b"[{}]", "AttributeError"),
     ("application/dicom+xml", b"<not XML", "ParseError"), ("application/dicom+json", _REASONLESS, "TypeError")],
)  # fmt: skip
def test_an_answer_that_cannot_be_read_is_none(web: Web, tmp_path: Path, kind: str, words: bytes, reason: str) -> None:
    web.kind, web.words = kind, words
    [answer] = WebSender(web.url, Credentials()).send([film(tmp_path / "film.dcm")])
    assert answer == Answer(Outcome.LATER, reason)


def test_objects_of_several_films_go_together_and_a_refusal_is_that_of_one(web: Web, tmp_path: Path) -> None:
    paths = [film(tmp_path / f"{number}.dcm", number=number) for number in range(3)]
    sender = WebSender(web.url, Credentials())
    assert [answer.outcome for answer in sender.send(paths)] == [Outcome.STORED] * 3 and len(web.requests) == 1
    assert web.requests[0][2].count(b"Content-Type: application/dicom") == 3
    web.status = 503
    assert [answer.outcome for answer in sender.send(paths)] == [Outcome.LATER] * 3 and len(web.requests) == 2
    web.status, web.refuses = 200, instance(1).encode()
    assert [answer.outcome.value for answer in sender.send(paths)] == ["stored", "refused", "stored"]
    assert len(web.requests) == 2 + 1 + 3, "each once more, alone"


@pytest.mark.parametrize("status", [302, 307, 308])
def test_a_redirection_stores_nothing(web: Web, tmp_path: Path, status: int) -> None:
    """A POST that is redirected may become a GET; and where it leads nobody has allowed."""
    web.status, web.leads_to = status, "/login"
    assert WebSender(web.url, Credentials()).send([film(tmp_path / "film.dcm")]) == [
        Answer(Outcome.LATER, "TooManyRedirects")
    ]
    assert [path for path, _, _ in web.requests] == ["/dicom-web/studies"]


def test_a_slow_line_is_no_dead_line(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time-out is of a piece: all of a request may take longer."""
    monkeypatch.setattr(send, "_TIMEOUT", 0.8)
    web.pace = 0.03
    big, begun = film(tmp_path / "film.dcm", PixelData=bytes(24 << 20)), time.monotonic()
    assert WebSender(web.url, Credentials()).send([big]) == [Answer(Outcome.STORED)]
    assert time.monotonic() - begun > 2 * 0.8 and len(web.requests) == 1
    assert web.requests[0][2].count(big.read_bytes()) == 1, "whole, and not in chunks"


def test_a_receiver_that_goes_away_among_refusals_is_not_asked_for_each(web: Web, tmp_path: Path) -> None:
    paths = [film(tmp_path / f"{number}.dcm", number=number) for number in range(4)]
    sender, store, answers = WebSender(web.url, Credentials()), WebSender._store, ["refused", "stored", "later"]

    def answered(self: WebSender, paths: Sequence[Path]) -> Answer:
        store(self, paths)
        return Answer(Outcome(answers[len(web.requests) - 1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WebSender, "_store", answered)
        outcomes = [answer.outcome.value for answer in sender.send(paths)]
    assert outcomes == ["stored", "later", "later", "later"] and len(web.requests) == 3


def test_nobody_there(tmp_path: Path, web: Web, pacs: Pacs) -> None:
    web.close()
    pacs.stop()
    sent = film(tmp_path / "film.dcm")
    assert WebSender(web.url, Credentials()).send([sent])[0].outcome is Outcome.LATER
    destination = parse_destination(f"dimse:PACS@{LOOPBACK}:{pacs.port}")
    assert DimseSender(destination, "AFIRE", None).send([sent])[0].outcome is Outcome.LATER


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(0, "stored"), (0xB000, "stored"), (0xB007, "stored"), (0x0111, "stored"), (0xA700, "later"), (0xA7FF, "later"),
     (0x0110, "later"), (0x0124, "later"), (0x0213, "later"), (0xA900, "refused"), (0xC000, "refused"),
     (0x0122, "refused")],
)  # fmt: skip
def test_statuses(status: int, outcome: str) -> None:
    assert _answer_to(status).outcome.value == outcome


class Stubborn:
    """A receiver that is away for some attempts, then refuses one object for good."""

    sends_together = True

    def __init__(self, away: int) -> None:
        self.away, self.sent = away, []  # type: ignore[var-annotated]

    def send(self, paths: Sequence[Path]) -> list[Answer]:
        if self.away:
            self.away -= 1
            return [Answer(Outcome.LATER, "HTTP 503")] * len(paths)
        contents = [path.read_bytes() for path in paths]
        self.sent += contents
        return [Answer(Outcome.REFUSED if data == b"bad" else Outcome.STORED, "HTTP 409") for data in contents]

    def rest(self) -> None:
        pass


def test_the_courier_waits_longer_each_time_up_to_a_limit(tmp_path: Path) -> None:
    courier = Courier(Spool(tmp_path, "aa"), Stubborn(0), Journal(tmp_path / "audit.jsonl"), first_wait=0.5)
    waits = []
    for failures in (1, 2, 3, 7, 8, 9, 2000):
        courier._failures = failures
        waits.append(courier._wait())
    assert waits == [0.5, 1.0, 2.0, 32.0, 60.0, 60.0, 60.0]


class Broken(Stubborn):
    """A way that fails at one object as nobody expected."""

    sends_together = False

    def send(self, paths: Sequence[Path]) -> list[Answer]:
        if any(path.read_bytes() == b"bad" for path in paths):
            raise LookupError("a name that stands in the film")
        return super().send(paths)


def test_the_courier_survives_what_nobody_expected(tmp_path: Path) -> None:
    spool, receiver, stop = Spool(tmp_path, "aa"), Broken(0), threading.Event()
    for number, data in enumerate((b"bad", b"good", b"fine")):
        name = FilmName(f"{number:04x}", "11")
        spool.receive(name, b"film")
        spool.commit({name: {"sr": data}})
    courier = Courier(spool, receiver, Journal(tmp_path / "audit.jsonl"), first_wait=0.001)
    thread = threading.Thread(target=courier.run, args=(stop,), daemon=True)
    thread.start()
    wait_for(lambda: len(receiver.sent) == 2 or not thread.is_alive())
    assert thread.is_alive() and spool.counts()["outgoing"] == 1
    stop.set()
    thread.join()
    log = (tmp_path / "audit.jsonl").read_text()
    assert "LookupError" in log and "a name" not in log


def test_the_courier_keeps_going(tmp_path: Path) -> None:
    spool, receiver, stop = Spool(tmp_path, "aa"), Stubborn(3), threading.Event()
    for number, data in enumerate((b"good", b"bad", b"fine")):
        name = FilmName(f"{number:04x}", "11")
        spool.receive(name, b"film")
        spool.commit({name: {"sr": data}})
    courier = Courier(spool, receiver, Journal(tmp_path / "audit.jsonl"), first_wait=0.001)
    thread = threading.Thread(target=courier.run, args=(stop,))
    thread.start()
    wait_for(lambda: spool.counts()["outgoing"] == 0)
    stop.set()
    thread.join()
    assert sorted(receiver.sent) == [b"bad", b"fine", b"good"] and spool.counts()["failed"] == 1
    log = (tmp_path / "audit.jsonl").read_text()
    assert log.count('"not sent"') == 3 + 1 + 1, "of three films, then twice of one, until the receiver is back"


def commit(spool: Spool, *data: bytes) -> list[FilmName]:
    names = [FilmName(f"{number:04x}", "11") for number in range(len(data))]
    for name, results in zip(names, data, strict=True):
        spool.receive(name, b"film")
        spool.commit({name: {"sr": results}})
    return names


class Poisoned:
    """A receiver that one object makes fail each time: an answer to try later, or an error of ours."""

    def __init__(self, sends_together: bool, raises: bool) -> None:
        self.sends_together, self.raises, self.sent = sends_together, raises, []  # type: ignore[var-annotated]

    def send(self, paths: Sequence[Path]) -> list[Answer]:
        contents = [path.read_bytes() for path in paths]
        if b"bad" in contents:
            if self.raises:
                raise OSError(5, "Input/output error")
            return [Answer(Outcome.LATER, "HTTP 500")] * len(paths)
        self.sent += contents
        return [Answer(Outcome.STORED)] * len(paths)

    def rest(self) -> None:
        pass


@pytest.mark.parametrize("sends_together", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_one_that_fails_each_time_holds_up_no_other(tmp_path: Path, sends_together: bool, raises: bool) -> None:
    spool, receiver, stop = Spool(tmp_path, "aa"), Poisoned(sends_together, raises), threading.Event()
    commit(spool, b"bad", b"one", b"two", b"three")
    courier = Courier(spool, receiver, Journal(tmp_path / "audit.jsonl"), first_wait=0.001)
    thread = threading.Thread(target=courier.run, args=(stop,))
    thread.start()
    try:
        wait_for(lambda: len(receiver.sent) == 3, seconds=5)
    finally:
        stop.set()
        thread.join()
    assert sorted(receiver.sent) == [b"one", b"three", b"two"] and spool.counts()["outgoing"] == 1


class RefusesThenFails:
    """Refuses the first object; at the next the disk fails us."""

    sends_together = False

    def send(self, paths: Sequence[Path]) -> list[Answer]:
        if paths[0].read_bytes() == b"bad":
            return [Answer(Outcome.REFUSED, "status 0xC000")]
        raise OSError(28, "No space left on device")

    def rest(self) -> None:
        pass


def test_what_was_refused_stays_among_the_failed_though_the_next_one_fails(tmp_path: Path) -> None:
    """It was taken for delivered, because nothing of it was left to send: recorded, and removed."""
    spool = Spool(tmp_path, "aa")
    bad, _ = commit(spool, b"bad", b"good")
    courier = Courier(spool, RefusesThenFails(), Journal(tmp_path / "audit.jsonl"))
    for _ in range(4):
        spool.send_later(courier._try(spool.next_results(8, 0)))
    assert spool.counts()["failed"] == 1 and spool.counts()["outgoing"] == 1
    [kept] = (tmp_path / "failed").glob(f"{bad}*/sr.dcm")
    assert kept.read_bytes() == b"bad" and not list((tmp_path / "done").glob("*/*.json"))

"""Associations that store results: one for all that waits, files as they are, and nothing lost when one breaks."""

from __future__ import annotations

import fcntl
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pydicom
import pytest

pytest.importorskip("pynetdicom")
pytest.importorskip("dicomweb_client")

from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian, SecondaryCaptureImageStorage
from pynetdicom import AE, evt
from pynetdicom.sop_class import Verification

from afire.pacs.association import AssociationError, StoreAssociation, StoredObject, command_set
from afire.pacs.connections import parse_destination
from afire.pacs.journal import Journal
from afire.pacs.send import Courier, DimseSender, Outcome
from afire.pacs.spool import FilmName, Spool
from tests.pacs.films import film, instance
from tests.pacs.peers import LOOPBACK, Pacs, wait_for


def capture(path: Path, number: int = 0, **tags: object) -> Path:
    return film(path, number, SOPClassUID=SecondaryCaptureImageStorage, **tags)


def sender_to(pacs: Pacs) -> DimseSender:
    return DimseSender(parse_destination(f"dimse:PACS@{LOOPBACK}:{pacs.port}"), "AFIRE", None)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_association_that_breaks_in_the_middle_loses_and_doubles_nothing(
    pacs: Pacs, tmp_path: Path, moment: str
) -> None:
    """``after``: the receiver has the object, and we do not know it."""
    spool, stop = Spool(tmp_path / "spool", "aa"), threading.Event()
    for number in range(5):
        name = FilmName(f"{number:04x}", "11")
        spool.receive(name, b"film")
        data = [capture(tmp_path / "sc.dcm", 2 * number + kind).read_bytes() for kind in range(2)]
        spool.commit({name: {"sc": data[0], "sr": data[1]}})
    pacs.drops = {4: moment, 8: moment}
    courier = Courier(spool, sender_to(pacs), Journal(tmp_path / "audit.jsonl"), first_wait=0.001)
    thread = threading.Thread(target=courier.run, args=(stop,))
    thread.start()
    wait_for(lambda: spool.counts()["outgoing"] == 0)
    stop.set()
    thread.join()
    stored = Counter(pacs.ids())
    assert set(stored) == {instance(number) for number in range(10)} and spool.counts()["failed"] == 0
    assert pacs.attempts == 10 + 2, "what was acknowledged is not sent again"
    assert sorted(stored.values()) == [1] * 8 + ([2, 2] if moment == "after" else [1, 1]), "the same id twice"
    assert pacs.associations == 3
    assert (tmp_path / "audit.jsonl").read_text().count('"not sent"') == 2


def test_one_association_for_all_that_waits(pacs: Pacs, tmp_path: Path) -> None:
    sender, threads = sender_to(pacs), threading.active_count()
    paths = [capture(tmp_path / f"{number}.dcm", number) for number in range(6)]
    assert [answer.outcome for answer in sender.send(paths[:3])] == [Outcome.STORED] * 3
    assert [answer.outcome for path in paths[3:] for answer in sender.send([path])] == [Outcome.STORED] * 3
    assert pacs.associations == 1
    assert not [thread for thread in threading.enumerate() if "Requestor" in thread.name], "it has no thread of its own"
    sender.rest()
    wait_for(lambda: threading.active_count() <= threads)
    assert sender.send(paths[:1])[0].outcome is Outcome.STORED and pacs.associations == 2
    sender.rest()


def test_a_receiver_that_hung_up_meanwhile_is_called_again_at_once(pacs: Pacs, tmp_path: Path) -> None:
    sender, path = sender_to(pacs), capture(tmp_path / "sc.dcm")
    assert sender.send([path])[0].outcome is Outcome.STORED
    pacs.hang_up()
    assert sender.send([path])[0].outcome is Outcome.STORED and pacs.associations == 2
    sender.rest()


def test_a_receiver_that_refuses_us(tmp_path: Path) -> None:
    ae = AE(ae_title="PACS")
    ae.add_supported_context(SecondaryCaptureImageStorage)
    ae.require_called_aet = True
    server = ae.start_server((LOOPBACK, 0), block=False)
    try:
        where = parse_destination(f"dimse:OTHER@{LOOPBACK}:{server.socket.getsockname()[1]}")
        [answer] = DimseSender(where, "AFIRE", None).send([capture(tmp_path / "sc.dcm")])
    finally:
        server.shutdown()
    assert answer.outcome is Outcome.LATER and answer.reason == "no association"


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
@pytest.mark.parametrize("limit", [0, 1000, 1001, 16384])
def test_data_sets_arrive_whole_in_fragments_of_the_receivers_size(tmp_path: Path, syntax: str, limit: int) -> None:
    data_sets, sizes = [], []
    ae = AE(ae_title="PACS")
    ae.maximum_pdu_size = limit
    ae.add_supported_context(SecondaryCaptureImageStorage, syntax)

    def keep(event: evt.Event) -> int:
        data_sets.append(event.request.DataSet.getvalue())
        return 0

    def measure(event: evt.Event) -> None:
        sizes.append(len(event.data))

    handlers = [(evt.EVT_C_STORE, keep), (evt.EVT_DATA_RECV, measure)]
    server = ae.start_server((LOOPBACK, 0), block=False, evt_handlers=handlers)
    path = capture(tmp_path / "sc.dcm", PixelData=bytes(range(256)) * 300)
    try:
        where = parse_destination(f"dimse:PACS@{LOOPBACK}:{server.socket.getsockname()[1]}")
        sender = DimseSender(where, "AFIRE", None)
        assert sender.send([path])[0].outcome is Outcome.STORED
        sender.rest()
    finally:
        server.shutdown()
    if syntax == ExplicitVRLittleEndian:
        assert data_sets[0] == path.read_bytes()[StoredObject.of(path).start :], "not one byte is written anew"
    else:
        read = pydicom.dcmread(pydicom.filebase.DicomBytesIO(data_sets[0]), force=True)
        assert read.PixelData == bytes(range(256)) * 300 and read.SOPInstanceUID == instance(0)
    assert not limit or max(sizes[1:]) <= limit + 6
    assert all(size % 2 == 0 for size in sizes[1:]), "PS3.8 E.1"


def test_an_object_that_the_receiver_has_no_context_for_is_refused(tmp_path: Path) -> None:
    ae = AE(ae_title="PACS")
    ae.add_supported_context(Verification)
    ae.add_supported_context(SecondaryCaptureImageStorage, "1.2.840.10008.1.2.4.50")  # JPEG, which plain pixels are not
    server = ae.start_server((LOOPBACK, 0), block=False)
    try:
        where = parse_destination(f"dimse:PACS@{LOOPBACK}:{server.socket.getsockname()[1]}")
        sender = DimseSender(where, "AFIRE", None)
        [answer] = sender.send([capture(tmp_path / "sc.dcm")])
        sender.rest()
    finally:
        server.shutdown()
    assert answer.outcome is Outcome.REFUSED and "presentation context" in answer.reason


class Scripted(StoreAssociation):
    """An association with nobody: ``answer`` is what comes back."""

    def __init__(self, answer: bytes) -> None:
        with socket.create_server((LOOPBACK, 0)) as server:
            self._socket = socket.create_connection(server.getsockname(), timeout=0.2)
            self._peer, _ = server.accept()
        self._timeout = 0.2
        self._contexts, self._most, self._message = {(SecondaryCaptureImageStorage, ExplicitVRLittleEndian): 1}, 4096, 0
        self._peer.sendall(answer)


def message(kind: int, body: bytes) -> bytes:
    return bytes([kind, 0]) + len(body).to_bytes(4, "big") + body


def answer_to(number: int, status: int) -> bytes:
    """In two fragments of one message."""
    values = {0x0100: 0x8001, 0x0120: number, 0x0800: 0x0101, 0x0900: status}
    command = command_set({element: value.to_bytes(2, "little") for element, value in values.items()})
    halves = [(1, command[:20]), (3, command[20:])]
    return message(4, b"".join((len(half) + 2).to_bytes(4, "big") + bytes([1, bits]) + half for bits, half in halves))


def test_answers(tmp_path: Path) -> None:
    file = StoredObject.of(capture(tmp_path / "sc.dcm"))
    assert Scripted(answer_to(1, 0xA700)).store(file) == 0xA700
    for answer, reason in (
        (answer_to(2, 0), "something else"),
        (message(7, bytes(4)), "ended"),
        (message(4, bytes(6)) * 2, "no answer"),
        (b"", "no answer"),
        (bytes([4, 0, 255, 255, 255, 255]), "too long"),
    ):
        with pytest.raises(AssociationError, match=reason):
            Scripted(answer).store(file)
    broken = Scripted(b"")
    broken._peer.close()
    with pytest.raises(AssociationError, match=r"lost|hung up"):
        broken.store(file)


def drip(peer: socket.socket, words: bytes, seconds: float) -> threading.Thread:
    """Say ``words`` byte by byte, with pauses, until nobody listens."""

    def run() -> None:
        with suppress(OSError):
            for byte in words:
                peer.sendall(bytes([byte]))
                time.sleep(seconds)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_an_answer_byte_by_byte_is_none(tmp_path: Path) -> None:
    file, one = StoredObject.of(capture(tmp_path / "sc.dcm")), Scripted(b"")
    thread = drip(one._peer, answer_to(1, 0), 0.05)  # some hundred bytes: each in time, all together not
    with pytest.raises(AssociationError, match="no answer"):
        one.store(file)
    one.close()
    thread.join()


def test_negotiation_and_release_byte_by_byte_end_as_well() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        threads = []

        def serve() -> None:
            peer, _ = server.accept()
            threads.append(drip(peer, message(2, bytes(60)), 0.05))

        host = threading.Thread(target=serve)
        host.start()
        with pytest.raises(TimeoutError):
            StoreAssociation(*server.getsockname(), titles=("AFIRE", "PACS"), kinds=[], timeout=0.3)
        host.join()
    one = Scripted(b"")
    threads.append(drip(one._peer, message(6, bytes(60)), 0.05))
    begun = time.monotonic()
    one.release()
    assert time.monotonic() - begun < 1
    for thread in threads:
        thread.join()


def test_descriptors_of_any_number() -> None:
    """A service that holds many files and connections has them above 1023."""
    one = Scripted(b"")
    with one._socket as low:
        one._socket = socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, 1100))
    assert one.is_open()
    one._peer.sendall(b"!")
    wait_for(lambda: not one.is_open())
    one.close()

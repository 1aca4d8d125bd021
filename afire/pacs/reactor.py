"""The two threads of an association that receives films wait for data instead of polling.

pynetdicom gives each association a thread for the connection and one for messages. Both wake up a thousand times a
second to look for something to do, which takes as much CPU as the films. Here the first one waits until the peer has
sent something or the second one has an answer to send; the second one waits for a message.

A film arrives in some twenty fragments. The library decodes each of them, turns it into another object and passes it
through two queues and its state machine. Here fragments are appended to the film, after a file header that was written
first, so that the film is a DICOM file when the last fragment has arrived. Everything else is left to the library.

A thread that reads a message can do nothing else: timers and flags are looked at between messages. So a peer may
neither be silent within one for long nor announce one that takes more memory than there is. Whoever loses a connection
by a limit is reported once, with the reason.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from struct import pack, unpack
from typing import Any

from pydicom.uid import UID
from pynetdicom import PYNETDICOM_IMPLEMENTATION_UID, PYNETDICOM_IMPLEMENTATION_VERSION
from pynetdicom.dimse import DIMSEServiceProvider
from pynetdicom.dimse_messages import C_STORE_RQ
from pynetdicom.dimse_primitives import C_STORE
from pynetdicom.pdu_primitives import P_DATA
from pynetdicom.transport import AssociationSocket

from afire.pacs.association import (
    FRAGMENT,
    IS_COMMAND,
    IS_LAST,
    NO_DATA_SET,
    STORE_ANSWER,
    command_set,
    readable,
    uid_value,
)
from afire.pacs.mould import elements, file_head

_LONGEST_WAIT = 0.1  # seconds, after which timers and flags are looked at
_CHUNK = 1 << 18  # bytes: the library reads four thousand at a time, five hundred times for a film
_LONGEST_SILENCE = 60.0  # seconds within a message, or while the peer takes nothing of ours
_LARGEST_FRAGMENT = 1 << 21  # bytes: memory for it is taken before it is there
_LARGEST_MESSAGE = 4 * _LARGEST_FRAGMENT
_LARGEST_REQUEST = 1 << 20  # bytes of a message of who has not been let in
_LARGEST_FILM = 1 << 30  # bytes
_HEAD = 10  # bytes of a message before what it holds: type, length, length of its fragment
_STALLED = "stalled within a message"
_IN_TRANSFER, _CLOSED, _INVALID = "Sta6", "Evt17", "Evt19"  # the library's names of a state and events


CutOff = Callable[[Any, str], None]
"""Told the association of a peer that loses its connection by a limit of ours, and which one."""


def wait_for_news(event: Any, tell: CutOff) -> None:
    """For a connection that was just opened by a peer (`evt.EVT_CONN_OPEN`), before its threads begin."""
    association = event.assoc
    upper = association.dul
    plain = upper.socket.socket
    _limit_silence(plain)
    upper.event_queue.get_nowait()  # that there is a connection: the new socket says so again
    upper.socket = _WaitingSocket(association, plain, partial(tell, association))
    upper.to_provider_queue = _Announced(upper.socket.wake)
    upper._read_pdu_data = partial(_read_message, upper, upper._read_pdu_data)
    upper.receive_pdu = partial(_receive_request, association, upper.receive_pdu)
    upper.idle_timer_expired = partial(_is_silent, upper, upper.idle_timer_expired)
    association.dimse = _WaitingMessages(association)
    upper.to_user_queue = _Announced(association.dimse.wake)


def _limit_silence(plain: socket.socket) -> None:
    """Reads and writes that wait for too long raise an OSError. A time-out of Python's own would make each read wait,
    those that must not (``MSG_DONTWAIT``) as well; TLS, however, knows no other, and has no such reads."""
    if isinstance(plain, ssl.SSLSocket):
        plain.settimeout(_LONGEST_SILENCE)
        return
    seconds = int(_LONGEST_SILENCE)
    limit = pack("ll", seconds, int(1e6 * (_LONGEST_SILENCE - seconds)))  # the system's `timeval`
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def hang_up(association: Any) -> None:
    """End the connection of a peer that keeps another thread in a read or a write, which return at once."""
    plain = association.dul.socket.socket
    if plain is not None:
        with suppress(OSError):
            socket.socket.shutdown(plain, socket.SHUT_RDWR)  # TLS's own would take the connection from its reader


def let_go(event: Any) -> None:
    """For a connection that was closed (`evt.EVT_CONN_CLOSE`): a peer that closes it before any request, such as a port
    scan, must not occupy a slot until the library's time-out."""
    if event.assoc.requestor.primitive is None:
        event.assoc.dul.to_user_queue.put(None)  # which the library takes for a time-out


def _receive_request(association: Any, receive: Any, wait: bool = False, timeout: float | None = None) -> Any:
    """The next of the library's messages about an association; the library leaves a peer that sends no request in
    time without any event."""
    begun = time.monotonic()
    primitive = receive(wait, timeout)
    if wait and primitive is None and association.requestor.primitive is None:
        waited = timeout is not None and time.monotonic() - begun >= timeout
        if waited or association.dul.artim_timer.expired:
            association.dul.socket.cut_off("no request in time")
    return primitive


def _is_silent(upper: Any, has_expired: Any) -> bool:
    """Whether nothing has come for so long that the library aborts the association."""
    expired = bool(has_expired())
    if expired:
        upper.socket.cut_off(_STALLED if upper.assoc.dimse.message is not None else "silent for too long")
    return expired


def _read_message(upper: Any, read_any: Any) -> None:
    """Read commands and fragments of films while there are any; ``read_any``, the library's own, reads the rest."""
    try:
        is_for_library = _read_fragments(upper)
    except OSError as error:  # too long a silence, or the connection is lost
        upper.socket.note_stall(error)
        upper.event_queue.put(_CLOSED)
        return
    if is_for_library:
        read_any()


def _read_fragments(upper: Any) -> bool:
    """Whether there is a message that is none of these."""
    connection, messages = upper.socket, upper.assoc.dimse
    waits = True  # for the first: there is news
    while upper.state_machine.current_state == _IN_TRANSFER and upper.event_queue.empty() and not upper._kill_thread:
        head = connection.recv_head(waits)
        if head is None:
            return False
        kind, length, part = unpack(">BxII", head) if len(head) == _HEAD else (0, 0, 0)
        if kind != FRAGMENT or not 2 < part == length - 4 <= _LARGEST_FRAGMENT:
            connection.unread(head)
            break
        data = connection.recv_whole(part)
        if len(data) < part:
            connection.unread(head + data)
            break
        messages.add_fragment(data)
        waits = False
    return waits or connection.has_unread()


class _Announced(Queue[Any]):
    """A queue that calls ``tell`` whenever an item is put into it."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self._tell = tell

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self._tell()


class _WaitingSocket(AssociationSocket):  # type: ignore[misc]
    """Waits for data from the peer, or for :meth:`wake`, which says that there is something to send."""

    def __init__(self, association: Any, client_socket: socket.socket, tell: Callable[[str], None]) -> None:
        self._tell, self._is_cut_off = tell, False
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        self._unread = b""
        super().__init__(association, client_socket=client_socket)

    def wake(self) -> None:
        with suppress(OSError):  # its buffer is full, or the connection is closed
            self._bell.send(b"!")

    def cut_off(self, reason: str) -> None:
        """Report that the peer loses the connection; the first reason is the one that counts."""
        if not self._is_cut_off:
            self._is_cut_off = True
            self._tell(reason)

    def note_stall(self, error: OSError) -> None:
        """Report an error of reading if it is that nothing came in time, or that TLS failed."""
        if isinstance(error, BlockingIOError | TimeoutError):
            self.cut_off(_STALLED)
        elif isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):  # it has not just hung up
            # OpenSSL's name of the reason, such as PEER_DID_NOT_RETURN_A_CERTIFICATE: no text from the peer
            self.cut_off(f"TLS: {(error.reason or 'failed').replace('_', ' ').lower()}")

    @property
    def ready(self) -> bool:
        """Whether there is data to be read, now or soon."""
        if self.socket is None or not self._is_connected:
            return False
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return True
        seconds = _LONGEST_WAIT if self.event_queue.empty() else 0  # events in the queue come first, one by one
        try:
            found = readable([self.socket, self._ear], seconds)
        except (OSError, ValueError):
            self.event_queue.put(_CLOSED)
            return False
        if self._ear in found:
            with suppress(OSError):
                self._ear.recv(_CHUNK)
        return self.socket in found

    def recv(self, nr_bytes: int) -> bytearray:
        """``nr_bytes`` bytes; fewer if the peer has closed the connection. OSError if they are too many, or come too
        slowly: whoever has not been let in has to say all of it in time."""
        assert self.socket is not None
        is_let_in = self.assoc.dul.state_machine.current_state == _IN_TRANSFER
        if nr_bytes > (_LARGEST_MESSAGE if is_let_in else _LARGEST_REQUEST):
            self.cut_off("a message that is too long")
            raise OSError("a message that is too long")
        data = bytearray(self._unread[:nr_bytes])
        self._unread = self._unread[nr_bytes:]
        try:
            self._receive_rest(data, nr_bytes, None if is_let_in else time.monotonic() + _LONGEST_SILENCE)
        except OSError as error:  # which the library keeps to itself
            self.note_stall(error)
            raise
        return data

    def _receive_rest(self, data: bytearray, count: int, deadline: float | None) -> None:
        """Until there are ``count`` bytes, or the peer closes the connection."""
        assert self.socket is not None
        while len(data) < count:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
            part = self.socket.recv(min(_CHUNK, count - len(data)))
            if not part:
                return
            data += part

    def send(self, bytestream: bytes) -> None:
        """Send all of it, or say that the connection is closed, as the library's own does."""
        assert self.socket is not None
        try:
            self.socket.sendall(bytestream)
        except Exception as error:
            if isinstance(error, BlockingIOError | TimeoutError):
                self.cut_off("takes no answers")
            self.event_queue.put(_CLOSED)

    def recv_head(self, waits: bool) -> bytes | None:
        """The first bytes of a message, fewer if the peer has closed the connection; None if there is none yet."""
        assert self.socket is not None
        if isinstance(self.socket, ssl.SSLSocket):
            return bytes(self.recv(_HEAD)) if waits or self.socket.pending() else None
        try:
            head: bytes = self.socket.recv(_HEAD, 0 if waits else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        return head if len(head) in (0, _HEAD) else head + self.recv_whole(_HEAD - len(head))

    def recv_whole(self, count: int) -> bytes:
        """``count`` bytes, in one call if possible; fewer if the peer has closed the connection."""
        assert self.socket is not None
        if isinstance(self.socket, ssl.SSLSocket):
            return bytes(self.recv(count))
        data: bytes = self.socket.recv(count, socket.MSG_WAITALL)
        return data if len(data) == count else data + bytes(self.recv(count - len(data)))

    def unread(self, data: bytes) -> None:
        """Put bytes back, for the next :meth:`recv`."""
        self._unread = data

    def has_unread(self) -> bool:
        return bool(self._unread)

    def close(self) -> None:
        super().close()
        self._ear.close()
        self._bell.close()


class _WaitingMessages(DIMSEServiceProvider):  # type: ignore[misc]
    """Waits for a message, or for :meth:`wake` when the peer has closed the connection."""

    message: Any  # that is being received, or none

    def wake(self) -> None:
        self.msg_queue.put((None, None))  # what the library puts there when a connection ends

    def expects_film(self) -> bool:
        """Whether the next fragment is one of a film."""
        return isinstance(self.message, C_STORE_RQ)

    def _is_too_large(self, more: int) -> bool:
        """Whether ``more`` bytes make a message larger than a film may be: it is forgotten, the association aborted."""
        held = 0 if self.message is None else self.message.encoded_command_set.tell() + self.message.data_set.tell()
        if held + more <= _LARGEST_FILM:
            return False
        self.message = None
        self.dul.socket.cut_off("a film that is too large")
        self.dul.event_queue.put(_INVALID)
        return True

    def receive_primitive(self, primitive: Any) -> None:
        """Pass a message to the library; when a film is announced, write the header of its file."""
        if self._is_too_large(sum(len(data) for _, data in primitive.presentation_data_value_list)):
            return
        expected = self.expects_film()
        super().receive_primitive(primitive)
        if self.expects_film() and not expected:
            stream, fragments = self.message.data_set, self.message.data_set.getvalue()
            stream.seek(0)
            stream.write(self._file_head() + fragments)

    def add_fragment(self, data: bytes) -> None:
        """Context, bits and data of a fragment; the last one, or all of a command, is a message like any other."""
        if self.expects_film() and not data[1] & IS_COMMAND:
            if self._is_too_large(len(data)):
                return
            self.message.data_set.write(memoryview(data)[2:])
            if not data[1] & IS_LAST:
                return
            data = data[:2]  # what it held is in the film
        message = P_DATA()
        message.presentation_data_value_list = [[data[0], data[1:]]]
        self.receive_primitive(message)

    def _file_head(self) -> bytes:
        command, contexts = self.message.command_set, self.assoc._accepted_cx
        context = contexts.get(self.message.context_id)  # a film in one that was not accepted ends the association
        return file_head(
            elements(
                FileMetaInformationVersion=("OB", b"\0\1"),
                MediaStorageSOPClassUID=("UI", str(command.get("AffectedSOPClassUID") or "").encode()),
                MediaStorageSOPInstanceUID=("UI", str(command.get("AffectedSOPInstanceUID") or "").encode()),
                TransferSyntaxUID=("UI", (context.transfer_syntax[0] if context else UID("")).encode()),
                ImplementationClassUID=("UI", PYNETDICOM_IMPLEMENTATION_UID.encode()),
                ImplementationVersionName=("SH", PYNETDICOM_IMPLEMENTATION_VERSION.encode()),
            )
        )

    def send_msg(self, primitive: Any, context_id: int) -> None:
        """Send answers about films from this thread, because the peer waits for them; they are a few numbers and ids.
        The library sends everything else, and all of TLS, whose connections two threads must not use at once."""
        if not isinstance(primitive, C_STORE) or primitive.MessageIDBeingRespondedTo is None:
            super().send_msg(primitive, context_id)
            return
        data = bytes([IS_COMMAND | IS_LAST]) + _store_answer(primitive)
        connection = self.dul.socket
        if isinstance(connection.socket, ssl.SSLSocket):
            answer = P_DATA()
            answer.presentation_data_value_list = [[context_id, data]]
            self.dul.send_pdu(answer)
        elif connection.socket is not None and self.dul.state_machine.current_state == _IN_TRANSFER:
            connection.send(pack(">BxIIB", FRAGMENT, len(data) + 5, len(data) + 1, context_id) + data)

    def get_msg(self, block: bool = False) -> Any:
        """The next message, after a short wait; none if the peer is closing the connection."""
        try:
            return self.msg_queue.get(timeout=self.dimse_timeout if block else _LONGEST_WAIT)
        except Empty:
            return None, None


def _store_answer(answer: C_STORE) -> bytes:
    """The command set of a C-STORE response."""
    return command_set({
        0x0002: uid_value(answer.AffectedSOPClassUID),
        0x0100: pack("<H", STORE_ANSWER),
        0x0120: pack("<H", answer.MessageIDBeingRespondedTo),
        0x0800: pack("<H", NO_DATA_SET),
        0x0900: pack("<H", answer.Status),
        0x1000: uid_value(answer.AffectedSOPInstanceUID),
    })  # fmt: skip

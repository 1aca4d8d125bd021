"""An association that stores objects (C-STORE), on a plain blocking socket and in the thread that calls it.

pynetdicom needs two polling threads for this, and decodes and encodes each object. An object then took 100 ms: 40 ms
because Nagle's algorithm held back the data until the receiver had confirmed the command, and 40 ms because our side
delayed its confirmation of the first half of the answer. Here command and data are sent together, as the bytes of the
file, and TCP confirmations are sent at once. The library still builds and reads the messages of the negotiation.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import pack, unpack, unpack_from

import pydicom
from pydicom.uid import UID, ExplicitVRLittleEndian, ImplicitVRLittleEndian
from pynetdicom import PYNETDICOM_IMPLEMENTATION_UID, PYNETDICOM_IMPLEMENTATION_VERSION, build_context
from pynetdicom._globals import APPLICATION_CONTEXT_NAME
from pynetdicom.dsutils import encode, split_dataset
from pynetdicom.pdu import A_ABORT_RQ, A_ASSOCIATE_AC, A_ASSOCIATE_RQ, A_RELEASE_RQ
from pynetdicom.pdu_primitives import (
    A_ASSOCIATE,
    ImplementationClassUIDNotification,
    ImplementationVersionNameNotification,
    MaximumLengthNotification,
)
from pynetdicom.presentation import PresentationContext
from pynetdicom.transport import AddressInformation

FRAGMENT, IS_COMMAND, IS_LAST = 0x04, 1, 2  # type of a P-DATA message, and bits of the byte before its data
NO_DATA_SET, STORE_REQUEST, STORE_ANSWER = 0x0101, 0x0001, 0x8001
_ACCEPTED, _RELEASED = 0x02, 0x06  # types of messages
_HAS_DATA_SET, _MEDIUM = 0x0001, 0x0000
_COMMAND_FIELD, _ANSWERED_MESSAGE, _STATUS = 0x0100, 0x0120, 0x0900
_LARGEST_PDU = 1 << 20  # bytes, if the receiver sets no limit
_LARGEST_ANSWER = 1 << 16  # bytes: a few numbers and ids
_PIECE = 1 << 20  # bytes that leave in one call, each within the time-out
_QUICK = getattr(socket, "TCP_QUICKACK", None)  # Linux
_PLAIN = (ExplicitVRLittleEndian, ImplicitVRLittleEndian)


class AssociationError(Exception):
    """The receiver has ended the association, does not answer, or answers something else."""


class NoContextError(Exception):
    """The receiver does not take this kind of object, nor can it be converted to one that it takes."""


@dataclass(frozen=True)
class StoredObject:
    """A DICOM file: what it is, and where its data set begins."""

    path: Path
    kind: UID
    instance: UID
    syntax: UID
    start: int

    @classmethod
    def of(cls, path: Path) -> StoredObject:
        meta, start = split_dataset(path)
        return cls(path, meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID, meta.TransferSyntaxUID, start)

    def data(self, syntax: UID) -> bytes:
        """The data set in ``syntax``: its own, or another one without compression."""
        if syntax == self.syntax:
            return self.path.read_bytes()[self.start :]
        dataset = pydicom.dcmread(self.path)
        try:
            if self.syntax.is_compressed:
                dataset.decompress(generate_instance_uid=False)
            encoded: bytes | None = encode(dataset, syntax.is_implicit_VR, syntax.is_little_endian)
        except Exception:  # of a library; its message may quote a tag
            encoded = None
        if encoded is None:
            raise NoContextError("it cannot be converted to what the receiver takes")
        return encoded


class StoreAssociation:
    """Open until :meth:`release` or :meth:`close`. One thread at a time may use it.

    Raises OSError if there is no connection, and :class:`AssociationError` if the receiver does not accept us.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        titles: tuple[str, str],  # ours, the receiver's
        kinds: Sequence[tuple[UID, UID]],  # class and transfer syntax
        timeout: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._timeout = timeout
        self._socket: socket.socket = socket.create_connection((host, port), timeout)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=host)
            self._contexts, self._most = self._negotiate(titles, kinds)
        except BaseException:
            self._socket.close()
            raise
        self._message = 0

    def _negotiate(
        self, titles: tuple[str, str], kinds: Sequence[tuple[UID, UID]]
    ) -> tuple[dict[tuple[UID, UID], int], int]:
        """Class and syntax -> number of each accepted context; bytes of a fragment at most."""
        contexts = [build_context(kind, syntax) for kind, syntax in kinds]
        for number, context in enumerate(contexts):
            context.context_id = 2 * number + 1
        request = A_ASSOCIATE_RQ()
        request.from_primitive(self._request(titles, contexts))
        self._send(request.encode())
        message_type, body = self._receive(self._deadline())
        if message_type != _ACCEPTED:
            raise AssociationError("not accepted")
        accepted = A_ASSOCIATE_AC()
        try:
            accepted.decode(pack(">BxI", message_type, len(body)) + body)
            answer = accepted.to_primitive()
            results = {result.context_id: result for result in answer.presentation_context_definition_results_list}
            most = int(answer.maximum_length_received or 0)
        except Exception as error:  # the library raises many kinds
            raise AssociationError("an answer that cannot be decoded") from error
        numbers = {
            kind: context.context_id
            for kind, context in zip(kinds, contexts, strict=True)
            if context.context_id in results and results[context.context_id].result == 0
        }
        return numbers, max(2, (min(most or _LARGEST_PDU, _LARGEST_PDU) - 6) & ~1)  # PS3.8 E.1: even

    def _request(self, titles: tuple[str, str], contexts: list[PresentationContext]) -> A_ASSOCIATE:
        size, maker, version = (
            MaximumLengthNotification(),
            ImplementationClassUIDNotification(),
            ImplementationVersionNameNotification(),
        )
        size.maximum_length_received = _LARGEST_ANSWER
        maker.implementation_class_uid = PYNETDICOM_IMPLEMENTATION_UID
        version.implementation_version_name = PYNETDICOM_IMPLEMENTATION_VERSION
        request = A_ASSOCIATE()
        request.application_context_name = UID(APPLICATION_CONTEXT_NAME)
        request.calling_ae_title, request.called_ae_title = titles
        request.calling_presentation_address = AddressInformation.from_tuple(self._socket.getsockname())
        request.called_presentation_address = AddressInformation.from_tuple(self._socket.getpeername())
        request.presentation_context_definition_list = contexts
        request.user_information = [size, maker, version]
        return request

    def is_open(self) -> bool:
        """Whether nothing has arrived since the last answer: it could only be the end of the association."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return False
        return not readable([self._socket], 0)

    def store(self, file: StoredObject) -> int:
        """Send an object and wait for the receiver's status. OSError is about the file."""
        syntax = next((syntax for syntax in (file.syntax, *_PLAIN) if (file.kind, syntax) in self._contexts), None)
        if syntax is None:
            raise NoContextError("no presentation context for this kind of object")
        data, number = file.data(syntax), self._contexts[file.kind, syntax]
        self._message = self._message % 0xFFFF + 1
        command = command_set({
            0x0002: uid_value(file.kind),
            _COMMAND_FIELD: pack("<H", STORE_REQUEST),
            0x0110: pack("<H", self._message),
            0x0700: pack("<H", _MEDIUM),
            0x0800: pack("<H", _HAS_DATA_SET),
            0x1000: uid_value(file.instance),
        })  # fmt: skip
        message = memoryview(
            b"".join([*_fragments(number, command, IS_COMMAND, self._most), *_fragments(number, data, 0, self._most)])
        )
        try:
            for start in range(0, len(message), _PIECE):
                self._send(message[start : start + _PIECE])
            return self._status()
        except TimeoutError:
            raise AssociationError("no answer") from None
        except OSError:
            raise AssociationError("the association was lost") from None

    def _status(self) -> int:
        """Of the answer to the message that was sent last."""
        answer, is_complete, deadline = b"", False, self._deadline()
        while not is_complete:
            message_type, body = self._receive(deadline)
            if message_type != FRAGMENT:
                raise AssociationError("the receiver ended it")
            for bits, data in _fragments_in(body):
                answer += data
                if len(answer) > _LARGEST_ANSWER:
                    raise AssociationError("an answer that is too long")
                is_complete = is_complete or bool(bits & IS_LAST)
        values = _values(answer)
        if values.get(_COMMAND_FIELD) != STORE_ANSWER or values.get(_ANSWERED_MESSAGE) != self._message:
            raise AssociationError("an answer to something else")
        status = values.get(_STATUS)
        if status is None:
            raise AssociationError("an answer without a status")
        return status

    def release(self) -> None:
        """End it in an orderly way, if the receiver is still there."""
        try:
            self._send(A_RELEASE_RQ().encode())
            message_type, _ = self._receive(self._deadline())
            if message_type != _RELEASED:
                self._send(_abort())
        except (OSError, AssociationError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection at once."""
        self._socket.close()

    def _send(self, data: bytes | memoryview) -> None:
        self._socket.settimeout(self._timeout)  # what was received last may have left less
        self._socket.sendall(data)

    def _deadline(self) -> float:
        """Of a whole answer: one that comes byte by byte is none."""
        return time.monotonic() + self._timeout

    def _receive(self, deadline: float) -> tuple[int, bytes]:
        """Type and contents of the next message."""
        message_type, length = unpack(">BxI", self._receive_bytes(6, deadline))
        if length > _LARGEST_ANSWER:
            raise AssociationError("an answer that is too long")
        return message_type, self._receive_bytes(length, deadline)

    def _receive_bytes(self, count: int, deadline: float) -> bytes:
        data = b""
        while len(data) < count:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError
            self._socket.settimeout(seconds)
            if _QUICK is not None:  # the system resets it: set before each call
                self._socket.setsockopt(socket.IPPROTO_TCP, _QUICK, 1)
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise AssociationError("the receiver hung up")
            data += piece
        return data


def readable(sockets: Sequence[socket.socket], seconds: float) -> list[socket.socket]:
    """Those of which something, or their end, can be read, after ``seconds`` at most. Unlike `select.select` this takes
    descriptors above 1023, which a service with many connections and files has."""
    poll, numbers = select.poll(), {one.fileno(): one for one in sockets}
    for number in numbers:
        poll.register(number, select.POLLIN)
    found = poll.poll(1000 * seconds)
    if any(events & select.POLLNVAL for _, events in found):  # closed since
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return [numbers[number] for number, _ in found]


def _abort() -> bytes:
    message = A_ABORT_RQ()
    message.source, message.reason_diagnostic = 0, 0
    encoded: bytes = message.encode()
    return encoded


def _fragments(context: int, data: bytes, bits: int, most: int) -> list[bytes]:
    """The messages that carry a command or a data set, with at most ``most`` bytes of it each."""
    view, messages = memoryview(data), []
    for start in range(0, max(1, len(data)), most):
        piece = view[start : start + most]
        last = IS_LAST if start + most >= len(data) else 0
        messages += [pack(">BxIIBB", FRAGMENT, len(piece) + 6, len(piece) + 2, context, bits | last), bytes(piece)]
    return messages


def _fragments_in(body: bytes) -> list[tuple[int, bytes]]:
    """Bits and data of each fragment in a message."""
    pieces, at = [], 0
    while at + 6 <= len(body):
        length = unpack_from(">I", body, at)[0]
        pieces.append((body[at + 5], body[at + 6 : at + 4 + length]))
        at += 4 + length
    return pieces


def command_set(values: dict[int, bytes]) -> bytes:
    """Elements of group 0000 by number: little endian without VRs, as all commands are."""
    body = b"".join(_command(element, value) for element, value in values.items())
    return _command(0x0000, pack("<I", len(body))) + body


def _command(element: int, value: bytes) -> bytes:
    return pack("<HHI", 0, element, len(value)) + value


def _values(command: bytes) -> dict[int, int]:
    """The numbers of two bytes in a command set, by element."""
    values, at = {}, 0
    while at + 8 <= len(command):
        _, element, length = unpack_from("<HHI", command, at)
        if length == 2 and at + 10 <= len(command):
            values[element] = int(unpack_from("<H", command, at + 8)[0])
        at += 8 + length
    return values


def uid_value(uid: UID | None) -> bytes:
    """An id as a value of even length."""
    text = str(uid or "").encode("ascii")
    return text + bytes(len(text) % 2)

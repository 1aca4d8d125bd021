"""The two threads of an association wait for news, instead of looking for it a thousand times a second.

pynetdicom gives each association a thread for the connection and one for messages, and both sleep a millisecond, look,
and sleep again. While films come in that takes as much time as the films. Here the first waits until the peer has sent
something or the second has an answer for it, the second until there is a message. Everything else is the library's own.
"""

from __future__ import annotations

import select
import socket
import ssl
from contextlib import suppress
from queue import Empty, Queue
from typing import Any

from pynetdicom.dimse import DIMSEServiceProvider
from pynetdicom.transport import AssociationSocket

_LONGEST_WAIT = 0.1  # seconds, after which timers and flags are looked at
_CHUNK = 1 << 18  # bytes: the library reads four thousand at a time, five hundred times for a film


def wait_for_news(event: Any) -> None:
    """For a connection that was just opened by a peer (`evt.EVT_CONN_OPEN`), before its threads begin."""
    association = event.assoc
    upper = association.dul
    plain = upper.socket.socket
    upper.event_queue.get_nowait()  # that there is a connection: the new socket says so again
    upper.socket = _WaitingSocket(association, client_socket=plain)
    upper.to_provider_queue = _Announced(upper.socket.wake)
    association.dimse = _WaitingMessages(association)
    upper.to_user_queue = _Announced(association.dimse.wake)


class _Announced(Queue[Any]):
    """A queue that calls ``tell`` when something is put into it."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self._tell = tell

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self._tell()


class _WaitingSocket(AssociationSocket):  # type: ignore[misc]
    """Waits for the peer, or to be woken because there is something to send."""

    def __init__(self, association: Any, client_socket: socket.socket) -> None:
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        super().__init__(association, client_socket=client_socket)

    def wake(self) -> None:
        with suppress(OSError):  # it has rung often enough, or the connection is closed
            self._bell.send(b"!")

    @property
    def ready(self) -> bool:
        """Whether there is data to be read, now or soon."""
        if self.socket is None or not self._is_connected:
            return False
        if isinstance(self.socket, ssl.SSLSocket) and self.socket.pending():
            return True
        seconds = _LONGEST_WAIT if self.event_queue.empty() else 0  # what is known is acted upon first, one by one
        try:
            found, _, _ = select.select([self.socket, self._ear], [], [], seconds)
        except (OSError, ValueError):
            self.event_queue.put("Evt17")  # the connection is closed
            return False
        if self._ear in found:
            with suppress(OSError):
                self._ear.recv(_CHUNK)
        return self.socket in found

    def recv(self, nr_bytes: int) -> bytearray:
        """So many bytes; fewer if the peer has hung up."""
        assert self.socket is not None
        data = bytearray()
        while len(data) < nr_bytes:
            part = self.socket.recv(min(_CHUNK, nr_bytes - len(data)))
            if not part:
                break
            data += part
        return data

    def close(self) -> None:
        super().close()
        self._ear.close()
        self._bell.close()


class _WaitingMessages(DIMSEServiceProvider):  # type: ignore[misc]
    """Waits for a message, or to be woken because the peer has hung up."""

    def wake(self) -> None:
        self.msg_queue.put((None, None))  # what the library puts there when a connection ends

    def get_msg(self, block: bool = False) -> Any:
        """The next message, now or soon; nothing if the peer wants to end."""
        try:
            return self.msg_queue.get(timeout=self.dimse_timeout if block else _LONGEST_WAIT)
        except Empty:
            return None, None

"""Results go out: stored by DICOMweb (STOW-RS) or DIMSE (C-STORE), at least once, with a back-off of our own.

An object is forgotten when its receiver has said that it is stored. What is sent twice has the same id twice, which is
one object. What can pass (no connection, a full disk, a wrong password) is tried again, ever more rarely; what the
receiver refuses goes to ``failed``.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import pydicom
import requests
from dicomweb_client.web import DICOMwebClient
from pydicom.dataset import Dataset
from pydicom.uid import (
    ComprehensiveSRStorage,
    ExplicitVRLittleEndian,
    GrayscaleSoftcopyPresentationStateStorage,
    ImplicitVRLittleEndian,
    SecondaryCaptureImageStorage,
    SegmentationStorage,
)
from pynetdicom import AE, _config

from afire.data.film import quiet_readers
from afire.pacs.addresses import Destination
from afire.pacs.journal import Journal
from afire.pacs.secrecy import Credentials
from afire.pacs.spool import ResultName, Spool

_CLASSES = (
    SecondaryCaptureImageStorage, ComprehensiveSRStorage, SegmentationStorage,
    GrayscaleSoftcopyPresentationStateStorage,
)  # fmt: skip
_TIMEOUT = 30.0
_IDLE_SECONDS = 0.5
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0
_ONE_REQUEST = 2**31  # bytes: never in chunks, of which some servers forget the first
# Of the receiver's answers these are about the data; all others may be different tomorrow.
_REFUSALS = (
    HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE, HTTPStatus.UNPROCESSABLE_ENTITY,
)  # fmt: skip
_DUPLICATE = 0x0111
_MAY_PASS = {0x0110, 0x0124, *range(0xA700, 0xA800)}  # processing failure, not authorised, out of resources


class Outcome(Enum):
    """What became of an object that was sent."""

    STORED = "stored"
    LATER = "later"
    REFUSED = "refused"


@dataclass(frozen=True)
class Answer:
    """What became of an object, and the receiver's reason as a code, which quotes nothing."""

    outcome: Outcome
    reason: str = ""


class Sender(Protocol):
    """A way to a receiver."""

    def send(self, path: Path) -> Answer:
        """Send the DICOM file at ``path``."""

    def rest(self) -> None:
        """There is nothing to send for now."""


def open_sender(destination: Destination, title: str, credentials: Credentials) -> Sender:
    """The way to ``destination`` for the application entity ``title``."""
    if destination.protocol == "dicomweb":
        return WebSender(destination.url, credentials)
    return DimseSender(destination, title, credentials.context() if destination.tls else None)


class WebSender:
    """DICOMweb: one request for each object."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        session = requests.Session()
        session.trust_env = False  # no proxy and no password from somewhere else
        session.verify = str(credentials.ca) if credentials.ca else True
        if credentials.user:
            session.auth = (credentials.user, credentials.password)
        self._client = DICOMwebClient(url, session=session, chunk_size=_ONE_REQUEST, timeout=_TIMEOUT)
        self._client.set_http_retry_params(retry=False)  # it would wait inside, unseen

    def send(self, path: Path) -> Answer:
        made = pydicom.dcmread(path)
        try:
            stored = self._client.store_instances([made])
        except requests.HTTPError as error:
            status = error.response.status_code
            return Answer(Outcome.REFUSED if status in _REFUSALS else Outcome.LATER, f"HTTP {status}")
        except requests.RequestException as error:
            return Answer(Outcome.LATER, type(error).__name__)
        failed = stored.get("FailedSOPSequence")
        return _answer_to(int(failed[0].get("FailureReason", 0xC000))) if failed else Answer(Outcome.STORED)

    def rest(self) -> None:
        pass


class DimseSender:
    """C-STORE: one association for as long as there is something to send."""

    def __init__(self, destination: Destination, title: str, tls: ssl.SSLContext | None) -> None:
        _config.LOG_HANDLER_LEVEL = "none"
        self._destination, self._tls = destination, tls
        self._ae = AE(ae_title=title)
        self._ae.network_timeout = self._ae.dimse_timeout = self._ae.acse_timeout = _TIMEOUT
        self._ae.connection_timeout = _TIMEOUT
        for kind in _CLASSES:
            self._ae.add_requested_context(kind, [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
        self._association: Any = None

    def send(self, path: Path) -> Answer:
        association = self._associate()
        if association is None:
            return Answer(Outcome.LATER, "no association")
        made = pydicom.dcmread(path)
        if not any(context.abstract_syntax == made.SOPClassUID for context in association.accepted_contexts):
            return Answer(Outcome.REFUSED, "no presentation context for this kind of object")
        try:
            status: Dataset = association.send_c_store(made)
        except (RuntimeError, ValueError):  # the association was lost meanwhile, or the syntax is not accepted
            self._association = None
            return Answer(Outcome.LATER, "the association was lost")
        if "Status" not in status:
            self._association = None
            return Answer(Outcome.LATER, "no answer")
        return _answer_to(int(status.Status))

    def rest(self) -> None:
        if self._association is not None and self._association.is_established:
            self._association.release()
        self._association = None

    def _associate(self) -> Any:
        if self._association is None or not self._association.is_established:
            where = self._destination
            tls = (self._tls, where.host) if self._tls is not None else None
            self._association = self._ae.associate(where.host, where.port, ae_title=where.title, tls_args=tls)
        return self._association if self._association.is_established else None


def _answer_to(status: int) -> Answer:
    """What a DIMSE status, or STOW's failure reason, says."""
    if status in (0x0000, _DUPLICATE) or 0xB000 <= status < 0xC000:
        return Answer(Outcome.STORED)
    return Answer(Outcome.LATER if status in _MAY_PASS else Outcome.REFUSED, f"status 0x{status:04X}")


class Courier:
    """Takes results from the spool to their receiver until it is told to stop."""

    def __init__(self, spool: Spool, sender: Sender, journal: Journal, first_wait: float = _FIRST_WAIT) -> None:
        self._spool, self._sender, self._journal = spool, sender, journal
        self._first_wait, self._failures = first_wait, 0

    def run(self, stop: Event) -> None:
        """Send what there is, and wait for more."""
        while not stop.is_set():
            result = self._spool.next_result(_IDLE_SECONDS)
            if result is None:
                self._sender.rest()
            elif not self._deliver(result):
                self._spool.send_later(result)
                self._sender.rest()
                stop.wait(self._wait())
        self._sender.rest()

    def _deliver(self, result: ResultName) -> bool:
        """Whether nothing of these results is left to send; counts failures in a row otherwise."""
        for kind, path in self._spool.objects(result).items():
            with quiet_readers():
                answer = self._sender.send(path)
            if answer.outcome is Outcome.LATER:
                self._failures += 1
                self._journal.note("not sent", result.name.film, kind=kind, reason=answer.reason)
                return False
            self._failures = 0
            if answer.outcome is Outcome.REFUSED:
                self._spool.fail_result(result, f"{kind}: {answer.reason}")
                return True
            self._spool.acknowledge(result, kind)
        return True

    def _wait(self) -> float:
        """Seconds until the next attempt: twice as long each time, up to a limit."""
        return float(min(_LONGEST_WAIT, self._first_wait * 2 ** min(self._failures - 1, 20)))

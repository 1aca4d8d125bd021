"""Results are sent: by DICOMweb (STOW-RS) or DIMSE (C-STORE), at least once, with our own back-off.

An object is removed when its receiver has confirmed that it is stored. An object that is sent twice has the same id
both times, so it is one object. Temporary errors (no connection, a full disk, a wrong password) are retried at growing
intervals; objects that the receiver refuses go to ``failed``.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from threading import Event
from typing import Any, Protocol

import requests
from dicomweb_client.web import DICOMwebClient
from pydicom.dataset import Dataset
from pydicom.uid import (
    ComprehensiveSRStorage,
    ExplicitVRLittleEndian,
    GrayscaleSoftcopyPresentationStateStorage,
    ImplicitVRLittleEndian,
    JPEGBaseline8Bit,
    SecondaryCaptureImageStorage,
    SegmentationStorage,
)
from requests.adapters import HTTPAdapter

from afire.data.film import quiet_readers
from afire.pacs.association import AssociationError, NoContextError, StoreAssociation, StoredObject
from afire.pacs.connections import Credentials, Destination
from afire.pacs.journal import Journal
from afire.pacs.spool import ResultName, Spool

_CLASSES = (
    SecondaryCaptureImageStorage, ComprehensiveSRStorage, SegmentationStorage,
    GrayscaleSoftcopyPresentationStateStorage,
)  # fmt: skip
# Each with its own context, so that a receiver accepts the syntax of our files beside the one that it prefers.
_KINDS = [(kind, syntax) for kind in _CLASSES for syntax in (ExplicitVRLittleEndian, ImplicitVRLittleEndian)]
_KINDS.append((SecondaryCaptureImageStorage, JPEGBaseline8Bit))
_TIMEOUT = 30.0
_IDLE_SECONDS = 0.5
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0
_TOGETHER = 8  # films whose results are sent in one go
_ONE_REQUEST = 2**31  # bytes: never in chunks, because some servers lose the first one
# These answers are about the data and final; all others are retried.
_REFUSALS = (
    HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE, HTTPStatus.UNPROCESSABLE_ENTITY,
)  # fmt: skip
_DUPLICATE = 0x0111
# Processing failure, not authorised, resource limitation, out of resources.
_MAY_PASS = {0x0110, 0x0124, 0x0213, *range(0xA700, 0xA800)}


class Outcome(Enum):
    """What became of an object that was sent."""

    STORED = "stored"
    LATER = "later"
    REFUSED = "refused"


@dataclass(frozen=True)
class Answer:
    """What became of an object, and the receiver's reason as a code, without any text from it."""

    outcome: Outcome
    reason: str = ""


class Sender(Protocol):
    """A way to a receiver."""

    sends_together: bool  # whether several objects are one message; else each is acknowledged before the next is sent

    def send(self, paths: Sequence[Path]) -> list[Answer]:
        """Send DICOM files: an answer for each, in order. After a temporary error the rest need not be tried."""

    def rest(self) -> None:
        """There is nothing to send for now."""


def open_sender(destination: Destination, title: str, credentials: Credentials) -> Sender:
    """A sender to ``destination`` for the application entity ``title``."""
    if destination.protocol == "dicomweb":
        return WebSender(destination.url, credentials)
    return DimseSender(destination, title, credentials.context() if destination.tls else None)


class _FileClient(DICOMwebClient):  # type: ignore[misc]
    """Stores files unchanged: the client itself would parse and write each of them again."""

    def store_files(self, files: Sequence[bytes]) -> Dataset:
        stored: Dataset = self._http_post_multipart_application_dicom(f"{self.base_url}/studies", files)
        return stored


class _Adapter(HTTPAdapter):  # type: ignore[misc]
    """Presents our certificate, whose key may need a password, and sends piece by piece: the time-out is of a call, and
    a whole request that takes longer on a slow line would fail each time."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        super().__init__()

    def init_poolmanager(self, *words: Any, **named: Any) -> None:
        super().init_poolmanager(*words, **named, ssl_context=self._context)

    def send(self, request: requests.PreparedRequest, *words: Any, **named: Any) -> requests.Response:
        if isinstance(request.body, bytes):
            request.body = BytesIO(request.body)  # type: ignore[assignment]  # read in pieces; its length is stated
        return super().send(request, *words, **named)


class WebSender:
    """DICOMweb: one request for all objects that are sent together."""

    sends_together = True

    def __init__(self, url: str, credentials: Credentials) -> None:
        session = requests.Session()
        session.trust_env = False  # no proxy and no password from the environment
        # To the stated address alone. Elsewhere it may be plain, and a POST that is redirected becomes a GET, whose
        # answer says nothing about what was sent.
        session.max_redirects = 0
        session.verify = str(credentials.ca) if credentials.ca else True
        session.headers["Accept"] = "application/dicom+json"
        if credentials.user:
            session.auth = (credentials.user, credentials.password)
        is_tls = url.startswith("https:")
        session.mount("https://" if is_tls else "http://", _Adapter(credentials.context() if is_tls else None))
        self._client = _FileClient(url, session=session, chunk_size=_ONE_REQUEST, timeout=_TIMEOUT)
        self._client.set_http_retry_params(retry=False)  # the courier retries

    def send(self, paths: Sequence[Path]) -> list[Answer]:
        together = self._store(paths)
        if len(paths) == 1 or together.outcome is not Outcome.REFUSED:
            return [together] * len(paths)
        return _one_by_one(paths, lambda path: self._store([path]))  # to find the refused one

    def _store(self, paths: Sequence[Path]) -> Answer:
        """All, or the reason why not all."""
        files = [path.read_bytes() for path in paths]
        try:
            stored = self._client.store_files(files)
            reasons = [int(one.get("FailureReason", 0xC000)) for one in stored.get("FailedSOPSequence") or []]
        except requests.HTTPError as error:
            status = error.response.status_code
            return Answer(Outcome.REFUSED if status in _REFUSALS else Outcome.LATER, f"HTTP {status}")
        except Exception as error:  # no connection, or an answer that cannot be read, for which libraries raise many
            return Answer(Outcome.LATER, type(error).__name__)
        failed = [_answer_to(reason) for reason in reasons]
        weights = [Outcome.STORED, Outcome.LATER, Outcome.REFUSED]
        return max(failed, key=lambda answer: weights.index(answer.outcome), default=Answer(Outcome.STORED))

    def rest(self) -> None:
        pass


class DimseSender:
    """C-STORE: one association for as long as there is something to send."""

    sends_together = False

    def __init__(self, destination: Destination, title: str, tls: ssl.SSLContext | None) -> None:
        self._destination, self._title, self._tls = destination, title, tls
        self._association: StoreAssociation | None = None

    def send(self, paths: Sequence[Path]) -> list[Answer]:
        return _one_by_one(paths, self._store)

    def _store(self, path: Path) -> Answer:
        try:
            association = self._associate()
        except (OSError, AssociationError):
            return Answer(Outcome.LATER, "no association")
        try:
            return _answer_to(association.store(StoredObject.of(path)))
        except NoContextError as error:
            return Answer(Outcome.REFUSED, str(error))
        except AssociationError as error:  # it may have been stored: it is sent again under the same id
            self._drop()
            return Answer(Outcome.LATER, str(error))

    def rest(self) -> None:
        if self._association is not None:
            self._association.release()
        self._association = None

    def _associate(self) -> StoreAssociation:
        if self._association is not None and not self._association.is_open():
            self._drop()
        if self._association is None:
            where = self._destination
            self._association = StoreAssociation(
                where.host, where.port, titles=(self._title, where.title), kinds=_KINDS, timeout=_TIMEOUT, tls=self._tls
            )
        return self._association

    def _drop(self) -> None:
        if self._association is not None:
            self._association.close()
        self._association = None


def _one_by_one(paths: Sequence[Path], store: Callable[[Path], Answer]) -> list[Answer]:
    """An answer for each. After a temporary error the rest is not tried: each may wait for the time-out."""
    answers: list[Answer] = []
    for path in paths:
        answers.append(store(path))
        if answers[-1].outcome is Outcome.LATER:
            break
    return answers + [answers[-1]] * (len(paths) - len(answers))


def _answer_to(status: int) -> Answer:
    """What a DIMSE status, or a failure reason of STOW, means."""
    if status in (0x0000, _DUPLICATE) or 0xB000 <= status < 0xC000:
        return Answer(Outcome.STORED)
    return Answer(Outcome.LATER if status in _MAY_PASS else Outcome.REFUSED, f"status 0x{status:04X}")


class Courier:
    """Sends the results in the spool to their receiver until it is stopped.

    After a failure the results of one film are tried, and go to the end of the queue if they fail again, until some
    were sent: one that fails each time must not hold up those that it is sent with.
    """

    def __init__(self, spool: Spool, sender: Sender, journal: Journal, first_wait: float = _FIRST_WAIT) -> None:
        self._spool, self._sender, self._journal = spool, sender, journal
        self._first_wait, self._failures = first_wait, 0

    def run(self, stop: Event) -> None:
        """Send waiting results, and wait for more."""
        while not stop.is_set():
            results = self._spool.next_results(1 if self._failures else _TOGETHER, _IDLE_SECONDS)
            left = self._try(results)
            if left:
                self._spool.send_later(left)
            if left or not results:
                self._sender.rest()
            if left:
                stop.wait(self._wait())
        self._sender.rest()

    def _try(self, results: Sequence[ResultName]) -> list[ResultName]:
        """Deliver what can be; whatever happens, the thread goes on: without it nothing would be sent any more."""
        try:
            return self._deliver(results)
        except OSError as error:  # a full disk: deliveries cannot be recorded now
            self._journal.note("waiting for the disk", reason=error.strerror or type(error).__name__)
        except Exception as error:  # its message may quote a tag
            self._journal.note("sending failed", reason=type(error).__name__)
        self._failures += 1
        return list(results)

    def _deliver(self, results: Sequence[ResultName]) -> list[ResultName]:
        """Send the objects of several films together; the results of which something is left to send. Counts failures
        in a row."""
        objects = []
        for result in results:
            waiting = self._spool.objects(result)
            objects += [(result, kind, path) for kind, path in waiting.items()]
            if not waiting:  # all delivered, and not yet recorded
                self._spool.acknowledge(result, ())
        if not objects:
            return []
        left: list[ResultName] = []
        for group in [objects] if self._sender.sends_together else [[one] for one in objects]:
            here = [one for one in group if one[2].exists()]  # unless moved to failed with another object of its film
            if left:  # the receiver is away
                left += [result for result, _, _ in here if result not in left]
            elif here:
                left = self._send(here)
        self._failures = self._failures + 1 if left else 0
        return left

    def _send(self, objects: Sequence[tuple[ResultName, str, Path]]) -> list[ResultName]:
        """The results of which something is left to send."""
        with quiet_readers():
            answers = self._sender.send([path for _, _, path in objects])
        told: dict[ResultName, dict[str, Answer]] = {}
        for (result, kind, _), answer in zip(objects, answers, strict=True):
            told.setdefault(result, {})[kind] = answer
        return [result for result, kinds in told.items() if not self._settle(result, kinds)]

    def _settle(self, result: ResultName, answers: Mapping[str, Answer]) -> bool:
        """Record the receiver's answers; returns whether nothing of these results is left to send."""
        refused = [f"{kind}: {answer.reason}" for kind, answer in answers.items() if answer.outcome is Outcome.REFUSED]
        stored = [kind for kind, answer in answers.items() if answer.outcome is Outcome.STORED]
        if stored:
            self._spool.acknowledge(result, stored)
        if refused:
            self._spool.fail_result(result, "; ".join(refused))
            return True
        for kind, answer in answers.items():
            if answer.outcome is Outcome.LATER:
                self._journal.note("not sent", result.name.film, kind=kind, reason=answer.reason)
        return len(stored) == len(answers)

    def _wait(self) -> float:
        """Seconds until the next attempt: twice as long each time, up to a limit."""
        return float(min(_LONGEST_WAIT, self._first_wait * 2 ** min(self._failures - 1, 20)))

"""Films are received: a DICOM storage provider that answers *stored* only when a power cut could not undo it.

Callers are identified by title and address. There are presentation contexts for films only. Other objects that use them
(a screenshot, a result of our own) are acknowledged and dropped, so that the sender's job goes on.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from shutil import disk_usage
from typing import Any

from pydicom.dataset import Dataset
from pydicom.pixels import get_decoder, pixel_array
from pydicom.uid import (
    JPEG2000,
    UID,
    ComputedRadiographyImageStorage,
    DigitalXRayImageStorageForPresentation,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLossless,
    JPEGLosslessSV1,
    JPEGLSLossless,
    JPEGLSNearLossless,
    RLELossless,
    SecondaryCaptureImageStorage,
)
from pynetdicom import AE, _config, evt
from pynetdicom.sop_class import Verification
from pynetdicom.transport import AssociationServer

from afire.data.decode import MAX_PIXELS, MODALITIES
from afire.data.dicom import parse_film
from afire.data.film import quiet_readers
from afire.errors import UserError
from afire.pacs.connections import Caller, plain_address
from afire.pacs.journal import Journal, Keyed
from afire.pacs.reactor import hang_up, let_go, wait_for_news
from afire.pacs.source import MAKER, MAKER_MODEL
from afire.pacs.source import TAGS as SOURCE_TAGS
from afire.pacs.spool import FilmName, Spool
from afire.pacs.sync import ParsedFilm

STORED, OUT_OF_RESOURCES, MISMATCH, NOT_UNDERSTOOD = 0x0000, 0xA700, 0xA900, 0xC000
FILM_CLASSES = (
    ComputedRadiographyImageStorage, DigitalXRayImageStorageForPresentation, SecondaryCaptureImageStorage,
)  # fmt: skip
_CAPTURED_FILMS = ("CR", "DX", "DR", "RG", "XR")  # modalities of captures that are films
_NATIVE = (ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian)
_COMPRESSED = (
    JPEGBaseline8Bit, JPEGExtended12Bit, JPEGLossless, JPEGLosslessSV1, JPEGLSLossless, JPEGLSNearLossless,
    JPEG2000Lossless, JPEG2000, RLELossless,
)  # fmt: skip
_TAGS = [*SOURCE_TAGS, "Manufacturer", "ManufacturerModelName"]  # beside those of which a film is made
_MOST_ASSOCIATIONS = 64
# Of these, for addresses that no caller has: enough to answer one that was set up wrongly with the reason, and so few
# that whoever opens connections and says nothing cannot take the places of the callers.
_MOST_STRANGERS = 8
_PDU_BYTES = 1 << 20  # of a message: each takes its time, and senders choose the size up to this
_TIMEOUT = 60.0  # of a peer that says nothing
_SECONDS_TO_PART = 1.0  # for a peer that is told that we end
_REJECT = {"called title": (0x01, 0x01, 0x07), "caller": (0x01, 0x01, 0x03)}


@dataclass(frozen=True)
class ReceiveSettings:
    """Where to listen, and to whom."""

    title: str
    host: str
    port: int
    callers: Sequence[Caller]
    min_free: int  # bytes that must stay free on the disk of the spool
    tls: ssl.SSLContext | None = None


class _Server(AssociationServer):  # type: ignore[misc]
    """Lets in connections while there are places for them. Each begins in the thread that accepts them, and not in one
    of its own, so that the next one finds it counted."""

    request_queue_size = _MOST_ASSOCIATIONS  # with the library's five, a burst waits for seconds to be accepted
    has_place: Callable[[str], bool] = staticmethod(lambda _: True)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self.has_place(client_address[0])


class _Provider(AE):  # type: ignore[misc]
    def make_server(self, *words: Any, **named: Any) -> Any:
        return super().make_server(*words, **{**named, "server_class": _Server})


class Receiver:
    """The storage provider; it listens from :meth:`start` to :meth:`stop`."""

    def __init__(self, settings: ReceiveSettings, spool: Spool, keyed: Keyed, journal: Journal) -> None:
        self._settings, self._spool, self._keyed, self._journal = settings, spool, keyed, journal
        self._server: Any = None
        self._ae = _Provider(ae_title=settings.title)
        self._ae.maximum_associations = _MOST_ASSOCIATIONS
        self._ae.maximum_pdu_size = _PDU_BYTES
        self._ae.network_timeout = self._ae.dimse_timeout = self._ae.acse_timeout = _TIMEOUT
        self._ae.add_supported_context(Verification)
        for film_class in FILM_CLASSES:
            self._ae.add_supported_context(film_class, readable_syntaxes())

    def start(self) -> int:
        """Listen; returns the port, which was chosen by the system if 0 was asked for."""
        _config.LOG_HANDLER_LEVEL = "none"  # its handlers format every message, for a log that is silenced
        handlers = [
            (evt.EVT_CONN_OPEN, wait_for_news, [self._on_cut_off]),
            (evt.EVT_CONN_CLOSE, let_go),
            (evt.EVT_REQUESTED, self._on_requested),
            (evt.EVT_C_STORE, self._on_store),
        ]
        address = (self._settings.host, self._settings.port)
        try:
            self._server = self._ae.start_server(
                address, block=False, ssl_context=self._settings.tls, evt_handlers=handlers
            )
        except OSError as error:
            raise UserError(
                f"cannot listen on {address[0]} port {address[1]} ({error.strerror}); choose another --port or --bind."
            ) from None
        self._server.has_place = self._has_place
        return int(self._server.socket.getsockname()[1])

    def stop(self, seconds: float) -> None:
        """Accept no more callers; connected ones have ``seconds`` to finish."""
        if self._server is None:
            return
        self._server.shutdown()
        open_ones = _alive_after(self._server.active_associations, seconds)
        told = [association for association in open_ones if association.is_established]
        for association in told:
            association.abort(block=False)  # which takes until the message that is being read is complete
        _alive_after(told, _SECONDS_TO_PART)
        for association in _alive_after(open_ones, 0):
            hang_up(association)
        _alive_after(open_ones, _SECONDS_TO_PART)
        self._server = None

    def has_room(self, size: int = 0) -> bool:
        """Whether the disk takes ``size`` bytes more without falling below what must stay free."""
        return disk_usage(self._spool.root).free - size >= self._settings.min_free

    def _has_place(self, host: str) -> bool:
        """Whether a connection from ``host`` is let in; what it asks for is looked at later."""
        if not self._is_stranger(host):
            return True
        others = sum(self._is_stranger(one.requestor.address) for one in self._server.active_associations)
        if others < _MOST_STRANGERS:
            return True
        self._journal.note("rejected", caller=plain_address(host), reason="too many connections of unknown addresses")
        return False

    def _is_stranger(self, host: str) -> bool:
        address = plain_address(host)
        return not any(address in caller.addresses for caller in self._settings.callers)

    def _on_cut_off(self, association: Any, reason: str) -> None:
        self._journal.note("cut off", caller=_name(association), reason=reason)

    def _on_requested(self, event: Any) -> None:
        """Refuse strangers before anything is negotiated."""
        requestor = event.assoc.requestor
        called, calling = (str(title).strip() for title in (
            requestor.primitive.called_ae_title, requestor.primitive.calling_ae_title
        ))  # fmt: skip
        address = plain_address(requestor.address)
        reason = ""
        if called != self._settings.title:
            reason = "called title"
        elif not any(calling == caller.title and address in caller.addresses for caller in self._settings.callers):
            reason = "caller"
        if reason:
            self._journal.note("rejected", caller=_name(event.assoc), reason=f"unknown {reason}")
            event.assoc.acse.send_reject(*_REJECT[reason])
            event.assoc.kill()

    def _on_store(self, event: Any) -> int:
        caller = _name(event.assoc)
        try:
            with quiet_readers():
                data = event.request.DataSet.getvalue()  # a whole file: the reactor puts the header before the data set
                return self._store(data, str(event.request.AffectedSOPInstanceUID), caller)
        except OSError as error:  # a full disk, above all
            self._journal.note("turned away", caller=caller, reason=error.strerror or type(error).__name__)
            return OUT_OF_RESOURCES
        except Exception as error:  # of a library, about this data set; its message may quote a tag
            self._journal.note("not understood", caller=caller, reason=type(error).__name__)
            return NOT_UNDERSTOOD

    def _store(self, data: bytes, instance: str, caller: str) -> int:
        if not self.has_room(len(data)):
            self._journal.note("turned away", caller=caller, reason="less free space than --min-free")
            return OUT_OF_RESOURCES
        tags = parse_film(data, _TAGS)
        if str(tags.get("SOPInstanceUID") or "") != instance or not instance:
            self._journal.note("not understood", caller=caller, reason="its id is not the one it was announced with")
            return MISMATCH
        film = self._keyed("film", instance)
        if not_wanted := _why_not(tags):
            self._journal.note("ignored", film, caller=caller, reason=not_wanted)
            return STORED
        name = FilmName(film, self._keyed("pixels", *_pixels(tags)))
        self._spool.receive(name, data, ParsedFilm(tags, len(data)))
        return STORED


def _name(association: Any) -> str:
    """Who called, for the audit log: title and address, or the address alone where nothing was asked for yet."""
    address, request = plain_address(association.requestor.address), association.requestor.primitive
    return f"{str(request.calling_ae_title).strip()}@{address}" if request is not None else address


def _alive_after(associations: Sequence[Any], seconds: float) -> list[Any]:
    """Those that have not ended within ``seconds``."""
    deadline = time.monotonic() + seconds
    for association in associations:
        association.join(max(0.0, deadline - time.monotonic()))
    return [association for association in associations if association.is_alive()]


def _why_not(tags: Dataset) -> str:
    """Why something is no film to be scored, or nothing."""
    if tags.get("Manufacturer") == MAKER and tags.get("ManufacturerModelName") == MAKER_MODEL:
        return "a result of ours"
    allowed = _CAPTURED_FILMS if tags.get("SOPClassUID") == SecondaryCaptureImageStorage else MODALITIES
    return "" if str(tags.get("Modality") or "") in allowed else "not a film, by its modality"


def _pixels(tags: Dataset) -> tuple[str, bytes]:
    """What a film shows, however it was compressed on its way: what makes it the same film or another."""
    photometric = str(tags.get("PhotometricInterpretation") or "")
    rows, columns, samples = (int(tags.get(name) or 0) for name in ("Rows", "Columns", "SamplesPerPixel"))
    about = f"{rows} x {columns} x {samples}, {photometric}"
    stored = bytes(tags.get("PixelData") or b"")
    syntax = UID(tags.file_meta.TransferSyntaxUID)
    if syntax in (ExplicitVRLittleEndian, ImplicitVRLittleEndian):
        return about, stored[: rows * columns * samples * int(tags.get("BitsAllocated") or 0) // 8]
    try:
        frames = max(1, int(tags.get("NumberOfFrames") or 1))
        if rows * columns * frames > MAX_PIXELS:  # a small file may hold many of the same black frame
            return about, stored
        decoded = pixel_array(tags, raw=True)
        return about, decoded.astype(decoded.dtype.newbyteorder("<")).tobytes()
    except Exception:  # damaged: it will be refused by name when it is read
        return about, stored


def readable_syntaxes() -> list[UID]:
    """The transfer syntaxes whose pixels can be decoded here; a sender that knows others has to convert."""
    return [*_NATIVE, *(syntax for syntax in _COMPRESSED if _is_readable(syntax))]


def _is_readable(syntax: UID) -> bool:
    decoder = get_decoder(syntax)
    plugins = set(decoder.available_plugins)
    return bool(plugins - {"pillow"} if syntax == JPEGExtended12Bit else plugins)  # pillow has 8 bits of it only

"""Who may call, where to listen and send, TLS and passwords: options of `afire serve`, checked before it starts."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from afire.errors import UserError
from afire.files import require_file

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_TITLE = re.compile(r"[ -\[\]-~]{1,16}")  # printable ASCII without a backslash


@dataclass(frozen=True)
class Caller:
    """An application entity that may send films, and the addresses it may send them from."""

    title: str
    addresses: frozenset[str]


@dataclass(frozen=True)
class Destination:
    """Where results go."""

    protocol: Literal["dicomweb", "dimse"]
    host: str
    port: int
    tls: bool
    title: str = ""  # of the receiver, with DIMSE
    url: str = ""  # with DICOMweb

    @property
    def words(self) -> str:
        """For a log: neither has a place for a password."""
        return self.url or f"{self.title}@{self.host}:{self.port}"


def parse_title(text: str, option: str) -> str:
    """An application entity's title."""
    title = text.strip()
    if not _TITLE.fullmatch(title):
        raise UserError(
            f"{option} {text!r} is not an AE title: 1 to 16 printable ASCII characters without a backslash."
        )
    return title


def parse_caller(text: str) -> Caller:
    """``ORTHANC@127.0.0.1``"""
    title, at, host = text.rpartition("@")
    if not at or not host:
        raise UserError(f"--allow {text!r} does not name an AE title and a host, such as ORTHANC@127.0.0.1.")
    return Caller(parse_title(title, "--allow"), _addresses(_unbracketed(host), "--allow"))


def parse_destination(text: str) -> Destination:
    """``dicomweb:URL``, ``dimse:AET@HOST:PORT`` or ``dimse+tls:AET@HOST:PORT``"""
    protocol, _, rest = text.partition(":")
    if protocol == "dicomweb":
        return _web(text, rest)
    title, at, where = rest.rpartition("@")
    host, _, port = where.rpartition(":")
    if protocol not in ("dimse", "dimse+tls") or not at or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--send {text!r} is neither dicomweb:URL nor dimse:AET@HOST:PORT nor dimse+tls:AET@HOST:PORT.")
    return Destination(
        "dimse", _unbracketed(host), int(port), tls=protocol == "dimse+tls", title=parse_title(title, "--send")
    )


def _web(text: str, url: str) -> Destination:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--send {text!r} does not name an http or https address after dicomweb:.")
    if parts.username or parts.password:
        raise UserError("--send has a password in its address; give it by --send-user and --send-password-file.")
    tls = parts.scheme == "https"
    return Destination("dicomweb", parts.hostname, parts.port or (443 if tls else 80), tls, url=url.rstrip("/"))


def parse_size(text: str) -> int:
    """``5GB`` -> bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B?)\s*", text.upper())
    unit = (found[2] if found[2] in _UNITS else f"{found[2]}B") if found else ""
    if found is None or unit not in _UNITS:
        raise UserError(f"--min-free {text!r} is not a size such as 5GB or 500MB.")
    return int(float(found[1]) * _UNITS[unit])


def is_loopback(host: str, option: str) -> bool:
    """Whether nobody outside of this machine can be at the other end."""
    return all(ipaddress.ip_address(address).is_loopback for address in _addresses(host, option))


def _addresses(host: str, option: str) -> frozenset[str]:
    """The addresses of a host, by name or number."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        raise UserError(f"{option}: there is no host {host!r}; give its name or its address.") from None
    return frozenset(plain_address(str(entry[4][0])) for entry in found)


def plain_address(address: str) -> str:
    """An address in one spelling, without a zone; an IPv4 address that was mapped to IPv6 as itself."""
    number = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(number, "ipv4_mapped", None)
    return str(mapped or number)


def _unbracketed(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")


@dataclass(frozen=True)
class Certificate:
    """Who we are: a certificate and its key, PEM files."""

    file: Path
    key: Path
    password: str = ""

    def load_into(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.file, self.key, self.password)
        except (ssl.SSLError, OSError):
            raise UserError(
                f"{self.file} and {self.key} are not a certificate and its key, or need a password."
            ) from None


@dataclass(frozen=True)
class Credentials:
    """How the receiver of results knows us, and how we know it."""

    user: str = ""
    password: str = ""
    ca: Path | None = None  # certificates that vouch for the receiver; those of the system without
    certificate: Certificate | None = None

    def context(self) -> ssl.SSLContext:
        """For a connection to the receiver."""
        context = ssl.create_default_context(cafile=_readable_ca(self.ca, "--send-ca"))
        if self.certificate is not None:
            self.certificate.load_into(context)
        return context


def certificate_of(file: Path | None, key: Path | None, password: str, options: str = "--tls") -> Certificate | None:
    """Certificate and key as the options ``--tls-cert`` and ``--tls-key`` give them, or others that begin alike."""
    if file is None and key is None:
        return None
    if file is None or key is None:
        raise UserError(f"{options}-cert and {options}-key belong together; give both or neither.")
    return Certificate(require_file(file, f"{options}-cert"), require_file(key, f"{options}-key"), password)


class _PatientContext(ssl.SSLContext):
    """Leaves the handshake to the first read, which is in the caller's own thread: all callers are accepted by one
    thread, and one that connects and says nothing must not stop it."""

    def wrap_socket(self, *words: Any, **named: Any) -> ssl.SSLSocket:
        return super().wrap_socket(*words, **{**named, "do_handshake_on_connect": False})


def server_context(certificate: Certificate | None, ca: Path | None) -> ssl.SSLContext | None:
    """For callers; with ``ca`` they must show a certificate that it vouches for. None is a plain connection."""
    if certificate is None:
        if ca is not None:
            raise UserError("--tls-ca is about callers that use TLS; give --tls-cert and --tls-key too.")
        return None
    context = _PatientContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    certificate.load_into(context)
    if ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(_readable_ca(ca, "--tls-ca"))
    return context


def _readable_ca(ca: Path | None, option: str) -> str | None:
    if ca is None:
        return None
    try:
        ssl.create_default_context(cafile=str(require_file(ca, option)))
    except ssl.SSLError:
        raise UserError(f"{option} {ca} holds no certificates (PEM).") from None
    return str(ca)


def require_secure(host: str, option: str, *, is_tls: bool) -> None:
    """Refuse a plain connection that leaves this machine."""
    if not is_tls and not is_loopback(host, option):
        raise UserError(
            f"{option} {host} is beyond this machine and without TLS: films and results name patients. Use TLS, or add "
            "--insecure if the network between is private."
        )


def read_password(file: Path | None, variable: str) -> str:
    """A password from a file or the environment; never from the command line, where everybody can read it."""
    if file is None:
        return os.environ.get(variable, "")
    return require_file(file, "the password file").read_text(encoding="utf-8").rstrip("\r\n")

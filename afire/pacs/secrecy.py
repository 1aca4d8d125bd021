"""Connections that nobody reads: TLS contexts, passwords, and no plain connection beyond this machine by accident."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from afire.errors import UserError
from afire.files import require_file
from afire.pacs.addresses import is_loopback


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


def server_context(certificate: Certificate | None, ca: Path | None) -> ssl.SSLContext | None:
    """For callers; with ``ca`` they must show a certificate that it vouches for. None is a plain connection."""
    if certificate is None:
        if ca is not None:
            raise UserError("--tls-ca is about callers that use TLS; give --tls-cert and --tls-key too.")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
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

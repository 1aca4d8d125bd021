"""Connections by TLS, in and out: who shows no certificate, or one that nobody vouches for, gets and gives nothing."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pynetdicom")
pytest.importorskip("dicomweb_client")

from afire.errors import UserError
from afire.pacs.connections import Certificate, Credentials, parse_destination, server_context
from afire.pacs.send import Outcome, open_sender
from tests.pacs.films import dataset, film
from tests.pacs.peers import LOOPBACK, Pacs, StartService, store, wait_for
from tests.pacs.test_send import Web

PASSWORD = "s3cret"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificate")
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", *words.split(), "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    return Certificate(folder / "cert.pem", folder / "key.pem")


@pytest.fixture(scope="module")
def locked(certificate: Certificate) -> Certificate:
    """The same with a key that needs a password."""
    key = certificate.key.with_name("locked.pem")
    words = ["openssl", "rsa", "-aes256", "-passout", f"pass:{PASSWORD}", "-in", str(certificate.key), "-out", str(key)]
    subprocess.run(words, check=True, capture_output=True)
    return Certificate(certificate.file, key, PASSWORD)


@pytest.fixture
def guarded(certificate: Certificate) -> ssl.SSLContext:
    """Of a receiver that wants to see a certificate."""
    context = server_context(certificate, certificate.file)
    assert context is not None
    return context


def test_films_by_tls_from_known_certificates_only(
    start_service: StartService, pacs: Pacs, certificate: Certificate, guarded: ssl.SSLContext
) -> None:
    service = start_service(tls=guarded)
    known = Credentials(ca=certificate.file, certificate=certificate).context()
    stranger = Credentials(ca=certificate.file).context()
    assert store(service.port, dataset(0)) == [-1], "plain"
    assert store(service.port, dataset(0), tls_args=(stranger, LOOPBACK)) == [-1], "no certificate"
    assert store(service.port, dataset(0), tls_args=(known, LOOPBACK)) == [0]
    wait_for(lambda: len(pacs.kept) == 2)


@pytest.fixture
def peers(guarded: ssl.SSLContext) -> Iterator[tuple[Pacs, Web]]:
    """Receivers of results that take them by TLS alone."""
    pacs, web = Pacs(guarded).start(), Web(guarded)
    yield pacs, web
    pacs.stop()
    web.close()


@pytest.mark.parametrize("protocol", ["dimse", "dicomweb"])
def test_results_by_tls_to_a_known_receiver_that_knows_us(
    peers: tuple[Pacs, Web], protocol: str, certificate: Certificate, locked: Certificate, tmp_path: Path
) -> None:
    pacs, web = peers
    where = f"dimse+tls:PACS@{LOOPBACK}:{pacs.port}" if protocol == "dimse" else f"dicomweb:{web.url}"
    sent = film(tmp_path / "film.dcm", SOPClassUID="1.2.840.10008.5.1.4.1.1.7")

    def outcome(credentials: Credentials) -> Outcome:
        sender = open_sender(parse_destination(where), "AFIRE", credentials)
        try:
            return sender.send([sent])[0].outcome
        finally:
            sender.rest()

    assert outcome(Credentials(ca=certificate.file, certificate=certificate)) is Outcome.STORED
    assert outcome(Credentials(ca=certificate.file, certificate=locked)) is Outcome.STORED, "its key needs a password"
    assert outcome(Credentials(certificate=certificate)) is Outcome.LATER, "nobody vouches for the receiver"
    assert outcome(Credentials(ca=certificate.file)) is Outcome.LATER, "the receiver does not know us"
    assert len(pacs.kept) + len(web.requests) == 2


def test_a_wrong_password_or_file_is_one_message(locked: Certificate, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="or need a password"):
        Credentials(certificate=Certificate(locked.file, locked.key, "wrong")).context()
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(UserError, match="--send-ca"):
        Credentials(ca=tmp_path / "ca.pem").context()

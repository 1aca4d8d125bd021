"""`afire serve` as users start it: one message for a mistake, SIGTERM ends it with 143 after what waits is done."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from afire import pacs as pacs_room
from afire.cli import app
from afire.errors import UserError

pytest.importorskip("pynetdicom")

from tests.commands import run, start
from tests.detect.conftest import model  # noqa: F401 - fixture
from tests.pacs.films import dataset
from tests.pacs.orthanc import free_port
from tests.pacs.peers import LOOPBACK, Pacs, pacs, store  # noqa: F401 - fixture
from tests.pacs.test_service import expected
from tests.tasks.conftest import films, packed  # noqa: F401 - fixtures


def test_a_service_until_sigterm(model: Path, pacs: Pacs, tmp_path: Path) -> None:  # noqa: F811
    port, spool = free_port(), tmp_path / "spool"
    command = start(
        "serve", "--model", model, "--spool", spool, "--allow", f"SENDER@{LOOPBACK}", "--port", port,
        "--send", f"dimse:PACS@{LOOPBACK}:{pacs.port}", "--min-free", "1MB", "--device", "cpu",
    )  # fmt: skip
    audit = spool / "audit.jsonl"
    command.wait_until(lambda: audit.exists() and "started" in audit.read_text())
    assert store(port, dataset(0)) == [0]
    second = run(
        "serve", "--model", model, "--spool", spool, "--allow", f"SENDER@{LOOPBACK}", "--port", free_port(),
        "--send", f"dimse:PACS@{LOOPBACK}:{pacs.port}", expect=2,
    )  # fmt: skip
    assert "another process" in " ".join(second.stderr.split())
    command.send(signal.SIGTERM)
    ended = command.end(60)
    assert ended.code == 143 and "Traceback" not in ended.stderr
    assert set(pacs.ids()) == expected(model, [0]), "drained"
    assert "listening as AFIRE" in ended.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bind", "0.0.0.0"], "--insecure"),
        (["--health-bind", "0.0.0.0"], "--insecure"),
        (["--send", "dicomweb:http://192.0.2.1/dicom-web"], "--insecure"),
        (["--send", "nowhere"], "dicomweb:URL"),
        (["--allow", "ORTHANC"], "AE title and a host"),
        (["--objects", "pm"], "sc, sr, seg, gsps"),
        (["--min-free", "plenty"], "such as 5GB"),
        (["--tls-cert", "cert.pem"], "belong together"),
        (["--send-key", "key.pem"], "--send-cert and --send-key belong together"),
        (["--send-ca", "nowhere.pem", "--send", "dimse+tls:B@127.0.0.1:104"], "--send-ca nowhere.pem does not exist"),
        (["--aet", "much too long for a title"], "--aet"),
    ],
)
def test_mistakes(tmp_path: Path, words: list[str], message: str) -> None:
    defaults = {"--allow": "A@127.0.0.1", "--send": "dimse:B@127.0.0.1:104"}
    given = {**defaults, **dict(zip(words[::2], words[1::2], strict=True))}
    options = [word for pair in given.items() for word in pair]
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(
            app,
            ["serve", "--model", str(tmp_path), "--spool", str(tmp_path / "spool"), *options],
            catch_exceptions=False,
        )
    assert not (tmp_path / "spool").exists()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacs_room, "find_spec", lambda name: None if name == "pynetdicom" else object())
    with pytest.raises(UserError, match=r'afire serve needs pynetdicom; run pip install "afire\[pacs\]"'):
        pacs_room.require_packages("afire serve")

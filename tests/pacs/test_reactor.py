"""Associations that wait: nobody looks for news over and over, and no news is kept waiting."""

from __future__ import annotations

import select
import socket
import threading
import time
from typing import Any

import pytest

pytest.importorskip("pynetdicom")

from pynetdicom import AE
from pynetdicom.sop_class import Verification

from afire.pacs import reactor
from tests.pacs.films import dataset
from tests.pacs.peers import LOOPBACK, StartService, store, wait_for


def associations() -> int:
    """Threads of films' senders."""
    return sum(thread.name.startswith("AcceptorThread") for thread in threading.enumerate())


def test_nobody_looks_while_nothing_comes(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, real = [], select.select

    def counted(*words: Any) -> Any:
        looks.append(words[3])
        return real(*words)

    service = start_service()
    ae = AE(ae_title="SENDER")
    ae.add_requested_context(Verification)
    one = ae.associate(LOOPBACK, service.port, ae_title="AFIRE")
    assert one.send_c_echo().Status == 0
    monkeypatch.setattr(select, "select", counted)
    try:
        time.sleep(0.5)
    finally:
        monkeypatch.undo()
        one.release()
    assert len([seconds for seconds in looks if seconds == reactor._LONGEST_WAIT]) <= 10  # not some hundred


def test_news_wakes_who_waits(start_service: StartService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if nobody would ever look up by himself."""
    monkeypatch.setattr(reactor, "_LONGEST_WAIT", 300.0)
    service = start_service()
    assert store(service.port, dataset(0), dataset(1)) == [0, 0]
    wait_for(lambda: associations() == 0, 20)


def test_who_hangs_up_or_talks_nonsense_leaves_no_thread(start_service: StartService) -> None:
    service = start_service()
    for words in (b"", b"\x09\x00\x00\x00\x00\x04what", b"\x01\x00\xff\xff\xff\xffa request without an end"):
        with socket.create_connection((LOOPBACK, service.port)) as other:
            other.sendall(words)
    wait_for(lambda: associations() == 0)
    assert store(service.port, dataset(0)) == [0]

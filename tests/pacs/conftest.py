"""A detector, a service and its peers. Tests of what needs the packages of `afire[pacs]` are skipped without them."""

from __future__ import annotations

import socketserver
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.detect.conftest import detector, films, model, packed
from tests.pacs.libraries import libraries_talk_again

__all__ = ["detector", "films", "libraries_talk_again", "model", "packed"]

if all(find_spec(name) for name in ("pynetdicom", "highdicom", "dicomweb_client")):
    from tests.pacs.peers import pacs, start_service

    __all__ += ["pacs", "start_service"]


@pytest.fixture(scope="session", autouse=True)
def _servers_end_at_once() -> Iterator[None]:
    """A server looks whether it shall end twice a second, and each test here ends two of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.02,))
        yield

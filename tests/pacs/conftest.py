"""A detector, a service and its peers. Tests of what needs the packages of `afire[pacs]` are skipped without them."""

from __future__ import annotations

from importlib.util import find_spec

from tests.detect.conftest import detector, films, model, packed
from tests.pacs.libraries import libraries_talk_again

__all__ = ["detector", "films", "libraries_talk_again", "model", "packed"]

if all(find_spec(name) for name in ("pynetdicom", "highdicom", "dicomweb_client")):
    from tests.pacs.peers import pacs, start_service

    __all__ += ["pacs", "start_service"]

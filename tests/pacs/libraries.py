"""A service silences libraries for its whole process, which is that of other tests too: afterwards they talk again."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from afire.pacs import TALKATIVE


@pytest.fixture(autouse=True)
def libraries_talk_again() -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in TALKATIVE}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)

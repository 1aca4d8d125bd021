"""Small sets with the layout and the headers of the public ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

Touch = Callable[..., None]


@pytest.fixture
def touch() -> Touch:
    """Make empty films: builders look at names, never at pixels."""

    def make(root: Path, *films: str | Iterable[str]) -> None:
        for film in films:
            for path in [film] if isinstance(film, str) else film:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(b"")

    return make

"""kill -9 of the service after each step, against a PACS that pynetdicom plays: nothing lost, nothing doubled."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pynetdicom")


from tests.pacs.drill import STEPS, FilmSender, die_after_each_step, lives
from tests.pacs.peers import LOOPBACK, Pacs, wait_for
from tests.pacs.test_service import expected, identifying


@pytest.mark.slow
def test_killed_after_each_step(pacs: Pacs, model: Path, tmp_path: Path) -> None:
    spool, send = tmp_path / "spool", f"dimse:PACS@{LOOPBACK}:{pacs.port}"
    films = FilmSender(range(20))
    die_after_each_step(spool, send, model, films)
    with lives(spool, send, model) as (_, port):
        assert port is not None
        films.send_at_once(port, 8)
        wait_for(lambda: set(pacs.ids()) == expected(model, range(20)), 60)
        wait_for(lambda: not any(any((spool / state).iterdir()) for state in ("incoming", "scored", "outgoing")))
    assert len(pacs.kept) <= 40 + len(STEPS), "sent twice is only what was under way when it was killed"
    assert identifying(spool) == []
    assert not any((spool / "failed").iterdir()) and not any((spool / "quarantine").iterdir())

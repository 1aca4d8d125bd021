"""Films are parsed once, when they come; whatever is in memory, the file decides after a restart, and the first
delivery before any other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("pynetdicom")

from pydicom.dataset import Dataset

from afire.pacs.spool import FilmName, Spool
from afire.pacs.sync import FreshFilms, ParsedFilm
from tests.pacs.films import dataset
from tests.pacs.peers import Pacs, StartService, store, wait_for


def texts(pacs: Pacs) -> list[bytes]:
    """What was sent, but for when it was made."""
    for made in pacs.kept:
        for name in ("ContentDate", "ContentTime", "DateOfSecondaryCapture", "TimeOfSecondaryCapture"):
            made.pop(name, None)
    return sorted(made.to_json().encode() for made in pacs.kept)


def test_a_film_is_scored_without_being_read_again(
    start_service: StartService, pacs: Pacs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, voi: str) -> None:
        raise AssertionError("it was parsed when it came")

    service = start_service()
    with monkeypatch.context() as patch:
        patch.setattr("afire.pacs.score.read_film", read)
        assert store(service.port, dataset(0)) == [0]
        wait_for(lambda: len(pacs.kept) == 2 and not service.spool.has_work())
    service.stop()
    from_memory = texts(pacs)
    pacs.kept.clear()
    for record in (service.spool.root / "done").rglob("*.json"):
        record.unlink()
    monkeypatch.setattr("afire.pacs.spool.FreshFilms", lambda: FreshFilms(0))
    again = start_service()
    assert store(again.port, dataset(0)) == [0]
    wait_for(lambda: len(pacs.kept) == 2 and not again.spool.has_work())
    assert texts(pacs) == from_memory, "the file says the same"


def test_a_second_delivery_does_not_change_the_first(
    start_service: StartService, pacs: Pacs, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    claim = Spool.claim

    def later(self: Spool, most: int, share: int, seconds: float) -> list[FilmName]:
        return claim(self, most, share, seconds) if go_on.wait(seconds) else []

    monkeypatch.setattr(Spool, "claim", later)
    service = start_service()
    assert store(service.port, dataset(0), dataset(0, StudyID="another")) == [0, 0]
    go_on.set()
    wait_for(lambda: len(pacs.kept) == 2 and not service.spool.has_work())
    assert {made.StudyID for made in pacs.kept} == {"1"}


def film(size: int) -> ParsedFilm:
    return ParsedFilm(Dataset(), size)


def test_memory_is_bounded() -> None:
    kept = FreshFilms(100)
    names = ["a", "b", "c", "d"]
    for name in names[:3]:
        kept.keep(name, film(40))
    assert not kept.has_room(40) and kept.has_room(20)
    assert [kept.take(name) is not None for name in names] == [True, True, False, False]
    assert kept.has_room(100) and kept.take(names[0]) is None

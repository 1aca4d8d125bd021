"""The spool at its weakest: cut off between any two steps, it loses nothing, repeats nothing and keeps no name."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from afire.pacs.spool import FilmName, Receipt, ResultName, Spool
from afire.pacs.sync import SharedSync

RECIPE = "aa11"
FILMS = {FilmName("0a0a", "1111"): b"film a", FilmName("0b0b", "2222"): b"film b"}
OTHER_PIXELS = FilmName("0a0a", "3333")
KINDS = ("sc", "sr")
STEPS = ("rename", "replace", "unlink", "fsync", "mkdir", "rmdir")


class Killed(BaseException):
    """The process is gone."""


@pytest.fixture(autouse=True)
def _no_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs, and shows nothing: these processes die, their machine does not."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@contextmanager
def killed_before(step: int) -> Iterator[Counter[str]]:
    """Every call that changes the disk is counted; from number ``step`` on there are none: nobody is left to make
    them."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(os, name) for name in STEPS}

    def dying(name: str) -> Callable[..., object]:
        def call(*words: object, **named: object) -> object:
            if counts.total() >= step:
                raise Killed
            counts[name] += 1
            return originals[name](*words, **named)

        return call

    for name in STEPS:
        setattr(os, name, dying(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


class World:
    """What is outside of the process: a sender that repeats what was not acknowledged, a receiver that keeps all."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.acknowledged: set[FilmName] = set()
        self.received: Counter[tuple[str, str]] = Counter()

    def live(self) -> None:
        """One life of the service, from its start to when nothing waits."""
        spool = Spool(self.root, RECIPE)
        for name, data in {**FILMS, OTHER_PIXELS: b"another film"}.items():
            if name not in self.acknowledged:
                spool.receive(name, data)
                self.acknowledged.add(name)
        made = {}
        for name in spool.claim(10, 1, 0):
            assert (spool.root / spool.film(name)).read_bytes() == FILMS[name]
            made[name] = {kind: f"{kind} of {name}".encode() for kind in KINDS}
        spool.commit(made)
        for result in spool.next_results(10, 0):
            for kind, path in spool.objects(result).items():
                assert path.read_bytes() == f"{kind} of {result.name}".encode()
                self.received[result.name.film, kind] += 1
                spool.acknowledge(result, [kind])

    def check(self) -> None:
        spool = Spool(self.root, RECIPE)
        waiting = spool.counts()
        assert waiting == {"incoming": 0, "scored": 0, "outgoing": 0, "failed": 0, "quarantine": 1}
        assert set(self.received) == {(name.film, kind) for name in FILMS for kind in KINDS}, "nothing lost"
        assert {path.stem for path in (self.root / "done").rglob("*.json")} == {name.film for name in FILMS}
        left = [path for path in self.root.rglob("*") if path.is_file() and path.suffix != ".json"]
        assert [path.parent.name for path in left] == ["quarantine"], "nothing of a delivered film is kept"
        for name in FILMS:
            assert spool.receive(name, b"again") is Receipt.DUPLICATE


def steps_of_a_life(root: Path) -> int:
    world = World(root)
    with killed_before(10**6) as counts:
        world.live()
    world.check()
    assert max(world.received.values()) == 1, "nothing doubled when nothing fails"
    return counts.total()


def test_a_kill_before_any_step_loses_nothing(tmp_path: Path) -> None:
    steps = steps_of_a_life(tmp_path / "whole")
    assert steps > 40
    for step in range(steps):
        world = World(tmp_path / str(step))
        with killed_before(step), pytest.raises(Killed):
            world.live()
        world.live()
        world.check()
        assert world.received.total() <= len(FILMS) * len(KINDS) + 1, "only what was under way is sent again"


@pytest.mark.parametrize("second", [1, 4, 9, 15])
def test_a_kill_while_it_recovers_from_one_loses_nothing(tmp_path: Path, second: int) -> None:
    for step in range(3, steps_of_a_life(tmp_path / "whole"), 2):
        world = World(tmp_path / str(step))
        with killed_before(step), pytest.raises(Killed):
            world.live()
        with killed_before(second), suppress(Killed):  # it may have less left to do
            world.live()
        world.live()
        world.check()


def commit(spool: Spool, name: FilmName) -> ResultName:
    spool.claim(10, 1, 0)
    spool.commit({name: {"sr": b"report"}})
    [result] = spool.next_results(1, 0)
    return result


A = FilmName("0a0a", "1111")


def test_a_second_delivery_changes_nothing_in_any_state(tmp_path: Path) -> None:
    spool = Spool(tmp_path, RECIPE)
    assert spool.receive(A, b"film") is Receipt.NEW
    assert spool.receive(A, b"film") is Receipt.DUPLICATE
    result = commit(spool, A)
    assert spool.receive(A, b"film") is Receipt.DUPLICATE
    spool.acknowledge(result, ["sr"])
    assert spool.receive(A, b"film") is Receipt.DUPLICATE
    assert not spool.has_work()


def test_a_film_delivered_while_it_comes_again_is_not_scored_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, RECIPE)
    spool.receive(A, b"film")
    result = commit(spool, A)
    real, looks = spool._record, list[str]()

    def slow(film: str) -> dict[str, Any]:
        looks.append(film)
        found = real(film)
        if len(looks) == 1:  # the courier is done just after this look
            spool.acknowledge(result, ["sr"])
        return found

    monkeypatch.setattr(spool, "_record", slow)
    assert spool.receive(A, b"film") is Receipt.DUPLICATE
    assert not spool.has_work()


def test_another_recipe_scores_a_film_again(tmp_path: Path) -> None:
    first = Spool(tmp_path, RECIPE)
    first.receive(A, b"film")
    result = commit(first, A)
    second = Spool(tmp_path, "bb22")
    assert second.receive(A, b"film") is Receipt.NEW, "while the first result is still on its way"
    own = commit(second, A)
    assert own == result, "the earlier one first"
    second.acknowledge(own, ["sr"])
    [later] = second.next_results(5, 0)
    assert later.recipe == "bb22"
    second.acknowledge(later, ["sr"])
    assert Spool(tmp_path, RECIPE).receive(A, b"film") is Receipt.DUPLICATE
    assert Spool(tmp_path, "bb22").receive(A, b"film") is Receipt.DUPLICATE


@pytest.mark.parametrize("until", ["received", "scored", "delivered", "failed"])
def test_the_same_id_with_other_pixels_is_quarantined_whatever_became_of_the_first(tmp_path: Path, until: str) -> None:
    spool = Spool(tmp_path, RECIPE)
    spool.receive(A, b"film")
    if until == "failed":
        spool.fail_film(A, "torn")
    elif until != "received":
        result = commit(spool, A)
        if until == "delivered":
            spool.acknowledge(result, ["sr"])
    for _ in range(2):
        assert Spool(tmp_path, RECIPE).receive(FilmName("0a0a", "9999"), b"other") is Receipt.QUARANTINED
    assert [path.read_bytes() for path in (tmp_path / "quarantine").iterdir()] == [b"other"]


def test_what_failed_can_be_tried_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path, RECIPE)
    spool.receive(A, b"film")
    result = commit(spool, A)
    spool.fail_result(result, "sr: status 0xC000")
    b = FilmName("0b0b", "2222")
    spool.receive(b, b"torn film")
    spool.claim(1, 1, 0)
    spool.fail_film(b, "is torn")
    assert spool.counts()["failed"] == 2 and not spool.has_work()
    assert "0xC000" in (tmp_path / "failed" / str(result) / "reason.json").read_text()
    again = Spool(tmp_path, RECIPE)
    assert again.retry_failed() == 2 and again.counts()["failed"] == 0
    assert again.next_results(5, 0) == [result] and list(again.objects(result)) == ["sr"]
    assert again.claim(5, 1, 0) == [b] and (tmp_path / again.film(b)).read_bytes() == b"torn film"


def test_a_film_that_failed_and_comes_again_leaves_no_failure_behind(tmp_path: Path) -> None:
    spool = Spool(tmp_path, RECIPE)
    spool.receive(A, b"film")
    spool.claim(1, 1, 0)
    spool.fail_film(A, "cannot be scored")
    assert spool.receive(A, b"film") is Receipt.NEW
    spool.acknowledge(commit(spool, A), ["sr"])
    assert spool.counts()["failed"] == 0


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, RECIPE)

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            spool.receive(A, b"film")
    assert not list((tmp_path / "incoming").iterdir())
    assert spool.receive(A, b"film") is Receipt.NEW


def test_films_are_shared_among_those_who_score(tmp_path: Path) -> None:
    spool = Spool(tmp_path, RECIPE)
    names = [FilmName(f"{number:04x}", "11") for number in range(5)]
    for name in names:
        spool.receive(name, b"film")
    assert spool.claim(32, 2, 0) == names[:3] and spool.claim(32, 2, 0) == names[3:4]
    spool.put_back(names[:1])
    assert spool.claim(1, 1, 0) == names[:1]
    assert Spool(tmp_path, RECIPE).claim(9, 1, 0) == names, "a start begins with those that wait longest"


def test_the_spool_is_private(tmp_path: Path) -> None:
    root = tmp_path / "spool"
    Spool(root, RECIPE).receive(A, b"film")
    assert all(folder.stat().st_mode & 0o077 == 0 for folder in [root, *root.iterdir()])


def test_one_sync_serves_all_who_ask_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, count = threading.Event(), threading.Event(), Counter[str]()

    def slow(_: Path) -> None:
        count["syncs"] += 1
        begun.set()
        may_end.wait(20)

    monkeypatch.setattr("afire.pacs.sync.sync", slow)
    shared = SharedSync(tmp_path)
    threads = [threading.Thread(target=shared) for _ in range(6)]
    threads[0].start()
    begun.wait(20)
    for thread in threads[1:]:  # their renames may be later than the sync that is under way
        thread.start()
    time.sleep(0.2)
    may_end.set()
    for thread in threads:
        thread.join(20)
    assert count["syncs"] == 2 and not any(thread.is_alive() for thread in threads)


def test_who_waited_for_a_sync_that_failed_syncs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, answers = threading.Event(), threading.Event(), list[str]()

    def failing_first(_: Path) -> None:
        first = not begun.is_set()
        begun.set()
        may_end.wait(20)
        if first:
            raise OSError(28, "No space left on device")

    def ask() -> None:
        try:
            shared()
            answers.append("safe")
        except OSError:
            answers.append("full")

    monkeypatch.setattr("afire.pacs.sync.sync", failing_first)
    shared = SharedSync(tmp_path)
    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    begun.wait(20)
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.2)
    may_end.set()
    for thread in threads:
        thread.join(20)
    assert sorted(answers) == ["full", "safe", "safe"]


def test_results_that_wait_to_be_sent_are_queued_once(tmp_path: Path) -> None:
    """They had failed and were put back, while their film had come again and was not scored yet: two couriers would
    take them at the same time, and one tidy up after the other."""
    spool = Spool(tmp_path, "aa")
    name = FilmName("0001", "11")
    spool.receive(name, b"film")
    spool.commit({name: {"sr": b"results"}})
    [result] = spool.next_results(8, 0)
    spool.fail_result(result, "refused")
    assert spool.receive(name, b"film") is Receipt.NEW and spool.retry_failed() == 1
    spool.commit({name: {"sr": b"results"}})
    assert spool.next_results(8, 0) == [result] and spool.counts()["scored"] == 0

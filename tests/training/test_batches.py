"""Batches: the same films for any number of processes, read ahead, and bad films dealt with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from afire.data.pack import IMAGES, DecodedFilms, PackedFilms
from afire.errors import UserError
from afire.training.batches import Plan, Prefetcher

ROWS = np.arange(0, 60, 2)


def rows_of(plan: Plan, step: int) -> list[np.ndarray]:
    return [rows for rows, _ in plan.share(step)]


def test_a_film_that_comes_twice_in_a_batch_is_two_draws() -> None:
    plan = Plan(np.arange(5), seed=0, batch_size=8, passes=4)
    ((rows, draws),) = plan.share(0)
    assert len(set(rows)) == 5 and len(set(draws)) == 8
    assert (draws % 5 == rows).all()
    ((rows, draws),) = Plan(np.arange(8), seed=0, batch_size=8, passes=3).share(1)
    assert len(set(rows)) == 8 and np.array_equal(rows, draws)  # a pass has every film once
    halves = [Plan(np.arange(5), 0, 8, world=2, rank=rank, passes=4).share(0)[0][1] for rank in (0, 1)]
    assert np.array_equal(np.concatenate(halves), plan.share(0)[0][1])


def test_processes_share_the_global_batch() -> None:
    one = Plan(ROWS, seed=1, batch_size=8)
    two = [Plan(ROWS, seed=1, batch_size=8, world=2, rank=rank) for rank in (0, 1)]
    assert one.steps_per_epoch == two[0].steps_per_epoch == 3
    for step in range(7):
        together = np.concatenate([rows_of(plan, step)[0] for plan in two])
        assert np.array_equal(rows_of(one, step)[0], together)


def test_accumulated_parts_are_consecutive_batches() -> None:
    one, two = Plan(ROWS, 1, batch_size=8), Plan(ROWS, 1, batch_size=8, accumulate=2)
    assert np.array_equal(rows_of(one, 1)[0], np.concatenate(rows_of(two, 1)))


def test_an_epoch_uses_each_film_at_most_once_and_epochs_differ() -> None:
    plan = Plan(ROWS, seed=1, batch_size=8)
    first, second = (np.concatenate([rows_of(plan, e * 3 + s)[0] for s in range(3)]) for e in (0, 1))
    assert len(set(first)) == 24 and set(first) <= set(ROWS) and not np.array_equal(first, second)
    assert not np.array_equal(first, np.concatenate([rows_of(Plan(ROWS, 2, 8), s)[0] for s in range(3)]))


def test_too_few_films_is_a_message() -> None:
    with pytest.raises(UserError, match=r"30 films are fewer than one batch of 64; lower training\.batch_size"):
        Plan(ROWS, seed=1, batch_size=64, world=2)


def test_batches_come_in_order_and_hold_the_films(packed: Path) -> None:
    films = PackedFilms(packed)
    plan = Plan(np.arange(40), seed=0, batch_size=8)
    reader = Prefetcher(films, plan, 2, 9, "stop")
    seen = list(reader)
    assert len(seen) == 7
    for step, (batch,) in enumerate(seen, start=2):
        assert np.array_equal(batch.rows, rows_of(plan, step)[0])
        assert (films.to_unit(batch.raw) == films.batch(batch.rows)).all()
    reader.close()


def test_closing_early_ends_the_thread(packed: Path) -> None:
    reader = Prefetcher(PackedFilms(packed), Plan(np.arange(40), 0, 8), 0, 10_000, "stop")
    next(iter(reader))
    reader.close()
    assert not reader._thread.is_alive()


def alter(packed: Path, row: int) -> None:
    images = np.load(packed / IMAGES, mmap_mode="r+")
    images[row, 3, 3] ^= 255
    images.flush()


def test_an_altered_film_is_replaced_and_counted(packed: Path, caplog: pytest.LogCaptureFixture) -> None:
    alter(packed, 7)
    films, plan = PackedFilms(packed), Plan(np.arange(40), 0, 8)
    reader = Prefetcher(films, plan, 0, 10, "skip")
    batches = [batch for (batch,) in reader]
    assert list(reader.reader.bad) == [7]
    assert all(7 not in batch.rows and len(batch.rows) == 8 for batch in batches)
    assert sum((batch.rows == 8).sum() for batch in batches[:5]) == 2  # its own turn, and in place of film 7
    assert caplog.text.count("film007.png") == 1


def test_an_altered_film_stops_when_asked(packed: Path) -> None:
    alter(packed, 7)
    reader = Prefetcher(PackedFilms(packed), Plan(np.arange(40), 0, 8), 0, 10, "stop")
    with pytest.raises(UserError, match=r"film007\.png.*run\.on_bad_film=skip"):
        list(reader)
    reader.close()


def test_an_unreadable_file_is_replaced_when_films_are_decoded(packed: Path) -> None:
    manifest = PackedFilms(packed).manifest
    (manifest.root / "film011.png").write_bytes(b"torn")
    reader = Prefetcher(DecodedFilms(manifest, 32), Plan(np.arange(40), 0, 8), 0, 5, "skip")
    rows = np.concatenate([batch.rows for (batch,) in reader])
    assert 11 not in rows and list(reader.reader.bad) == [11]


def test_no_readable_film_left_is_a_sentence(packed: Path) -> None:
    manifest = PackedFilms(packed).manifest
    for path in manifest.root.glob("*.png"):
        path.write_bytes(b"torn")
    reader = Prefetcher(DecodedFilms(manifest, 32), Plan(np.arange(40), 0, 8), 0, 5, "skip")
    with pytest.raises(UserError, match="no film can be read any more"):
        list(reader)

"""A bank that moves on: which film is in a slot follows from the epoch alone, drawn ahead or not."""

from __future__ import annotations

import copy
import time
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from afire.data.phantom import PhantomBank, RenewedBank
from afire.data.phantom.bank import draw_piece
from afire.data.phantom.renewal import _Coming

COUNT = 7


def slow_schedule(count: int, renewed: float, epochs: int) -> list[list[int]]:
    """Of each epoch the number of the film in each slot: slots are replaced in turn, one film at a time."""
    per_epoch = 0 if renewed == 0 else max(1, round(renewed * count))
    generation, slot, schedule = [0] * count, 0, []
    for epoch in range(epochs):
        for _ in range(per_epoch if epoch else 0):
            generation[slot] += 1
            slot = (slot + 1) % count
        schedule.append([n + count * generation[n] for n in range(count)])
    return schedule


def numbered(seed: int, count: int, size: int, cell: int, *_: object, first: int = 0, **__: Any) -> PhantomBank:
    bank = PhantomBank.blank(count, size, cell)
    bank.severity[:, 0] = np.arange(first, first + count)
    return bank


def same(first: PhantomBank, second: PhantomBank) -> bool:
    return all(np.array_equal(getattr(first, each.name), getattr(second, each.name)) for each in fields(PhantomBank))


@pytest.mark.parametrize("renewed", [0.0, 0.01, 0.3, 0.6, 1.0])
def test_which_film_is_where_equals_the_reference(renewed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def draw(*arguments: Any, first: int = 0, **settings: Any) -> PhantomBank:
        drawn.append(arguments[1])
        return numbered(*arguments, first=first, **settings)

    monkeypatch.setattr(PhantomBank, "draw", draw)
    expected = slow_schedule(COUNT, renewed, 9)
    bank = RenewedBank(0, COUNT, 32, 8, 1, renewed=renewed, epochs=9)
    for epoch in (0, 0, 1, 2, 3, 5, 8, 2, 4):  # on, further on, and back again
        assert bank.at(epoch).severity[:, 0].tolist() == expected[epoch], epoch
        resumed = RenewedBank(0, COUNT, 32, 8, 1, renewed=renewed, epochs=9)
        assert resumed.at(epoch).severity[:, 0].tolist() == expected[epoch]
    if renewed == 1.0:
        numbers = [number for films in expected for number in films]
        assert len(set(numbers)) == len(numbers), "no film is seen in two epochs"
    if renewed == 0.3:
        assert drawn[:5] == [7, 7, 7, 2, 7], "only what is new is drawn"


def test_a_share_of_nothing_is_the_bank_as_it_was() -> None:
    plain = PhantomBank.draw(5, 6, 32, 8, 1, 0.3)
    bank = RenewedBank(5, 6, 32, 8, 1, 0.3)
    assert same(bank.at(0), plain) and bank.at(4) is bank.at(0)


def test_only_the_first_bank_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("afire.progress._mode", "lines")
    bank = RenewedBank(3, 6, 32, 8, 1, renewed=0.5, epochs=3)
    bank.at(0)
    assert "drawing phantoms: 6/6 films" in capsys.readouterr().err
    bank.at(1)
    assert not capsys.readouterr().err


def test_films_drawn_ahead_are_those_drawn_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afire.data.phantom.renewal.WORTH_A_PROCESS", 4)
    ahead = RenewedBank(3, 20, 32, 8, 2, renewed=1.0, epochs=3)
    assert same(ahead.at(0), PhantomBank.draw(3, 20, 32, 8, 1)) and ahead._coming is not None
    assert same(ahead.at(1), PhantomBank.draw(3, 20, 32, 8, 1, first=20))
    assert copy.deepcopy(ahead)._pool is None
    assert same(ahead.at(0), PhantomBank.draw(3, 20, 32, 8, 1)), "another epoch than the one drawn ahead"
    assert same(ahead.at(2), PhantomBank.draw(3, 20, 32, 8, 1, first=40))
    assert ahead._coming is None, "nothing after the last epoch"
    assert ahead._pool is not None
    ahead.close()
    ahead.close()
    assert ahead._pool is None


def test_what_nobody_has_begun_is_drawn_by_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afire.data.phantom.renewal.WORTH_A_PROCESS", 4)
    bank = RenewedBank(3, 60, 32, 8, 1, renewed=1.0, epochs=2)
    bank.at(0)  # the process that draws ahead takes a second to start, and has begun few of 15 jobs by then
    drawn, take = [], _Coming._take

    def noted(coming: _Coming) -> Any:
        job = take(coming)
        drawn.extend([job[2]] if job is not None else [])
        return job

    monkeypatch.setattr(_Coming, "_take", noted)
    assert same(bank.at(1), PhantomBank.draw(3, 60, 32, 8, 1, first=60))
    assert drawn and drawn[0] == 56 and drawn == sorted(drawn, reverse=True), "from the last one on"
    bank.close()


@pytest.mark.parametrize("idle", [False, True])
def test_what_a_process_that_dies_has_left_is_drawn_without_it(
    idle: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("afire.data.phantom.renewal.WORTH_A_PROCESS", 4)
    bank = RenewedBank(3, 32, 32, 8, 2, renewed=1.0, epochs=4)
    bank.at(0)
    assert bank._pool is not None and bank._coming is not None
    processes, take = [*bank._pool._processes.values()], _Coming._take

    def killed(coming: _Coming) -> Any:
        """After one piece was drawn here: one that others may no longer draw."""
        job = take(coming)
        processes[0].kill()
        return job

    if idle:
        while coming_left(bank):
            time.sleep(0.01)
        processes[0].kill()
        processes[1].join(20)  # the pool has noticed
    else:
        monkeypatch.setattr(_Coming, "_take", killed)
    for epoch in (1, 2, 3):
        assert same(bank.at(epoch), PhantomBank.draw(3, 32, 32, 8, 1, first=32 * epoch))
        monkeypatch.setattr(_Coming, "_take", take)
    assert "a process that draws phantoms ahead has died" in caplog.text
    bank.close()
    processes[1].join(20)
    assert processes[1].exitcode is not None, "the program would wait for it at its end"


def coming_left(bank: RenewedBank) -> bool:
    assert bank._coming is not None
    return bool(bank._coming._waiting) or not all(future.done() for _, future in bank._coming._given)


def test_an_error_of_a_drawing_process_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afire.data.phantom.renewal.WORTH_A_PROCESS", 4)
    bank = RenewedBank(3, 32, 32, 8, 2, renewed=1.0, epochs=3)
    bank.at(0)
    bank.normal_share = "half"  # type: ignore[assignment]
    bank.at(1)  # what is drawn ahead now fails
    with pytest.raises(TypeError):
        bank.at(2)
    bank.close()


def test_pieces_are_named_by_where_they_start() -> None:
    start, piece = draw_piece(5, 10, 3, 2, 32, 8, 0.5, ("Mass",))
    assert start == 3 and same(piece, PhantomBank.draw(5, 2, 32, 8, 1, first=13, among=["Mass"]))

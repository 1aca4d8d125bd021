"""A bank holds what the phantom draws, in bytes and cells, whoever drew it."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from afire.data.phantom import ANATOMY, DISEASES, PhantomBank, draw_batch
from afire.data.phantom.bank import pooled
from afire.errors import UserError


@pytest.fixture(scope="module")
def bank() -> PhantomBank:
    return PhantomBank.draw(5, 20, 32, 4, workers=1)


def same(first: PhantomBank, second: PhantomBank) -> bool:
    return all(np.array_equal(getattr(first, each.name), getattr(second, each.name)) for each in fields(PhantomBank))


def test_a_bank_holds_the_films_of_its_numbers(bank: PhantomBank) -> None:
    batch = draw_batch(5, range(20), 32)
    assert len(bank) == 20 and bank.images.dtype == bank.anatomy.dtype == bank.findings.dtype == np.uint8
    assert bank.anatomy.shape == (20, len(ANATOMY), 8, 8) and bank.findings.shape == (20, len(DISEASES), 8, 8)
    assert np.abs(bank.images / 255 - batch.images).max() <= 0.5 / 255 + 1e-6
    np.testing.assert_array_equal(bank.labels, batch.labels)
    np.testing.assert_array_equal(bank.severity, batch.severity)
    np.testing.assert_array_equal(bank.normal, batch.normal)
    for film, part, row, column in ((0, 6, 4, 5), (7, 0, 2, 2), (19, 11, 3, 4)):
        share = batch.anatomy[film, part, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].mean()
        assert bank.anatomy[film, part, row, column] == round(255 * share)
    np.testing.assert_array_equal(bank.findings, pooled(batch.findings, 4))
    ill = ~bank.normal
    assert bank.any_finding[ill].any(axis=(1, 2)).all() and not bank.any_finding[~ill].any()


def test_processes_and_pieces_change_nothing(bank: PhantomBank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afire.data.phantom.bank._WORTH_A_PROCESS", 10)
    assert same(PhantomBank.draw(5, 20, 32, 4, workers=2), bank)
    later = PhantomBank.draw(5, 3, 32, 4, workers=1, first=17)
    np.testing.assert_array_equal(later.images, bank.images[17:])
    np.testing.assert_array_equal(later.findings, bank.findings[17:])


def test_what_is_asked_for_is_drawn() -> None:
    assert PhantomBank.draw(1, 3, 32, 8, 1, normal_share=1.0).normal.all()
    masses = PhantomBank.draw(1, 3, 32, 8, 1, normal_share=0.0, among=["Mass"])
    assert (masses.labels.sum(axis=1) == 1).all() and masses.labels[:, DISEASES.index("Mass")].all()


@pytest.mark.parametrize(
    ("count", "size", "cell", "share", "says"),
    [
        (0, 32, 4, 0.5, "empty"),
        (2, 16, 4, 0.5, "16 px"),
        (2, 32, 5, 0.5, "cells of 5 px"),
        (2, 32, 4, 1.5, "normal share"),
    ],
)
def test_what_cannot_be_drawn_is_refused(count: int, size: int, cell: int, share: float, says: str) -> None:
    with pytest.raises(UserError, match=says):
        PhantomBank.draw(0, count, size, cell, 1, share)

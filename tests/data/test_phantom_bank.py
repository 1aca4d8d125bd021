"""Batches and banks of drawn films: each film is what it would be alone, whichever process drew it."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from afire.data.phantom import ANATOMY, DISEASES, PhantomBank, draw_batch, draw_film
from afire.data.phantom.bank import pooled
from afire.data.phantom.style import PLAIN
from afire.errors import UserError


def test_a_batch_holds_its_films() -> None:
    batch = draw_batch(3, [4, 0, 9], 48)
    assert len(batch) == 3
    assert batch.images.shape == (3, 1, 48, 48) and batch.images.dtype == np.float32
    assert batch.anatomy.shape == (3, len(ANATOMY), 48, 48)
    assert batch.findings.shape == (3, len(DISEASES), 48, 48)
    for row, number in enumerate((4, 0, 9)):
        film = draw_film(3, number, 48)
        np.testing.assert_array_equal(batch.images[row, 0], film.image)
        np.testing.assert_array_equal(batch.anatomy[row], film.anatomy)
        assert dict(zip(DISEASES, batch.labels[row], strict=True)) == film.labels
        for place, name in enumerate(DISEASES):
            expected = film.masks.get(name, np.zeros((48, 48), bool))
            np.testing.assert_array_equal(batch.findings[row, place], expected)
            assert batch.severity[row, place] == pytest.approx(film.severity.get(name, 0.0))
        assert batch.normal[row] == film.normal
        assert (batch.sittings[row], batch.styles[row], batch.devices[row]) == (film.sitting, film.style, film.devices)
        np.testing.assert_array_equal(batch.part("heart")[row], film.where("heart"))


def test_a_film_does_not_depend_on_its_batch() -> None:
    whole = draw_batch(7, range(8), 40)
    for parts in ([7, 2], [2], [5, 2, 2, 1]):
        piece = draw_batch(7, parts, 40)
        np.testing.assert_array_equal(piece.images, whole.images[parts])
        np.testing.assert_array_equal(piece.anatomy, whole.anatomy[parts])
        np.testing.assert_array_equal(piece.findings, whole.findings[parts])


def test_what_is_asked_for_holds_for_every_film() -> None:
    batch = draw_batch(1, range(5), 40, diseases=["Mass"], severity=0.3, style=PLAIN)
    assert (batch.labels.sum(axis=1) == 1).all() and batch.finding("Mass").any(axis=(1, 2)).all()
    assert (batch.severity[:, DISEASES.index("Mass")] == np.float32(0.3)).all()
    assert set(batch.styles) == {PLAIN}
    assert draw_batch(1, range(5), 40, normal_share=1.0).normal.all()
    some = draw_batch(1, range(12), 32, normal_share=0.0, among=["Edema", "Cavity"])
    present = {name for name, any_film in zip(DISEASES, some.labels.any(axis=0), strict=True) if any_film}
    assert present == {"Edema", "Cavity"}


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(UserError, match="at least one"):
        draw_batch(0, [], 32)


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
    monkeypatch.setattr("afire.data.phantom.bank.WORTH_A_PROCESS", 10)
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

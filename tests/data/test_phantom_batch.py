"""Batches of drawn films: each film is what it would be alone."""

from __future__ import annotations

import numpy as np
import pytest

from afire.data.phantom import ANATOMY, DISEASES, draw_batch, draw_film
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

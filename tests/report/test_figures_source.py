"""Films of a figure: those of the tasks' subsets, drawn fairly and named in the record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.report.figures.files import Source
from tests.tasks.conftest import films, packed  # noqa: F401 - fixtures


def test_subsets_are_those_of_the_tasks(films: PackedFilms, packed: Path) -> None:  # noqa: F811
    test, split = Source(packed).rows(films)
    assert set(films.manifest.table["split"].iloc[test]) == {"test"} and split
    val, same = Source(packed, subset="val").rows(films)
    assert same == split and not set(test) & set(val) and len(val)
    everything, no_split = Source(packed, subset="all").rows(films)
    assert len(everything) == len(films) and no_split is None


def test_a_draw_can_be_repeated_and_is_fair() -> None:
    def draw(most: int, seed: int = 4) -> np.ndarray:
        return Source(Path("pack"), most=most, seed=seed).draw(rows)

    rows = np.arange(100, 200)
    first, again = draw(10), draw(10)
    assert np.array_equal(first, again) and len(set(first.tolist())) == 10 and (np.diff(first) > 0).all()
    assert np.array_equal(draw(1000), rows)
    counts = np.zeros(200)
    for seed in range(500):
        counts[draw(50, seed)] += 1
    assert counts[100:].min() > 180 and counts[100:].max() < 320
    with pytest.raises(UserError, match="at least 1"):
        draw(0)


def test_the_record_names_the_films(films: PackedFilms, packed: Path) -> None:  # noqa: F811
    first, second = (Source(packed).record(films, np.array(rows), 9, "s") for rows in ([1, 2], [1, 3]))
    assert first["films"] == 2 and first["drawn_from"] == 9 and first["films_hash"] != second["films_hash"]
    assert first["part"] == "test" and Source(packed).record(films, np.array([1]), 9, "s", "train")["part"] == "train"

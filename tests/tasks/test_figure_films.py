from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from afire.config import Config
from afire.data.pack import PackedFilms
from afire.errors import UserError
from afire.tasks.figure_data import describe_backbone, describe_films, draw_rows, load_backbones, part_rows
from tests.figure_parts import make_run


def test_parts_are_those_of_the_tasks(films: PackedFilms) -> None:
    test, split = part_rows(films, "test")
    assert set(films.manifest.table["split"].iloc[test]) == {"test"} and split
    val, same = part_rows(films, "val")
    assert same == split and not set(test) & set(val) and len(val)
    everything, none = part_rows(films, "all")
    assert len(everything) == len(films) and none is None


def test_a_draw_can_be_repeated_and_is_fair() -> None:
    rows = np.arange(100, 200)
    first, again = (draw_rows(rows, 10, np.random.default_rng(4)) for _ in range(2))
    assert np.array_equal(first, again) and len(set(first.tolist())) == 10 and (np.diff(first) > 0).all()
    assert np.array_equal(draw_rows(rows, 1000, np.random.default_rng(4)), rows)
    counts = np.zeros(200)
    for seed in range(500):
        counts[draw_rows(rows, 50, np.random.default_rng(seed))] += 1
    assert counts[100:].min() > 180 and counts[100:].max() < 320
    with pytest.raises(UserError, match="at least 1"):
        draw_rows(rows, 0, np.random.default_rng(0))


def test_the_record_names_the_films(films: PackedFilms) -> None:
    one = describe_films(films, "pack", "test", "s", np.array([1, 2]), 9)
    other = describe_films(films, "pack", "test", "s", np.array([1, 3]), 9)
    assert one["films"] == 2 and one["drawn_from"] == 9 and one["films_hash"] != other["films_hash"]


def test_random_weights_take_the_architecture_beside_them(smallest: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no architecture"):
        _ = load_backbones({"random": "random"})["random"].trunk
    found = load_backbones({"a": "random", "b": "random"}, smallest, seed=3)
    assert list(found) == ["a", "b"] and found["a"].hash == found["b"].hash
    with pytest.raises(UserError, match="at least one"):
        load_backbones({})
    beside = load_backbones({"x": "random", "run": make_run(tmp_path / "run")}, seed=3)
    assert list(beside) == ["x", "run"] and beside["x"].config.encoder == beside["run"].config.encoder
    assert describe_backbone(beside["run"])["clusters"] == 6 and describe_backbone(beside["x"])["clusters"] is None
